//! Repairs that a person requests: to forget a volume, and to restore or remove a file that
//! was set aside.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::deadline::Deadline;
use crate::engine::journal::format::Fault;
use crate::engine::journal::open::is_set_aside;
use crate::engine::journal::{Journal, Record, file, open};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::VolumeId;
use crate::kernel::worker;

/// The boot of a restored record that names none. It equals no boot, so an address in such a
/// record does not count.
const UNKNOWN_BOOT: &str = "unknown";

impl Journal {
    /// Removes the record of a volume, also of one that was [detached](Self::detached), and
    /// returns it. It touches no device: an attached device stays, and then belongs to no
    /// volume of this journal.
    ///
    /// # Errors
    /// `NotFound` if the journal has no such volume. `TimedOut` at stage `lock` if another
    /// thread works on it, and at stage `journal`, and then the record may still go. `Io`.
    pub fn forget(&self, volume: &VolumeId, deadline: Deadline) -> Result<Record> {
        let guard = self.guard(volume, None, deadline)?;
        let record = guard.record().or_else(|| guard.detached().cloned());
        let record = record.ok_or_else(|| {
            let message = format!("the journal has no volume {volume}");
            Error::new(ErrorKind::NotFound, message).at(Stage::Journal)
        })?;
        guard.remove(deadline)?;
        Ok(record)
    }

    /// Removes a file of the journal's directory that was set aside.
    ///
    /// # Errors
    /// `InvalidInput` where it is no such file; `NotFound`; `Io`; `TimedOut` at stage
    /// `journal`.
    pub fn forget_set_aside(&self, name: &OsStr, deadline: Deadline) -> Result<()> {
        let (directory, name) = self.set_aside_file(name)?;
        run(&directory, deadline, {
            let directory = directory.clone();
            move || remove(&directory, &name)
        })
    }

    /// Makes a file that was set aside the record of its volume again.
    ///
    /// # Errors
    /// `InvalidInput` if it is no file that was set aside, or is not a record, with what is
    /// wrong with it; `InUse` if the journal has another record of the volume, or another
    /// volume has its source, backend id or unit: detach or forget that one first;
    /// `NotSupported` if a later version wrote it; `NotFound`; `Io`; `TimedOut` at stage
    /// `journal`, and then it may still become the record.
    pub fn restore(&self, name: &OsStr, deadline: Deadline) -> Result<Record> {
        let (directory, name) = self.set_aside_file(name)?;
        let aside = directory.join(&name);
        let path = aside.clone();
        let bytes = run(&directory, deadline, move || Ok(open::read(&path)))?;
        let record = bytes.and_then(|bytes| Record::parse(&bytes));
        let mut record = record.map_err(|fault| no_record(&aside, &fault))?;
        record.boot.get_or_insert_with(|| UNKNOWN_BOOT.to_owned());
        let guard = self.guard(&record.volume, None, deadline)?;
        if guard.record().is_some() {
            let message = format!(
                "the journal has a record of volume {} already: detach it, or forget that \
                 record, first",
                record.volume
            );
            return Err(Error::new(ErrorKind::InUse, message).with_path(aside));
        }
        guard.require_sole_owner(&record)?;
        guard.write(record.clone(), deadline)?;
        run(&directory, deadline, {
            let directory = directory.clone();
            move || remove(&directory, &name)
        })?;
        Ok(record)
    }

    /// The directory, and the name of a file in it that was set aside.
    fn set_aside_file(&self, name: &OsStr) -> Result<(PathBuf, String)> {
        let directory = self.directory().to_owned();
        let path = directory.join(name);
        let plain = name.to_str().filter(|name| !name.contains('/'));
        let Some(plain) = plain.filter(|name| is_set_aside(name)) else {
            let message = "the journal has set aside no such file: `lunbd journal show` lists \
                           those that it has";
            return Err(Error::new(ErrorKind::InvalidInput, message).with_path(path));
        };
        fs::symlink_metadata(&path)
            .map_err(|error| Error::io("cannot look at the file", &path, &error))?;
        Ok((directory, plain.to_owned()))
    }
}

fn remove(directory: &Path, name: &str) -> Result<()> {
    file::remove(directory, name)?;
    file::sync(directory)
}

fn no_record(path: &Path, fault: &Fault) -> Error {
    let kind = match fault.kind {
        super::FaultKind::Newer => ErrorKind::NotSupported,
        _ => ErrorKind::InvalidInput,
    };
    Error::new(kind, format!("it is no record: {}", fault.text)).with_path(path)
}

fn run<T: Send + 'static>(
    directory: &Path,
    deadline: Deadline,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    worker::run(
        Stage::Journal,
        "a file of the journal",
        deadline,
        || format!("{}: its file system does not answer", directory.display()),
        call,
    )
}
