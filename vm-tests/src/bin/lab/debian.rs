//! Finds this machine's Debian release and the mirrors of its apt.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The archives that serve packages to this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mirrors {
    /// The machine's own release.
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
            let mut lines = release.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
            Some(value.trim_matches('"').to_owned())
        };
        if field("ID").as_deref() != Some("debian") {
            bail!("the lab builds its guest from Debian's packages and needs a Debian machine");
        }
        let codename = field("VERSION_CODENAME").context("/etc/os-release has no codename")?;
        // With this option apt reads its sources and downloads nothing.
        let mut apt = Command::new("apt-get");
        apt.args(["--print-uris", "update"]);
        let uris = apt.output().context("apt-get")?;
        if !uris.status.success() {
            let complaint = String::from_utf8_lossy(&uris.stderr);
            bail!("apt-get --print-uris update: {}\n{complaint}", uris.status);
        }
        Self::choose(codename, &String::from_utf8_lossy(&uris.stdout))
    }

    /// The lines of `uris` are `'URI' FILE SIZE HASH`.
    fn choose(codename: String, uris: &str) -> Result<Self> {
        let serving = |suite: &str| {
            let lists = format!("/dists/{suite}/main/binary-");
            let mut uris = uris.lines().filter(|line| !line.starts_with("'cdrom:"));
            let mirror =
                uris.find_map(|line| Some(line.strip_prefix('\'')?.split_once(&lists)?.0))?;
            Some(mirror.to_owned())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirrors_are_those_that_serve_the_releases_main_component() {
        let uris = "\
            'https://vendor.example/apt/dists/bookworm/stable/binary-amd64/Packages.xz' a 0 \n\
            'cdrom:[Debian]/dists/bookworm/main/binary-amd64/Packages.xz' b 0 \n\
            'http://mirror.example/debian/dists/bookworm/InRelease' c 0 \n\
            'http://mirror.example/debian/dists/bookworm/main/binary-amd64/Packages.xz' d 0 \n\
            'http://mirror.example/safe/dists/bookworm-security/main/binary-amd64/Packages.xz' e 0 \n";
        let expected = Mirrors {
            codename: "bookworm".into(),
            main: "http://mirror.example/debian".into(),
            security: Some("http://mirror.example/safe".into()),
        };
        assert_eq!(Mirrors::choose("bookworm".into(), uris).unwrap(), expected);
        assert!(Mirrors::choose("trixie".into(), uris).is_err());
    }
}
