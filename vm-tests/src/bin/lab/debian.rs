//! Which Debian this machine is and which mirror its apt sources name.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The archives that this machine gets its packages from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mirrors {
    /// Of the machine's own release.
    pub(crate) codename: String,
    /// Serves every release.
    pub(crate) main: String,
    /// Serves the `-security` suites, when the machine uses them.
    pub(crate) security: Option<String>,
}

impl Mirrors {
    pub(crate) fn of_this_machine() -> Result<Self> {
        let release = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
        let field = |name: &str| {
            release.lines().find_map(|line| {
                Some(
                    line.strip_prefix(name)?
                        .strip_prefix('=')?
                        .trim_matches('"')
                        .to_owned(),
                )
            })
        };
        if field("ID").as_deref() != Some("debian") {
            bail!("the lab builds its guest from Debian's packages and needs a Debian machine");
        }
        let codename = field("VERSION_CODENAME").context("/etc/os-release has no codename")?;
        let mut sources = Vec::new();
        for path in source_files() {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            if path
                .extension()
                .is_some_and(|extension| extension == "sources")
            {
                sources.extend(parse_deb822(&text));
            } else {
                sources.extend(parse_one_line(&text));
            }
        }
        Self::choose(codename, &sources)
    }

    fn choose(codename: String, sources: &[Source]) -> Result<Self> {
        let serving = |suite: &str| {
            sources
                .iter()
                .filter(|source| {
                    source
                        .components
                        .iter()
                        .any(|component| component == "main")
                })
                .find(|source| source.suites.iter().any(|known| known == suite))
                .and_then(|source| source.uris.iter().find(|uri| !uri.starts_with("cdrom:")))
                .cloned()
        };
        let Some(main) = serving(&codename) else {
            bail!("no apt source of this machine serves the main component of {codename}");
        };
        let security = serving(&format!("{codename}-security"));
        Ok(Self {
            codename,
            main,
            security,
        })
    }
}

/// What one entry of apt's sources offers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Source {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
}

fn source_files() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        found.sort();
        files.extend(found);
    }
    files.retain(|path| path.exists() && is_source_file(path));
    files
}

fn is_source_file(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "list" || extension == "sources")
}

/// The stanzas of a `.sources` file (sources.list(5)).
fn parse_deb822(text: &str) -> Vec<Source> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines
        .split(|line| line.trim().is_empty())
        .filter_map(|stanza| {
            let mut source = Source::default();
            let (mut field, mut binary, mut enabled) = (String::new(), false, true);
            for line in stanza {
                let value = match line.split_once(':') {
                    Some((name, value)) if !line.starts_with([' ', '\t']) => {
                        field = name.trim().to_ascii_lowercase();
                        value
                    }
                    _ => line,
                };
                let words = value.split_whitespace().map(str::to_owned);
                match field.as_str() {
                    "types" => binary |= value.split_whitespace().any(|kind| kind == "deb"),
                    "enabled" => enabled = !matches!(value.trim(), "no" | "false" | "0" | "off"),
                    "uris" => source.uris.extend(words),
                    "suites" => source.suites.extend(words),
                    "components" => source.components.extend(words),
                    _ => {}
                }
            }
            (binary && enabled && !source.uris.is_empty()).then_some(source)
        })
        .collect()
}

/// The lines of a `.list` file: `deb [option=value ...] URI SUITE COMPONENT...`
fn parse_one_line(text: &str) -> Vec<Source> {
    text.lines()
        .filter_map(|line| {
            let line = line.split('#').next()?.trim();
            let mut rest = line
                .strip_prefix("deb")?
                .strip_prefix([' ', '\t'])?
                .trim_start();
            if rest.starts_with('[') {
                rest = rest.split_once(']')?.1;
            }
            let mut words = rest.split_whitespace().map(str::to_owned);
            Some(Source {
                uris: vec![words.next()?],
                suites: vec![words.next()?],
                components: words.collect(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_sources_name_the_same_mirrors() {
        let deb822 = "# a comment\nTypes: deb deb-src\nURIs: http://mirror.example/debian\n\
            Suites: bookworm bookworm-updates\nComponents: main\n contrib\n\
            Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n\
            Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\n\
            Components: main\n";
        let one_line = "deb-src http://elsewhere.example bookworm main\n\
            deb cdrom:[Debian]/ bookworm main # the installer's\n\
            deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib\n\
            deb\thttp://mirror.example/security bookworm-security main\n";
        let expected = Mirrors {
            codename: "bookworm".into(),
            main: "http://mirror.example/debian".into(),
            security: Some("http://mirror.example/security".into()),
        };
        let from_deb822 = Mirrors::choose("bookworm".into(), &parse_deb822(deb822)).unwrap();
        assert_eq!(from_deb822, expected);
        let without_cdrom: Vec<Source> = parse_one_line(one_line)
            .into_iter()
            .filter(|source| !source.uris[0].starts_with("cdrom:"))
            .collect();
        assert_eq!(
            Mirrors::choose("bookworm".into(), &without_cdrom).unwrap(),
            expected
        );
    }

    #[test]
    fn a_disabled_stanza_is_not_a_source() {
        assert!(parse_deb822("Enabled: no\nTypes: deb\nURIs: http://x\nSuites: a\n").is_empty());
    }

    #[test]
    fn another_vendors_source_is_no_mirror_of_debian() {
        let other = parse_one_line("deb https://vendor.example/apt stable main\n");
        assert!(Mirrors::choose("bookworm".into(), &other).is_err());
    }
}
