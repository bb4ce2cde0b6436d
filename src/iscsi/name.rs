//! This machine's iSCSI name.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::error::{Error, ErrorKind, Result};
use crate::id::Iqn;

/// Where open-iscsi and others keep the machine's name.
pub const INITIATOR_NAME_FILE: &str = "/etc/iscsi/initiatorname.iscsi";
/// More than such a file has, in bytes.
const LONGEST: u64 = 64 << 10;

/// The name in `path`, of the form of [`INITIATOR_NAME_FILE`]: a line
/// `InitiatorName=NAME`; lines that begin with `#` say nothing.
///
/// # Errors
/// `NotFound` where there is no such file or no such line; `InvalidInput` where
/// the name is none; `NotPermitted`.
pub fn initiator_name(path: &Path) -> Result<Iqn> {
    let failed = |error: &std::io::Error| {
        let new = Error::io("cannot read the initiator's name", path, error);
        match error.kind() {
            std::io::ErrorKind::NotFound => new.with_kind(ErrorKind::NotFound),
            _ => new,
        }
    };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| failed(&error))?;
    file.take(LONGEST)
        .read_to_string(&mut text)
        .map_err(|error| failed(&error))?;
    let value = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("InitiatorName="))
        .ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "no line InitiatorName=NAME").with_path(path)
        })?;
    let name = value.trim().parse::<Iqn>();
    name.map_err(|error| Error::from(error).with_path(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &str) -> Result<Iqn> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("initiatorname.iscsi");
        std::fs::write(&path, content).unwrap();
        initiator_name(&path)
    }

    #[test]
    fn the_name_is_the_files_first_that_is_no_comment() {
        let content = "## a comment\n#InitiatorName=iqn.2026-01.example:no\n\
                       InitiatorName=iqn.2026-01.example:yes \nInitiatorName=x\n";
        assert_eq!(read(content).unwrap().as_str(), "iqn.2026-01.example:yes");
    }

    #[test]
    fn a_file_without_a_name_and_a_name_that_is_none_are_told_apart() {
        assert_eq!(read("# empty\n").unwrap_err().kind(), ErrorKind::NotFound);
        let none = read("InitiatorName=host\n").unwrap_err();
        assert_eq!(none.kind(), ErrorKind::InvalidInput);
        assert!(none.path().is_some());
        let absent = initiator_name(Path::new("/nonexistent/name")).unwrap_err();
        assert_eq!(absent.kind(), ErrorKind::NotFound);
    }
}
