//! One at a time on one device, across all processes of the machine.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};

use crate::crash::point;
use crate::deadline::{Backoff, Deadline};
use crate::engine::lock::lock_file::{self, Locked};
use crate::engine::lock::run_dir;
use crate::error::{Error, Result, Stage};
use crate::id::{BackendId, Hctl, Wwid};
use crate::kernel::{Roots, sysfs};

/// The right to work on one device. The kernel takes it back when the process
/// dies, in whatever way.
#[derive(Debug)]
pub(in crate::engine) struct DeviceLock {
    path: PathBuf,
    // Closed, and so released, after the file is removed.
    file: Flock<File>,
    /// With others.
    shared: bool,
    was_abandoned: bool,
    stays: bool,
}

impl DeviceLock {
    /// Waits for the right to work on `name`. No thread is left waiting when the deadline
    /// has passed.
    ///
    /// # Errors
    /// `NotPermitted` where the lock's folder cannot be written; `TimedOut` at
    /// stage `lock`, naming the process that has it.
    pub(in crate::engine) fn take(roots: &Roots, name: &str, deadline: Deadline) -> Result<Self> {
        Self::take_as(roots, name, false, deadline)
    }

    /// As [`take`](Self::take), with others that share it: only who takes it
    /// alone is kept out.
    pub(in crate::engine) fn share(roots: &Roots, name: &str, deadline: Deadline) -> Result<Self> {
        Self::take_as(roots, name, true, deadline)
    }

    fn take_as(roots: &Roots, name: &str, shared: bool, deadline: Deadline) -> Result<Self> {
        let path = Self::path(roots, name);
        let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(20));
        loop {
            if let Some(lock) = Self::try_at(&path, shared)? {
                return Ok(lock);
            }
            if deadline.has_passed() {
                return Err(not_free(&path, name, deadline));
            }
            deadline.pause(pauses.pause());
        }
    }

    /// The name of the right to work on a unit, by whatever address. It is taken
    /// after those of addresses, so that two never wait for each other.
    pub(in crate::engine) fn of_unit(name: &Wwid) -> String {
        /// A file's name has 255 characters at most; two units that share the
        /// first of a vendor's long text only wait for each other.
        const LONGEST: usize = 200;
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let name = name.to_string();
        let name: String = name.chars().take(LONGEST).map(plain).collect();
        format!("unit-{name}")
    }

    /// The name of the right to work on a backend id, which may hold what no file name
    /// can.
    pub(in crate::engine) fn of_backend(backend: &BackendId) -> String {
        format!("nbd-id-{:016x}", backend.digest())
    }

    /// What is shared by the scans of an address that the kernel has not ended, those
    /// of processes that were killed included.
    pub(in crate::engine) fn of_scan(hctl: Hctl) -> String {
        format!("scan-{hctl}")
    }

    /// Waits until nobody has the right to work on `name`.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(in crate::engine) fn wait(roots: &Roots, name: &str, deadline: Deadline) -> Result<()> {
        let path = Self::path(roots, name);
        let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        while Self::is_held(roots, name)? {
            if deadline.has_passed() {
                return Err(not_free(&path, name, deadline));
            }
            deadline.pause(pauses.pause());
        }
        Ok(())
    }

    /// Whether somebody has the right to work on `name`.
    pub(in crate::engine) fn is_held(roots: &Roots, name: &str) -> Result<bool> {
        let path = Self::path(roots, name);
        Ok(path.exists() && Self::try_at(&path, false)?.is_none())
    }

    /// Takes the right to work on `name` if nobody has it.
    pub(in crate::engine) fn try_take(roots: &Roots, name: &str) -> Result<Option<Self>> {
        Self::try_at(&Self::path(roots, name), false)
    }

    /// Whether its last holder died with it, or [left](Self::leave) it so.
    pub(in crate::engine) fn was_abandoned(&self) -> bool {
        self.was_abandoned
    }

    /// Drops it as a process does that dies with it: who takes it next sees that what
    /// was done under it has not come to its end.
    pub(in crate::engine) fn abandon(mut self) {
        self.stays = true;
    }

    /// Takes away the files that processes have left which died with a lease, but for
    /// those whose names begin with `but`.
    #[cfg(feature = "journal")]
    pub(in crate::engine) fn purge_stale(roots: &Roots, but: &str) {
        let folder = run_dir::path(roots);
        for name in sysfs::names(&folder).unwrap_or_default() {
            let path = folder.join(&name);
            if path.extension() == Some("lock".as_ref()) && !name.starts_with(but) {
                // Had, it is dropped at once, and its file with it.
                let _another_has_it = Self::try_at(&path, false);
            }
        }
    }

    /// Takes those whose names begin with `kind` and whose holders died with them.
    #[cfg(feature = "journal")]
    pub(in crate::engine) fn take_abandoned(roots: &Roots, kind: &str) -> Result<Vec<Self>> {
        let folder = run_dir::path(roots);
        let mut left = Vec::new();
        for name in sysfs::names(&folder)? {
            if name.starts_with(kind) {
                let lock = Self::try_at(&folder.join(name), false)?;
                left.extend(lock.filter(Self::was_abandoned));
            }
        }
        Ok(left)
    }

    fn path(roots: &Roots, name: &str) -> PathBuf {
        run_dir::path(roots).join(format!("{name}.lock"))
    }

    fn try_at(path: &Path, shared: bool) -> Result<Option<Self>> {
        let how = if shared {
            FlockArg::LockSharedNonblock
        } else {
            FlockArg::LockExclusiveNonblock
        };
        Self::acquire(path, how).map_err(|error| error.at(Stage::Lock))
    }

    /// `None` where another has it, or where the file that was locked is no
    /// longer the one at the path (its last holder removed it).
    fn acquire(path: &Path, how: FlockArg) -> Result<Option<Self>> {
        let failed = |error: &std::io::Error| Error::io("cannot lock", path, error);
        point!(LeaseToTake);
        let file = open(path)?;
        point!(LeaseCreated);
        let locked = lock_file::lock(path, file, how).map_err(|error| failed(&error))?;
        let Locked::Ours(mut file) = locked else {
            return Ok(None);
        };
        let ours = file.metadata().map_err(|error| failed(&error))?;
        let was_abandoned = ours.len() > 0;
        // For the error of those who wait; the lock itself is the flock.
        let emptied = if was_abandoned {
            file.set_len(0)
        } else {
            Ok(())
        };
        let _ = emptied.and_then(|()| write!(file, "{}", std::process::id()));
        point!(LeaseTaken);
        Ok(Some(Self {
            path: path.to_owned(),
            file,
            shared: matches!(how, FlockArg::LockShared | FlockArg::LockSharedNonblock),
            was_abandoned,
            stays: false,
        }))
    }
}

/// The file of a lock, in a directory that the first one makes.
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
        if self.stays {
            return;
        }
        point!(LeaseToDrop);
        // The last that shares it removes it. On the way from one lock to the
        // other it may be another's for a moment.
        if self.shared {
            let alone = self.file.relock(FlockArg::LockExclusiveNonblock).is_ok();
            if !alone || !lock_file::is_at(&self.path, &self.file).unwrap_or(false) {
                return;
            }
        }
        // While we hold the lock alone the path is ours; who waits on the file
        // looks at the path again.
        let _ = fs::remove_file(&self.path);
        point!(LeaseDropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    /// For a wait that is to be in vain, and is to have begun before it ends.
    fn in_a_moment() -> Deadline {
        Deadline::after(Duration::from_millis(300))
    }

    #[track_caller]
    fn leaves_no_file(roots: &Roots) {
        assert_eq!(fs::read_dir(run_dir::path(roots)).unwrap().count(), 0);
    }

    #[test]
    fn who_waited_in_vain_takes_nothing_when_the_lock_comes_free() {
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
    fn a_lease_is_held_by_one_at_a_time_and_leaves_no_file() {
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
    fn a_lease_that_is_shared_keeps_out_who_wants_it_alone_until_the_last_is_done() {
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
    fn who_takes_what_another_died_with_is_told_so_and_who_takes_what_was_dropped_is_not() {
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
