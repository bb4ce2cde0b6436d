//! Where credentials are.

use std::path::PathBuf;

use super::credentials::VARIABLES;
use super::{Credentials, CredentialsFile, invalid};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::id::{Iqn, Portal};

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
    pub const VARIABLES: &str = VARIABLES;

    /// Reads those for this target through this portal; without a target, as for a
    /// discovery, those of the portal. A file that does not answer, as that of a server
    /// that is gone, is left to a thread of its own when the deadline has passed.
    ///
    /// # Errors
    /// `InvalidInput`, naming the line or the variables but not what they hold, also where
    /// there are none for this target; `TimedOut`; `NotPermitted`, and others of reading a
    /// file.
    pub fn read(
        &self,
        target: Option<&Iqn>,
        portal: &Portal,
        deadline: Deadline,
    ) -> Result<Credentials> {
        match self {
            Self::File(path) => {
                let file = CredentialsFile::read_within(path, deadline)?;
                let known = file.find(target, portal).cloned();
                let none = || CredentialsFile::none_for(target, portal).with_path(path);
                known.ok_or_else(none)
            }
            Self::Environment(prefix) => Credentials::from_variables(prefix)?
                .ok_or_else(|| invalid(&format!("{prefix}USER and {prefix}SECRET are not set"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_source_reads_what_is_there_now_and_names_what_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("chap");
        let source = CredentialsSource::File(path.clone());
        let portal = "10.0.0.1".parse().unwrap();
        let read = |source: &CredentialsSource| {
            source.read(None, &portal, Deadline::after(Duration::from_secs(60)))
        };
        let absent = read(&source).unwrap_err();
        assert_eq!(absent.path(), Some(&*path));
        for secret in ["one", "two"] {
            std::fs::write(&path, format!("user=joe\nsecret={secret}\n")).unwrap();
            assert_eq!(read(&source).unwrap().secret.bytes(), secret.as_bytes());
        }
        let unset = CredentialsSource::Environment("LUNBD_TEST_UNSET_".to_owned());
        let error = read(&unset).unwrap_err();
        assert!(
            error.to_string().contains("LUNBD_TEST_UNSET_USER"),
            "{error}"
        );
    }
}
