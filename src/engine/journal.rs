//! The journal: the engine writes down what it is about to do with each volume before it
//! does it.
//!
//! The kernel holds the truth. A record holds what was meant, how to repeat it, and what the
//! last attach or detach read back: for example the names that find the device again. After a
//! crash [`Engine::recover`] reads sysfs, and finishes or undoes what the records say.
//!
//! Each volume has one small file, which is whole or absent whenever the machine stops: a
//! new file is written beside it, synced and renamed, and the directory is synced. The file
//! has a version, and a SHA-256 of the version and of all that follows. A file that is not
//! a record (torn, foreign) is renamed and reported. The engine neither trusts nor deletes
//! it. A journal with a record of a later version is not opened, because that record cannot
//! be read. One process holds a journal at a time.
//!
//! When a detach is proven, the volume's record says so. When an unfinished attach has left
//! nothing, the engine removes the record. It does **not** remove the record because the
//! device is gone: a session that is down removes its devices, and adds them again when it
//! is up.

mod conflict;
mod failing;
mod file;
mod format;
mod guard;
mod open;
mod publish;
mod record;
mod repair;
mod spec;
mod table;
mod view;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::Flock;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::journal::table::{InFlight, Table};
use crate::engine::lock::run_dir;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::VolumeId;
use crate::iscsi::{CredentialsSource, SessionName};
use crate::kernel::{Roots, machine, worker};
pub(crate) use conflict::{AttachedSpec, must_be_detached_first};
pub use failing::Failing;
pub use format::Problem;
pub use format::{Fault, FaultKind};
pub(super) use guard::VolumeGuard;
pub use record::{Detached, Intent, Operation, Outcome, Record};
pub use spec::{LogInSpec, NbdSpec, VolumeSpec};
pub use view::JournalView;

/// A journal that this process holds until the value is dropped.
#[derive(Debug)]
pub struct Journal {
    shared: Arc<Shared>,
    problems: Vec<Problem>,
}

#[derive(Debug)]
struct Shared {
    directory: PathBuf,
    table: Mutex<Table>,
    /// Held by the caller that removes the oldest records of detached volumes.
    removal: Mutex<()>,
    /// Notified when a caller has finished with a volume.
    freed: Condvar,
    /// The published file of the failing volumes. Readers use it only while its lock is
    /// held.
    published_failures: Mutex<Option<Flock<File>>>,
    /// The id of the machine's boot; `None` if the kernel does not show it.
    boot: Option<String>,
    /// Syncs the directory, so that its names are on the disk.
    sync: fn(&Path) -> Result<()>,
    // The kernel releases the lock when the process dies, in whatever way.
    _lock: Flock<File>,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }
}

impl Engine {
    /// Opens the journal of this machine, `/run/lunbd/journal`, which is as
    /// short-lived as the devices: it is empty after a boot.
    ///
    /// # Errors
    /// As [`open_journal_at`](Self::open_journal_at).
    pub fn open_journal(&self, deadline: Deadline) -> Result<Journal> {
        self.open_journal_at(&self.roots().run.join("lunbd/journal"), deadline)
    }

    /// Opens the journal in a directory, which is created if it does not exist and must hold
    /// nothing else. The directory should live as long as the machine's boot and longer than
    /// the process: for a container it belongs in the host's `/run`, for a systemd service in
    /// its `RuntimeDirectory=` with `RuntimeDirectoryPreserve=yes`. If it outlives the boot, an
    /// address such as `scsi:2:0:0:1` in a record of an earlier boot no longer counts, unless a
    /// unique name of the unit is known, and the device at that address is left alone. Files
    /// that are not records are set aside and listed in [`Journal::problems`].
    ///
    /// # Errors
    /// `InUse`, naming the process that holds the journal; `InvalidInput` if the directory
    /// holds something and was never a journal, and for `/run/lunbd`, where the locks are; `NotSupported` if a later version of lunbd
    /// wrote a record, and nothing is touched then; `NotPermitted`; `TimedOut` at stage
    /// `journal`; `Io`.
    pub fn open_journal_at(&self, directory: &Path, deadline: Deadline) -> Result<Journal> {
        let (path, roots) = (directory.to_owned(), self.roots().clone());
        let found = worker::run(
            Stage::Journal,
            "the journal to be read",
            deadline,
            || format!("{}: its file system does not answer", directory.display()),
            move || {
                refuse_lock_directory(&roots, &path)?;
                open::open(&path)
            },
        )?;
        let table = Table {
            records: found.records,
            detached: found.detached,
            in_flight: BTreeMap::new(),
        };
        let shared = Shared {
            directory: directory.to_owned(),
            table: Mutex::new(table),
            removal: Mutex::default(),
            freed: Condvar::new(),
            published_failures: Mutex::default(),
            boot: machine::boot_id(self.roots()),
            sync: file::sync,
            _lock: found.lock,
        };
        Ok(Journal {
            shared: Arc::new(shared),
            problems: found.problems,
        })
    }
}

impl Engine {
    /// Reads a journal that another process may hold, and changes nothing: a file that is
    /// not a record stays where it is. The view is empty if the directory does not exist.
    ///
    /// # Errors
    /// `InvalidInput` if the directory holds something and was never a journal;
    /// `NotPermitted`; `TimedOut` at stage `journal`; `Io`.
    pub fn read_journal_at(&self, directory: &Path, deadline: Deadline) -> Result<JournalView> {
        let (path, roots) = (directory.to_owned(), self.roots().clone());
        worker::run(
            Stage::Journal,
            "the journal to be read",
            deadline,
            || format!("{}: its file system does not answer", directory.display()),
            move || {
                refuse_lock_directory(&roots, &path)?;
                open::read_view(&path)
            },
        )
    }
}

/// # Errors
/// `InvalidInput` for the directory of locks and marks: the journal would set those aside as
/// files that are no records.
fn refuse_lock_directory(roots: &Roots, directory: &Path) -> Result<()> {
    // The directory may not exist yet.
    let place = |path: &Path| {
        let real = fs::canonicalize(path).ok();
        real.or_else(|| {
            let parent = fs::canonicalize(path.parent()?).ok()?;
            Some(parent.join(path.file_name()?))
        })
    };
    let wanted = place(directory);
    if wanted.is_none() || wanted != place(&run_dir::path(roots)) {
        return Ok(());
    }
    let message = "lunbd's locks are in this directory: put the journal into one of its own, such \
                   as the default, journal, below it. Move the *.json files of an earlier journal \
                   there while no agent runs";
    Err(Error::new(ErrorKind::InvalidInput, message).with_path(directory))
}

impl Journal {
    /// The journal's directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.shared.directory
    }

    /// The files in its directory that are not records. A volume may be behind each:
    /// [`Engine::recover`] now reports its device as foreign.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// All records, by volume, without those of volumes that were
    /// [detached](Self::detached).
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.shared.table().records.values().cloned().collect()
    }

    /// The records of volumes whose detach is proven, by volume. They let a repeated
    /// [`detach_volume`](Engine::detach_volume) answer as the first one did. Each stays until
    /// its volume is attached again or [forgotten](Self::forget); beyond 1,024 the oldest go.
    /// They claim nothing: another volume may have their device.
    #[must_use]
    pub fn detached(&self) -> Vec<Record> {
        self.shared.table().detached.values().cloned().collect()
    }

    /// What the detach of a volume has proven; `None` if the volume is not among the
    /// [detached](Self::detached).
    #[must_use]
    pub fn detached_as(&self, volume: &VolumeId) -> Option<Detached> {
        self.shared.table().detached.get(volume)?.detached.clone()
    }

    /// Returns a function that finds the CHAP credentials of a session in the records as
    /// they are when it is called. Once the journal is dropped it returns `None`.
    pub(crate) fn credentials_of_sessions(
        &self,
    ) -> impl Fn(&SessionName) -> Option<CredentialsSource> + Send + Sync + 'static {
        let shared = Arc::downgrade(&self.shared);
        move |session| {
            let shared = shared.upgrade()?;
            let table = shared.table();
            let mut specs = table.records.values().map(|record| &record.spec);
            specs.find_map(|spec| spec.credentials_of(session)).cloned()
        }
    }

    /// A volume's record.
    #[must_use]
    pub fn record(&self, volume: &VolumeId) -> Option<Record> {
        self.shared.table().records.get(volume).cloned()
    }

    /// Syncs the directory with `sync` from now on.
    #[cfg(test)]
    pub(super) fn with_sync(mut self, sync: fn(&Path) -> Result<()>) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.sync = sync;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_journal_is_opened_or_read_in_the_directory_of_the_locks() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let soon = || Deadline::after(Duration::from_secs(30));
        let locks = run_dir::path(engine.roots());
        let link = root.path().join("link");
        symlink(&engine.roots().run, &link).unwrap();
        fs::create_dir_all(&engine.roots().run).unwrap();
        // At first the directory of the locks does not exist.
        for _ in 0..2 {
            for directory in [locks.clone(), link.join("lunbd"), locks.join(".")] {
                let opened = engine.open_journal_at(&directory, soon()).map(drop);
                assert_eq!(opened.unwrap_err().kind(), ErrorKind::InvalidInput);
                let read = engine.read_journal_at(&directory, soon()).map(drop);
                assert_eq!(read.unwrap_err().kind(), ErrorKind::InvalidInput);
            }
            drop(engine.open_journal(soon()).unwrap());
        }
    }
}
