//! A file of credentials, with defaults and with sections for targets and portals.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use zeroize::Zeroizing;

use super::{Credentials, invalid};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Stage};
use crate::id::{Iqn, Portal};
use crate::kernel::worker;

/// The longest file in bytes: a thousand targets with long secrets.
const LONGEST: usize = 1 << 20;

/// The target or portal that a section is for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SectionKey {
    Target(Iqn),
    Portal(Portal),
}

/// Credentials by target and portal.
///
/// The lines are `user=` and `secret=`, and for mutual CHAP `target_secret=` and, to check
/// the target's name, `target_user=`. A line `algorithms=` gives
/// [`Algorithms`](super::Algorithms). A line `[IQN]` or `[PORTAL]` begins the section of
/// that target or portal. A section inherits nothing. The lines before the first section
/// apply to every target without a section. The section of a target goes before that of its
/// portal. Empty lines and lines that begin with `#` are ignored. A value is everything
/// after the first equals sign.
///
/// ```text
/// user=host-7
/// secret=for-all-others
///
/// [iqn.2003-01.org.lunbd:array]
/// user=host-7
/// secret=for-this-target
/// target_secret=what-it-must-know
/// ```
#[derive(Debug, Default)]
pub struct CredentialsFile {
    defaults: Option<Credentials>,
    sections: Vec<(SectionKey, Credentials)>,
    is_open_to_others: bool,
}

impl CredentialsFile {
    /// As [`read`](Self::read), but within `deadline`, on a separate thread. The thread
    /// remains if the file system does not answer.
    ///
    /// # Errors
    /// As for [`read`](Self::read); `TimedOut` at stage `login`.
    pub fn read_within(path: &Path, deadline: Deadline) -> Result<Self> {
        let what = format!("credentials from {}", path.display());
        let path = path.to_owned();
        let read = move || Self::read(&path);
        let last_seen = || "no answer".to_owned();
        worker::run(Stage::Login, &what, deadline, last_seen, read)
    }

    /// Reads the file. **Blocks** as long as its file system does.
    ///
    /// # Errors
    /// `InvalidInput`, naming the line but not its content; `NotPermitted`, and other
    /// errors of reading a file.
    pub fn read(path: &Path) -> Result<Self> {
        let failed = |error: &std::io::Error| Error::io("cannot read credentials", path, error);
        let file = File::open(path).map_err(|error| failed(&error))?;
        let about = file.metadata().map_err(|error| failed(&error))?;
        let is_open_to_others = about.is_file() && about.permissions().mode() & 0o077 != 0;
        if is_open_to_others {
            tracing::warn!(path = %path.display(), "others may read these secrets: chmod 0600");
        }
        // The buffer does not grow, because growing would leave copies of secrets in
        // memory.
        let mut text = Zeroizing::new(Vec::with_capacity(LONGEST + 1));
        let most = u64::try_from(LONGEST + 1).unwrap_or(u64::MAX);
        file.take(most)
            .read_to_end(&mut text)
            .map_err(|error| failed(&error))?;
        if text.len() > LONGEST {
            return Err(invalid("the file is too long for one of credentials").with_path(path));
        }
        let read = Self::parse(&text).map_err(|error| error.with_path(path))?;
        Ok(Self {
            is_open_to_others,
            ..read
        })
    }

    fn parse(text: &[u8]) -> Result<Self> {
        let lines = text.split(|byte| *byte == b'\n').zip(1..);
        let lines = lines.map(|(line, number)| (number, line.strip_suffix(b"\r").unwrap_or(line)));
        let has_text = |(_, line): &(usize, &[u8])| !line.is_empty() && !line.starts_with(b"#");
        let lines: Vec<(usize, &[u8])> = lines.filter(has_text).collect();
        let mut file = Self::default();
        for section in lines.chunk_by(|_, (_, next)| !next.starts_with(b"[")) {
            let Some(((number, first), rest)) = section.split_first() else {
                continue;
            };
            if !first.starts_with(b"[") {
                file.defaults = Credentials::of_lines(section.iter().copied())?;
                continue;
            }
            let at = |what: &str| invalid(&format!("line {number}: {what}"));
            let key = SectionKey::of(first).ok_or_else(|| at("expected [IQN] or [PORTAL]"))?;
            if file.sections.iter().any(|(other, _)| *other == key) {
                return Err(at("this section is there already"));
            }
            let known = Credentials::of_lines(rest.iter().copied())?;
            let known = known.ok_or_else(|| at("this section has no user= and no secret="))?;
            file.sections.push((key, known));
        }
        if file.defaults.is_none() && file.sections.is_empty() {
            return Err(invalid("no line user=NAME and no line secret=SECRET"));
        }
        Ok(file)
    }

    /// The credentials for this target through this portal, or without a target those for
    /// the portal. `None` if the file has neither a section for them nor defaults.
    #[must_use]
    pub fn find(&self, target: Option<&Iqn>, portal: &Portal) -> Option<&Credentials> {
        let of_target = target.and_then(|target| self.section(&SectionKey::Target(target.clone())));
        of_target
            .or_else(|| self.section(&SectionKey::Portal(portal.clone())))
            .or(self.defaults.as_ref())
    }

    fn section(&self, key: &SectionKey) -> Option<&Credentials> {
        let mut sections = self.sections.iter();
        let found = sections.find(|(other, _)| other == key);
        found.map(|(_, known)| known)
    }

    fn defaults(&self) -> Option<&Credentials> {
        self.defaults.as_ref()
    }

    /// Whether the file's permissions let other users read it.
    #[must_use]
    pub fn is_open_to_others(&self) -> bool {
        self.is_open_to_others
    }

    fn no_defaults() -> Error {
        invalid("no user= and no secret= before the first section")
    }

    pub(super) fn no_section(target: Option<&Iqn>, portal: &Portal) -> Error {
        let target = target.map(|target| format!("[{target}] and no section "));
        let target = target.unwrap_or_default();
        invalid(&format!(
            "no section {target}[{portal}], and nothing before the first section"
        ))
    }
}

impl Credentials {
    /// Reads the default credentials of a [`CredentialsFile`], which stand before its
    /// sections.
    ///
    /// # Errors
    /// `InvalidInput`, naming the line but not its content; `NotPermitted`, and other
    /// errors of reading a file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let file = CredentialsFile::read(path)?;
        let none = || CredentialsFile::no_defaults().with_path(path);
        file.defaults().cloned().ok_or_else(none)
    }
}

impl SectionKey {
    fn of(line: &[u8]) -> Option<Self> {
        let name = std::str::from_utf8(line).ok()?;
        let name = name.strip_prefix('[')?.strip_suffix(']')?;
        let target = name.parse().ok().map(Self::Target);
        target.or_else(|| name.parse().ok().map(Self::Portal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::iscsi::Algorithms;

    fn defaults(text: &[u8]) -> Credentials {
        CredentialsFile::parse(text).unwrap().defaults.unwrap()
    }

    #[test]
    fn a_file_gives_one_way_and_mutual_credentials() {
        let one_way = defaults(b"# me\nuser=joe\nsecret= a=b \r\n\n");
        assert_eq!(one_way.user, "joe");
        assert_eq!(one_way.secret.bytes(), b" a=b ");
        assert!(one_way.target.is_none());
        assert_eq!(one_way.algorithms, Algorithms::default());
        let chosen = defaults(b"user=joe\nsecret=a\nalgorithms=SHA3-256,SHA256\n");
        assert_eq!(chosen.algorithms.to_string(), "SHA3-256,SHA256");
        let mutual = defaults(b"user=joe\nsecret=a\ntarget_user=array\ntarget_secret=b");
        let (user, secret) = mutual.target.unwrap();
        assert_eq!(
            (user.as_deref(), secret.bytes()),
            (Some("array"), &b"b"[..])
        );
    }

    #[test]
    fn a_file_that_is_too_long_is_refused_and_not_cut() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut text = b"user=joe\nsecret=a\n#".to_vec();
        text.resize(LONGEST, b'-');
        std::fs::write(file.path(), &text).unwrap();
        let soon = || Deadline::after(std::time::Duration::from_secs(600));
        assert!(CredentialsFile::read_within(file.path(), soon()).is_ok());
        text.push(b'-');
        std::fs::write(file.path(), &text).unwrap();
        let read = CredentialsFile::read_within(file.path(), soon());
        assert_eq!(read.err().unwrap().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_target_has_those_of_its_section_or_of_its_portals_or_those_for_everybody() {
        let text = b"user=all\nsecret=a\n[iqn.2003-01.org.lunbd:Array]\nuser=array\nsecret=b\n\
                     [[::1]:3260]\n# of one portal\nuser=portal\nsecret=c\n";
        let file = CredentialsFile::parse(text).unwrap();
        let [array, other]: [Iqn; 2] =
            ["array", "other"].map(|name| format!("iqn.2003-01.org.lunbd:{name}").parse().unwrap());
        let [its, another]: [Portal; 2] = ["[::1]", "10.0.0.1"].map(|at| at.parse().unwrap());
        let user = |target, portal| &*file.find(target, portal).unwrap().user;
        assert_eq!(user(Some(&array), &its), "array");
        assert_eq!(user(Some(&other), &its), "portal");
        assert_eq!(user(None, &its), "portal");
        assert_eq!(user(Some(&other), &another), "all");
        let text = b"[iqn.2003-01.org.lunbd:array]\nuser=array\nsecret=b\n";
        let file = CredentialsFile::parse(text).unwrap();
        assert!(file.find(Some(&other), &its).is_none());
        let none = CredentialsFile::no_section(Some(&other), &its).to_string();
        for whose in ["[iqn.2003-01.org.lunbd:other]", "[[::1]:3260]"] {
            assert!(none.contains(whose), "{none}");
        }
    }

    #[test]
    fn what_is_wrong_in_a_file_is_said_without_its_secret() {
        for text in [
            "",
            "user=joe",
            "secret=hush",
            "user=joe\nsecret=hush\nsecret=hush",
            "user=joe\nsecret=hush\nhush",
            "user=joe\nsecret=hush\npassword=hush",
            "user=joe\nsecret=hush\ntarget_secret=hush",
            "user=joe\nsecret=hush\ntarget_user=x",
            "algorithms=MD5",
            "user=joe\nsecret=hush\nalgorithms=",
            "user=joe\nsecret=hush\nalgorithms=hush",
            "user=joe\nsecret=hush\nalgorithms=MD5,MD5",
            "user=joe\nsecret=hush\nalgorithms=MD5\nalgorithms=MD5",
            "user=\nsecret=hush",
            "user=joe\nsecret=",
            "[10.0.0.1]",
            "[hush/]\nuser=joe\nsecret=hush",
            "[10.0.0.1\nuser=joe\nsecret=hush",
            "[10.0.0.1]\nuser=joe\nsecret=hush\n[10.0.0.1:3260]\nuser=joe\nsecret=hush",
        ] {
            let error = CredentialsFile::parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text:?}");
            assert!(!error.to_string().contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_file_that_others_may_read_is_known_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("chap");
        std::fs::write(&path, "user=joe\nsecret=hush\n").unwrap();
        for (mode, is_open) in [(0o600, false), (0o640, true), (0o604, true), (0o400, false)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let file = CredentialsFile::read(&path).unwrap();
            assert_eq!(file.is_open_to_others(), is_open, "{mode:o}");
        }
    }
}
