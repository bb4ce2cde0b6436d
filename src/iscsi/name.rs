//! This machine's iSCSI name.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::random;
use crate::error::{Error, ErrorKind, Result};
use crate::id::Iqn;

/// The file where open-iscsi and others keep the machine's name.
pub const INITIATOR_NAME_FILE: &str = "/etc/iscsi/initiatorname.iscsi";
/// The prefix of the names that open-iscsi makes (`iscsi-iname`).
const MADE: &str = "iqn.2016-04.com.open-iscsi:";
/// The most that is read of such a file, in bytes.
const LONGEST: u64 = 64 << 10;

/// Reads the name in `path`, which has the form of [`INITIATOR_NAME_FILE`]: a line
/// `InitiatorName=NAME`; lines that begin with `#` are comments.
///
/// # Errors
/// `NotFound` if there is no such file or line, saying how to make one; `InvalidInput` if
/// the name is invalid; `NotPermitted`.
pub fn initiator_name(path: &Path) -> Result<Iqn> {
    let failed = |error: &io::Error| match error.kind() {
        io::ErrorKind::NotFound => {
            let message = "this machine has no iSCSI name: make one with `lunbd initiator-name \
                           --create`, or say which to use (`--initiator`)";
            Error::new(ErrorKind::NotFound, message).with_path(path)
        }
        _ => Error::io("cannot read the initiator's name", path, error),
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
            let message = "the file is there and names no initiator: write a line \
                           InitiatorName=NAME into it";
            Error::new(ErrorKind::NotFound, message).with_path(path)
        })?;
    let name = value.trim().parse::<Iqn>();
    name.map_err(|error| Error::from(error).with_path(path))
}

/// Gives this machine a name if there is no file at `path`. The name has the form of
/// open-iscsi's `iscsi-iname`, with 48 random bits. An existing file is never changed: this
/// returns `None`, and [`initiator_name`] reads the file.
///
/// The file appears whole and readable only by its owner, and is on the disk when this
/// returns. A missing directory is created.
///
/// # Errors
/// `NotPermitted`, `Io`.
pub fn create_initiator_name(path: &Path) -> Result<Option<Iqn>> {
    let failed = |error: &io::Error| Error::io("cannot write the initiator's name", path, error);
    let mut bytes = [0; 6];
    random(&mut bytes)?;
    let digits = bytes.map(|byte| format!("{byte:02x}")).concat();
    let name: Iqn = format!("{MADE}{digits}").parse()?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    let made = DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory);
    made.map_err(|error| failed(&error))?;
    // A hard link appears whole and never replaces the file of another process.
    let draft = path.with_extension(&digits);
    let linked = write_new(&draft, &name).and_then(|()| fs::hard_link(&draft, path));
    let removed = fs::remove_file(&draft);
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        linked => linked.and(removed).map_err(|error| failed(&error))?,
    }
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed(&error))?;
    Ok(Some(name))
}

fn write_new(path: &Path, name: &Iqn) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let mut file = file?;
    writeln!(file, "InitiatorName={name}")?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &str) -> Result<Iqn> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("initiatorname.iscsi");
        fs::write(&path, content).unwrap();
        initiator_name(&path)
    }

    #[test]
    fn the_name_is_the_files_first_that_is_no_comment() {
        let content = "## a comment\n#InitiatorName=iqn.2026-01.example:no\n\
                       InitiatorName=iqn.2026-01.example:yes \nInitiatorName=x\n";
        assert_eq!(read(content).unwrap().as_str(), "iqn.2026-01.example:yes");
    }

    #[test]
    fn a_file_without_a_name_and_an_invalid_name_give_different_errors() {
        assert_eq!(read("# empty\n").unwrap_err().kind(), ErrorKind::NotFound);
        let none = read("InitiatorName=host\n").unwrap_err();
        assert_eq!(none.kind(), ErrorKind::InvalidInput);
        assert!(none.path().is_some());
        let absent = initiator_name(Path::new("/nonexistent/name")).unwrap_err();
        assert_eq!(absent.kind(), ErrorKind::NotFound);
        let text = absent.to_string();
        assert!(text.contains("lunbd initiator-name --create"), "{text}");
    }

    #[test]
    fn a_name_is_made_once_of_the_form_of_open_iscsis_and_a_file_that_is_there_stays() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("iscsi/initiatorname.iscsi");
        let name = create_initiator_name(&path).unwrap().unwrap();
        assert_eq!(initiator_name(&path).unwrap(), name);
        let digits = name.as_str().strip_prefix(MADE).unwrap();
        assert!(digits.len() == 12 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(create_initiator_name(&path).unwrap(), None);
        assert_eq!(initiator_name(&path).unwrap(), name);
        // A file that names no initiator stays too.
        fs::write(&path, "GenerateName=yes\n").unwrap();
        assert_eq!(create_initiator_name(&path).unwrap(), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "GenerateName=yes\n");
        let names = fs::read_dir(path.parent().unwrap()).unwrap();
        assert_eq!(names.count(), 1, "a draft is left");
        // Another machine gets another name.
        let other = directory.path().join("other");
        assert_ne!(create_initiator_name(&other).unwrap(), Some(name));
    }
}
