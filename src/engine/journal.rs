//! What was about to be done with each volume, written down before it is done.
//!
//! The kernel is the truth, and the journal is no copy of it: it holds what was
//! meant, how to repeat it, and by which names a device is found again. After a
//! crash [`Engine::recover`] looks at sysfs and finishes or undoes what it says.
//!
//! One small file a volume, whole or not there at all whenever the machine stops
//! (written beside, brought to the disk, renamed, the directory brought to the
//! disk), with a version and a SHA-256 of that and all that follows. What is no record
//! (torn, foreign) is renamed and reported, and neither trusted nor deleted. A journal
//! with a record of a later version is not opened: nothing of it would be known. One
//! process has a journal at a time.
//!
//! A volume's record says so when its detach is proven, and goes when an attach that
//! never came to its end has left nothing. It does **not** go because the device
//! is gone: a session that is down takes its devices away and brings them again.

mod conflict;
mod failing;
mod file;
mod format;
mod guard;
mod open;
mod publish;
mod record;
mod repair;
mod view;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nix::fcntl::Flock;

use super::Engine;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::id::{VolumeId, Wwid};
use crate::iscsi::{CredentialsSource, SessionName};
use crate::kernel::{machine, worker};
pub(crate) use conflict::{AttachedSpec, must_be_detached_first};
pub use failing::Failing;
pub use format::Problem;
pub use format::{Fault, FaultKind};
pub(super) use guard::VolumeGuard;
pub use record::{Detached, Intent, LogInSpec, NbdSpec, Operation, Outcome, Record, VolumeSpec};
pub use view::JournalView;

/// A journal that this process holds, until it is dropped.
#[derive(Debug)]
pub struct Journal {
    shared: Arc<Shared>,
    problems: Vec<Problem>,
}

#[derive(Debug)]
struct Shared {
    directory: PathBuf,
    table: Mutex<Table>,
    /// Someone's turn at a volume has ended.
    freed: Condvar,
    /// What was told of those that fail, as long as it counts.
    told: Mutex<Option<Flock<File>>>,
    /// The machine's boot; `None` where the kernel does not say it.
    boot: Option<String>,
    /// Brings the directory's names to the disk.
    sync: fn(&Path) -> Result<()>,
    // The kernel takes it back when the process dies, in whatever way.
    _lock: Flock<File>,
}

/// The records as they are on the disk, and who is at work.
#[derive(Debug)]
struct Table {
    records: BTreeMap<VolumeId, Record>,
    /// Those of volumes whose detach is proven.
    detached: BTreeMap<VolumeId, Record>,
    in_flight: BTreeMap<VolumeId, InFlight>,
}

/// What is claimed for a volume that is being worked on and may have no record
/// yet.
#[derive(Debug, Default)]
struct InFlight {
    spec: Option<VolumeSpec>,
    names: Vec<Wwid>,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // No code under this lock can leave the table half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self) -> MutexGuard<'_, Option<Flock<File>>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Opens the journal in a directory, which is made where it is not there and
    /// must hold nothing else. It belongs where it lives as long as the machine's boot, and
    /// longer than the process: in a container in a directory of the host's `/run`, and for
    /// a service of systemd's in its `RuntimeDirectory=` with `RuntimeDirectoryPreserve=yes`.
    /// In one that outlives the boot, what was begun at an address as `scsi:2:0:0:1` by an
    /// earlier boot is forgotten, where no unique name of the unit is known, and the device
    /// there is left alone. Files in it that are no records are set aside and
    /// are in [`Journal::problems`].
    ///
    /// # Errors
    /// `InUse`, naming the process that has it; `InvalidInput` where the
    /// directory holds something and was never a journal; `NotSupported` where a later
    /// version of lunbd wrote a record, and nothing is touched then; `NotPermitted`;
    /// `TimedOut` at stage `journal`; `Io`.
    pub fn open_journal_at(&self, directory: &Path, deadline: Deadline) -> Result<Journal> {
        let path = directory.to_owned();
        let found = worker::run(
            Stage::Journal,
            "the journal to be read",
            deadline,
            || format!("{}: its file system does not answer", directory.display()),
            move || open::open(&path),
        )?;
        let table = Table {
            records: found.records,
            detached: found.detached,
            in_flight: BTreeMap::new(),
        };
        let shared = Shared {
            directory: directory.to_owned(),
            table: Mutex::new(table),
            freed: Condvar::new(),
            told: Mutex::default(),
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
    /// Reads a journal beside whoever holds it, and changes nothing: what is no
    /// record is left where it is. Empty where there is no such directory.
    ///
    /// # Errors
    /// `InvalidInput` where the directory holds something and was never a
    /// journal; `NotPermitted`; `TimedOut` at stage `journal`; `Io`.
    pub fn read_journal_at(&self, directory: &Path, deadline: Deadline) -> Result<JournalView> {
        let path = directory.to_owned();
        worker::run(
            Stage::Journal,
            "the journal to be read",
            deadline,
            || format!("{}: its file system does not answer", directory.display()),
            move || open::look(&path),
        )
    }
}

impl Journal {
    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.shared.directory
    }

    /// What was found in its directory and is no record. A volume may be behind
    /// each: its device is a foreign one to [`Engine::recover`] now.
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

    /// The records of volumes whose detach is proven, by volume. By these a repeated
    /// [`detach_volume`](Engine::detach_volume) answers as the first one did. Each stays until
    /// its volume is attached again or [forgotten](Self::forget); of more than 1,024 the
    /// oldest go. They claim nothing: another volume may have their device.
    #[must_use]
    pub fn detached(&self) -> Vec<Record> {
        self.shared.table().detached.values().cloned().collect()
    }

    /// What the detach of a volume has proven, where it is among the
    /// [detached](Self::detached).
    #[must_use]
    pub fn detached_as(&self, volume: &VolumeId) -> Option<Detached> {
        self.shared.table().detached.get(volume)?.detached.clone()
    }

    /// Answers, for as long as this journal is held, where the secrets are that the
    /// target of a session is proven: by the records as they are when it is asked.
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

    /// Brings the directory's names to the disk by `sync` from now on.
    #[cfg(test)]
    pub(super) fn with_sync(mut self, sync: fn(&Path) -> Result<()>) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.sync = sync;
        }
        self
    }
}
