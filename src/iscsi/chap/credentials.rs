//! Names and secrets: from a file or from the environment, never from where a
//! list of processes shows them.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::{Algorithms, invalid};
use crate::error::{Error, Result};

/// Of a name or a secret, in bytes.
const LONGEST: usize = 255;
/// Of a file of credentials, in bytes.
const LONGEST_FILE: u64 = 8 << 10;
/// What a file calls them; in the environment they are in capitals, behind a
/// prefix.
const FIELDS: [&str; 5] = [
    "user",
    "secret",
    "target_user",
    "target_secret",
    "algorithms",
];

/// A secret of CHAP, 1 to 255 bytes. It is not shown, and its memory is wiped
/// when it is dropped.
///
/// The RFC wants 12 random bytes at least; many arrays have shorter ones, which
/// are taken.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// The secret of these bytes.
    ///
    /// # Errors
    /// `InvalidInput` where they are none or more than 255.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        if bytes.is_empty() || bytes.len() > LONGEST {
            return Err(invalid("a CHAP secret has 1 to 255 bytes"));
        }
        Ok(Self(Zeroizing::new(bytes.to_vec())))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What we prove to a target that we know, and what it must prove to us.
#[derive(Debug, Clone)]
pub struct Credentials {
    pub(super) user: String,
    pub(super) secret: Secret,
    pub(super) target: Option<(Option<String>, Secret)>,
    pub(super) algorithms: Algorithms,
}

impl Credentials {
    /// One-way: the target learns that we know `secret`. A target that does not
    /// ask for it gets no proof.
    ///
    /// # Errors
    /// `InvalidInput` where the name has not 1 to 255 bytes, or has control
    /// characters.
    pub fn new(user: impl Into<String>, secret: Secret) -> Result<Self> {
        Ok(Self {
            user: checked(user.into())?,
            secret,
            target: None,
            algorithms: Algorithms::default(),
        })
    }

    /// Mutual: the target must prove that it knows `secret`, under the name
    /// `user` where one is given. One that does not is refused.
    ///
    /// # Errors
    /// `InvalidInput` as of [`new`](Self::new), and where both secrets are the
    /// same: then the target's proof could be had from us.
    pub fn mutual(mut self, user: Option<String>, secret: Secret) -> Result<Self> {
        if secret == self.secret {
            return Err(invalid("the two secrets of mutual CHAP must differ"));
        }
        self.target = Some((user.map(checked).transpose()?, secret));
        Ok(self)
    }

    /// Offers these alone, and not [all](Algorithms::default). A target that knows none
    /// of them refuses the login, or picks another and is refused.
    #[must_use]
    pub fn algorithms(mut self, algorithms: Algorithms) -> Self {
        self.algorithms = algorithms;
        self
    }

    /// Whether the target must prove itself.
    #[must_use]
    pub fn is_mutual(&self) -> bool {
        self.target.is_some()
    }

    /// From a file of lines `user=`, `secret=`, and for mutual CHAP
    /// `target_secret=` and, where it is to be checked, `target_user=`. A line
    /// `algorithms=` is for [`Algorithms`]: it stands with the secret, so that each
    /// login heeds it, also one of the recovery of a session. Lines that begin with
    /// `#` and empty lines say nothing; a value is all behind the first equals sign.
    ///
    /// # Errors
    /// `InvalidInput`, naming the line but not what it holds; `NotPermitted`, and
    /// others of reading a file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let failed = |error: &std::io::Error| Error::io("cannot read credentials", path, error);
        let file = File::open(path).map_err(|error| failed(&error))?;
        // No growing: that would leave copies behind.
        let mut text = Zeroizing::new(Vec::with_capacity(8 << 10));
        file.take(LONGEST_FILE)
            .read_to_end(&mut text)
            .map_err(|error| failed(&error))?;
        Self::parse(&text).map_err(|error| error.with_path(path))
    }

    fn parse(text: &[u8]) -> Result<Self> {
        let mut values = [None; FIELDS.len()];
        for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            let at = line.iter().position(|byte| *byte == b'=');
            let (key, value) = line.split_at(at.unwrap_or(line.len()));
            let field = FIELDS.iter().position(|field| field.as_bytes() == key);
            let slot = field.and_then(|field| values.get_mut(field));
            let (Some(slot @ None), Some(value)) = (slot, value.get(1..)) else {
                let number = number + 1;
                let expected = "expected each of user=, secret=, target_user=, target_secret= and \
                                algorithms= at most once";
                return Err(invalid(&format!("line {number}: {expected}")));
            };
            *slot = Some(value);
        }
        Self::of(values)?.ok_or_else(|| invalid("no line user=NAME and no line secret=SECRET"))
    }

    /// From `LUNBD_CHAP_USER`, `LUNBD_CHAP_SECRET`, for mutual CHAP
    /// `LUNBD_CHAP_TARGET_SECRET` and `LUNBD_CHAP_TARGET_USER`, and for
    /// [`Algorithms`] `LUNBD_CHAP_ALGORITHMS`; `None` where none of them is set. The
    /// environment itself cannot be wiped.
    ///
    /// # Errors
    /// `InvalidInput` where one is missing or none.
    pub fn from_environment() -> Result<Option<Self>> {
        Self::from_variables(CredentialsSource::VARIABLES)
    }

    /// As [`from_environment`](Self::from_environment), with another beginning of
    /// the variables' names than `LUNBD_CHAP_`.
    ///
    /// # Errors
    /// `InvalidInput` where one is missing or none.
    pub fn from_variables(prefix: &str) -> Result<Option<Self>> {
        use std::os::unix::ffi::OsStringExt as _;
        let values = FIELDS.map(|field| {
            let name = format!("{prefix}{}", field.to_ascii_uppercase());
            std::env::var_os(name).map(|value| Zeroizing::new(value.into_vec()))
        });
        Self::of(
            values
                .each_ref()
                .map(|value| value.as_ref().map(|value| value.as_slice())),
        )
    }

    fn of(values: [Option<&[u8]>; FIELDS.len()]) -> Result<Option<Self>> {
        let [user, secret, target_user, target_secret, algorithms] = values;
        let name = |bytes: &[u8]| {
            String::from_utf8(bytes.to_vec()).map_err(|_| invalid("a CHAP name is no UTF-8"))
        };
        let one_way = match (user, secret) {
            (Some(user), Some(secret)) => Self::new(name(user)?, Secret::new(secret)?)?,
            _ if values == [None; FIELDS.len()] => return Ok(None),
            _ => return Err(invalid("a user and a secret are needed, both")),
        };
        let all = match (target_user, target_secret) {
            (user, Some(secret)) => {
                let user = user.map(name).transpose()?;
                one_way.mutual(user, Secret::new(secret)?)?
            }
            (None, None) => one_way,
            (Some(_), None) => {
                return Err(invalid("a target_user is nothing without a target_secret"));
            }
        };
        Ok(Some(match algorithms {
            // What is in the wrong place may be a secret, so it is not shown.
            Some(list) => {
                let list = std::str::from_utf8(list).ok();
                let list = list.and_then(|list| list.parse().ok()).ok_or_else(|| {
                    invalid(
                        "algorithms are one or more of MD5, SHA1, SHA256 and SHA3-256, each once, \
                         with commas between them",
                    )
                })?;
                all.algorithms(list)
            }
            None => all,
        }))
    }
}

/// Where credentials are, for what is written down: not what they are. They are
/// read at each login, so that a secret that was changed counts from the next.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CredentialsSource {
    /// In a file, as of [`Credentials::from_file`].
    File(PathBuf),
    /// In the environment, in variables whose names begin so, as of
    /// [`Credentials::from_variables`].
    Environment(String),
}

impl CredentialsSource {
    /// What the variables of [`Credentials::from_environment`] begin with.
    pub const VARIABLES: &str = "LUNBD_CHAP_";

    /// Reads them.
    ///
    /// # Errors
    /// `InvalidInput`, naming the line or the variables but not what they hold;
    /// `NotPermitted`, and others of reading a file.
    pub fn read(&self) -> Result<Credentials> {
        match self {
            Self::File(path) => Credentials::from_file(path),
            Self::Environment(prefix) => Credentials::from_variables(prefix)?
                .ok_or_else(|| invalid(&format!("{prefix}USER and {prefix}SECRET are not set"))),
        }
    }
}

fn checked(name: String) -> Result<String> {
    if name.is_empty() || name.len() > LONGEST || name.contains(char::is_control) {
        let message = "a CHAP name has 1 to 255 bytes and no control characters";
        return Err(invalid(message));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_file_gives_one_way_and_mutual_credentials() {
        let one_way = Credentials::parse(b"# me\nuser=joe\nsecret= a=b \r\n\n").unwrap();
        assert_eq!(one_way.user, "joe");
        assert_eq!(one_way.secret.bytes(), b" a=b ");
        assert!(one_way.target.is_none());
        assert_eq!(one_way.algorithms, Algorithms::default());
        let chosen = b"user=joe\nsecret=a\nalgorithms=SHA3-256,SHA256\n";
        let chosen = Credentials::parse(chosen).unwrap().algorithms;
        assert_eq!(chosen.to_string(), "SHA3-256,SHA256");
        let mutual = b"user=joe\nsecret=a\ntarget_user=array\ntarget_secret=b";
        let (user, secret) = Credentials::parse(mutual).unwrap().target.unwrap();
        assert_eq!(
            (user.as_deref(), secret.bytes()),
            (Some("array"), &b"b"[..])
        );
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
        ] {
            let error = Credentials::parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text:?}");
            assert!(!error.to_string().contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_source_reads_what_is_there_now_and_names_what_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("chap");
        let source = CredentialsSource::File(path.clone());
        let absent = source.read().unwrap_err();
        assert_eq!(absent.path(), Some(&*path));
        for secret in ["one", "two"] {
            std::fs::write(&path, format!("user=joe\nsecret={secret}\n")).unwrap();
            assert_eq!(source.read().unwrap().secret.bytes(), secret.as_bytes());
        }
        let unset = CredentialsSource::Environment("LUNBD_TEST_UNSET_".to_owned());
        let error = unset.read().unwrap_err();
        assert!(
            error.to_string().contains("LUNBD_TEST_UNSET_USER"),
            "{error}"
        );
    }

    #[test]
    fn a_secret_is_not_shown() {
        let secret = Secret::new("hush").unwrap();
        let other = Secret::new("quiet").unwrap();
        let credentials = Credentials::new("joe", secret).unwrap();
        let shown = format!("{:?}", credentials.mutual(None, other).unwrap());
        assert!(shown.contains("joe") && !shown.contains("hush"), "{shown}");
        assert!(
            !shown.contains("104") && !shown.contains("quiet"),
            "{shown}"
        );
        assert!(Secret::new("").is_err() && Secret::new([1; 256]).is_err());
    }
}
