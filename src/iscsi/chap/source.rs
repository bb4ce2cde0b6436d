//! The places where credentials are stored.

use std::path::PathBuf;

use super::credentials::VARIABLES;
use super::{Credentials, CredentialsFile, invalid};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::id::{Iqn, Portal};

/// The place of credentials without the credentials themselves, to be stored. Each login
/// reads the place again, so the next login uses a changed secret.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CredentialsSource {
    /// A file, as for [`Credentials::from_file`].
    File(PathBuf),
    /// Environment variables with this prefix, as for [`Credentials::from_variables`].
    Environment(String),
}

impl CredentialsSource {
    /// The prefix of the variables of [`Credentials::from_environment`].
    pub const VARIABLES: &str = VARIABLES;

    /// Reads the credentials for this target through this portal, or without a target, as
    /// for a discovery, those for the portal. A file whose file system does not answer is
    /// left to a separate thread after the deadline.
    ///
    /// # Errors
    /// `InvalidInput`, naming the line or the variables but not their content, also if
    /// there are no credentials for this target; `TimedOut`; `NotPermitted`, and other
    /// errors of reading a file.
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
                let none = || CredentialsFile::no_section(target, portal).with_path(path);
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
