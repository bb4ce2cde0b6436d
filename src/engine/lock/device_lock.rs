//! Exclusive and shared locks on devices, across all processes of the machine.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::crash::crash_point;
use crate::deadline::{Backoff, Deadline};
use crate::engine::lock::lock_file::{self, Locked};
use crate::engine::lock::run_dir;
use crate::error::{Error, Result, Stage};
use crate::id::{BackendId, Hctl, Wwid};
use crate::kernel::{Roots, sysfs};

const EXCLUSIVE: FlockArg = FlockArg::LockExclusiveNonblock;
const SHARED: FlockArg = FlockArg::LockSharedNonblock;

/// A lock on one device. The kernel releases it when the process dies.
#[derive(Debug)]
pub(in crate::engine) struct DeviceLock {
    path: PathBuf,
    // The file is closed, and so the lock released, after the path is removed.
    file: Flock<File>,
    /// Whether other processes may share the lock.
    shared: bool,
    was_abandoned: bool,
    keeps_file: bool,
}

impl DeviceLock {
    /// Takes the exclusive lock `name`, and waits for it. No thread stays behind after
    /// the deadline.
    ///
    /// # Errors
    /// `NotPermitted` where the lock's folder cannot be written; `TimedOut` at stage
    /// `lock`, naming the process that has it.
    pub(in crate::engine) fn take(roots: &Roots, name: &str, deadline: Deadline) -> Result<Self> {
        Self::take_as(roots, name, EXCLUSIVE, deadline)
    }

    /// Takes the lock like [`take`](Self::take), but shared: it excludes only exclusive
    /// holders.
    pub(in crate::engine) fn share(roots: &Roots, name: &str, deadline: Deadline) -> Result<Self> {
        Self::take_as(roots, name, SHARED, deadline)
    }

    fn take_as(roots: &Roots, name: &str, mode: FlockArg, deadline: Deadline) -> Result<Self> {
        let path = Self::path(roots, name);
        let mut pauses = Backoff::for_lock();
        loop {
            if let Some(lock) = Self::try_at(&path, mode)? {
                return Ok(lock);
            }
            if deadline.has_passed() {
                return Err(not_free(&path, name, deadline));
            }
            deadline.pause(pauses.pause());
        }
    }

    /// The name of a unit's lock, which covers all its addresses. It is taken after the
    /// locks of addresses, so that two processes never deadlock.
    pub(in crate::engine) fn of_unit(name: &Wwid) -> String {
        /// A file's name has at most 255 characters. Two units whose long vendor texts
        /// begin alike share a lock, which costs only time.
        const LONGEST: usize = 200;
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let name = name.to_string();
        let name: String = name.chars().take(LONGEST).map(plain).collect();
        format!("unit-{name}")
    }

    /// The name of a backend id's lock: a digest, since an id may contain characters that
    /// a file name cannot.
    pub(in crate::engine) fn of_backend(backend: &BackendId) -> String {
        format!("nbd-id-{:016x}", backend.digest())
    }

    /// The name of the lock of the connections of this id's device. A heal takes it for each
    /// connection that it offers. An attach holds it while it connects the device, and a detach
    /// while it disconnects it: not while it flushes, which may need the heal.
    pub(in crate::engine) fn of_connections(backend: &BackendId) -> String {
        format!("nbd-connections-{:016x}", backend.digest())
    }

    /// The name of the lock that the scans of an address share until the kernel has ended
    /// them, also those of killed processes.
    pub(in crate::engine) fn of_scan(hctl: Hctl) -> String {
        format!("scan-{hctl}")
    }

    /// Waits until no process has the lock `name`.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(in crate::engine) fn wait(roots: &Roots, name: &str, deadline: Deadline) -> Result<()> {
        let path = Self::path(roots, name);
        let mut pauses = Backoff::for_other_process();
        while Self::is_held(roots, name)? {
            if deadline.has_passed() {
                return Err(not_free(&path, name, deadline));
            }
            deadline.pause(pauses.pause());
        }
        Ok(())
    }

    /// Whether a process has the lock `name`.
    pub(in crate::engine) fn is_held(roots: &Roots, name: &str) -> Result<bool> {
        let path = Self::path(roots, name);
        Ok(path.exists() && Self::try_at(&path, EXCLUSIVE)?.is_none())
    }

    /// Takes the lock `name` if it is free.
    pub(in crate::engine) fn try_take(roots: &Roots, name: &str) -> Result<Option<Self>> {
        Self::try_at(&Self::path(roots, name), EXCLUSIVE)
    }

    /// Whether its last holder died with it, or [abandoned](Self::abandon) it.
    pub(in crate::engine) fn was_abandoned(&self) -> bool {
        self.was_abandoned
    }

    /// Drops the lock as a dying process would: the next holder sees that the work under
    /// it is unfinished.
    pub(in crate::engine) fn abandon(mut self) {
        self.keeps_file = true;
    }

    /// Removes the lock files of dead processes, except those whose names begin with
    /// `except`.
    #[cfg(feature = "journal")]
    pub(in crate::engine) fn purge_stale(roots: &Roots, except: &str) {
        let folder = run_dir::path(roots);
        for name in sysfs::names(&folder).unwrap_or_default() {
            let path = folder.join(&name);
            if path.extension() == Some("lock".as_ref()) && !name.starts_with(except) {
                // Dropping the acquired lock removes its file.
                let _another_has_it = Self::try_at(&path, EXCLUSIVE);
            }
        }
    }

    /// Takes the locks whose names begin with `prefix` and whose holders died with them.
    pub(in crate::engine) fn take_abandoned(roots: &Roots, prefix: &str) -> Result<Vec<Self>> {
        let folder = run_dir::path(roots);
        let mut abandoned = Vec::new();
        for name in sysfs::names(&folder)? {
            if name.starts_with(prefix) {
                let lock = Self::try_at(&folder.join(name), EXCLUSIVE)?;
                abandoned.extend(lock.filter(Self::was_abandoned));
            }
        }
        Ok(abandoned)
    }

    fn path(roots: &Roots, name: &str) -> PathBuf {
        run_dir::path(roots).join(format!("{name}.lock"))
    }

    fn try_at(path: &Path, mode: FlockArg) -> Result<Option<Self>> {
        Self::acquire(path, mode).map_err(|error| error.at(Stage::Lock))
    }

    /// Returns `None` where another process has the lock, or where the locked file is no
    /// longer the one at the path, since its last holder removed it.
    fn acquire(path: &Path, mode: FlockArg) -> Result<Option<Self>> {
        let failed = |error: &std::io::Error| Error::io("cannot lock", path, error);
        crash_point!(DeviceLockToTake);
        let file = open(path)?;
        crash_point!(DeviceLockCreated);
        let locked = lock_file::lock(path, file, mode).map_err(|error| failed(&error))?;
        let Locked::Ours(file, length) = locked else {
            return Ok(None);
        };
        let was_abandoned = length > 0;
        // The lock itself is the flock. The process id serves the error of waiting processes,
        // and tells the next holder if this one dies. It is written over the last one, so that
        // a full file system keeps that of a dead holder.
        let id = std::process::id().to_string();
        let id_length = u64::try_from(id.len()).unwrap_or(0);
        let mut written = file.write_all_at(id.as_bytes(), 0);
        // Others that share the lock may have written since.
        if length > id_length || matches!(mode, SHARED) {
            written = written.and_then(|()| file.set_len(id_length));
        }
        written.map_err(|error| failed(&error))?;
        crash_point!(DeviceLockTaken);
        Ok(Some(Self {
            path: path.to_owned(),
            file,
            shared: matches!(mode, SHARED),
            was_abandoned,
            keeps_file: false,
        }))
    }
}

/// Opens the file of a lock, and creates the directory where it is missing.
fn open(path: &Path) -> Result<File> {
    let opened = match (lock_file::open(path), path.parent()) {
        (Err(error), Some(folder)) if error.kind() == std::io::ErrorKind::NotFound => {
            run_dir::make(folder)?;
            lock_file::open(path)
        }
        (opened, _) => opened,
    };
    opened.map_err(|error| Error::io("cannot lock", path, &error))
}

fn not_free(path: &Path, name: &str, deadline: Deadline) -> Error {
    let holder = sysfs::read_if_there(path).ok().flatten();
    let what = format!("another process to release {name}");
    let error = Error::timed_out(Stage::Lock, deadline, &what);
    error.with_last_seen(format!("held by process {}", holder.unwrap_or_default()))
}

impl Drop for DeviceLock {
    fn drop(&mut self) {
        if self.keeps_file {
            return;
        }
        crash_point!(DeviceLockToDrop);
        // The last sharer removes the file. While `relock` converts the lock, another
        // process may take it for a moment.
        if self.shared {
            let alone = self.file.relock(FlockArg::LockExclusiveNonblock).is_ok();
            if !alone || !lock_file::is_at(&self.path, &self.file).unwrap_or(false) {
                return;
            }
        }
        // The path belongs to the exclusive holder, and a process that waits on the file
        // checks the path again.
        let _ = fs::remove_file(&self.path);
        crash_point!(DeviceLockDropped);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::ErrorKind;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    /// A deadline for a wait that must fail, long enough for the wait to begin.
    fn in_a_moment() -> Deadline {
        Deadline::after(Duration::from_millis(300))
    }

    #[test]
    fn the_process_id_of_a_dead_holder_is_replaced_whole() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        fs::create_dir_all(run_dir::path(&roots)).unwrap();
        let path = DeviceLock::path(&roots, "a");
        fs::write(&path, "123456789012").unwrap();
        let lock = DeviceLock::take(&roots, "a", soon()).unwrap();
        assert!(lock.was_abandoned());
        let id = std::process::id().to_string();
        assert_eq!(fs::read_to_string(&path).unwrap(), id);
    }

    #[track_caller]
    fn leaves_no_file(roots: &Roots) {
        assert_eq!(fs::read_dir(run_dir::path(roots)).unwrap().count(), 0);
    }

    #[test]
    fn a_call_that_timed_out_takes_nothing_when_the_lock_comes_free() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let held = DeviceLock::take(&roots, "nbd0", soon()).unwrap();
        for _ in 0..20 {
            let limit = Deadline::after(Duration::from_millis(5));
            DeviceLock::take(&roots, "nbd0", limit).unwrap_err();
        }
        drop(held);
        for _ in 0..100 {
            leaves_no_file(&roots);
        }
    }

    #[test]
    fn a_device_lock_is_held_by_one_at_a_time_and_leaves_no_file() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let lock = DeviceLock::take(&roots, "scsi-0:0:0:0", soon()).unwrap();
        let error = DeviceLock::take(&roots, "scsi-0:0:0:0", in_a_moment()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.stage(), Some(Stage::Lock));
        let holder = format!("held by process {}", std::process::id());
        assert_eq!(error.last_seen(), Some(&*holder));
        DeviceLock::take(&roots, "scsi-0:0:0:1", soon()).unwrap();
        drop(lock);
        DeviceLock::take(&roots, "scsi-0:0:0:0", soon()).unwrap();
        leaves_no_file(&roots);
    }

    #[test]
    fn a_shared_device_lock_blocks_an_exclusive_one_until_the_last_holder_drops_it() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let alone = |deadline| DeviceLock::take(&roots, "session-1", deadline);
        let [one, other] =
            [(); 2].map(|()| DeviceLock::share(&roots, "session-1", soon()).unwrap());
        assert!(alone(in_a_moment()).is_err());
        drop(one);
        assert!(alone(in_a_moment()).is_err(), "the other has it still");
        drop(other);
        let held = alone(soon()).unwrap();
        let error = DeviceLock::share(&roots, "session-1", in_a_moment()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(held);
        DeviceLock::share(&roots, "session-1", soon()).unwrap();
        leaves_no_file(&roots);
    }

    #[cfg(feature = "journal")]
    #[test]
    fn what_a_process_left_that_died_is_swept_and_what_is_held_is_not() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let _held = DeviceLock::take(&roots, "nbd0", soon()).unwrap();
        fs::write(roots.run.join("lunbd/nbd1.lock"), "1").unwrap();
        DeviceLock::purge_stale(&roots, "login-");
        let left = sysfs::names(&roots.run.join("lunbd")).unwrap();
        assert_eq!(left, ["nbd0.lock"]);
        assert!(DeviceLock::try_take(&roots, "nbd0").unwrap().is_none());
    }

    #[cfg(feature = "journal")]
    #[test]
    fn the_next_holder_of_a_lock_learns_whether_the_last_one_died_with_it() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let lock = DeviceLock::take(&roots, "login-1", soon()).unwrap();
        assert!(!lock.was_abandoned());
        assert_eq!(
            DeviceLock::take_abandoned(&roots, "login-").unwrap().len(),
            0
        );
        lock.abandon();
        DeviceLock::purge_stale(&roots, "login-");
        let mut left = DeviceLock::take_abandoned(&roots, "login-").unwrap();
        assert!(left.pop().unwrap().was_abandoned());
        assert_eq!(left.len(), 0);
        leaves_no_file(&roots);
        assert!(
            !DeviceLock::take(&roots, "login-1", soon())
                .unwrap()
                .was_abandoned()
        );
    }
}
