//! How large a volume is, and how full.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::deadline::Deadline;
use crate::engine::{Engine, InventoryUnit};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::DevNo;
use crate::kernel::blockdev;
use crate::kernel::file_system::{self, Usage};
use crate::kernel::mounts::{self, Mount};
use crate::kernel::worker;

/// The capacity of an attached block volume.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Capacity {
    /// Bytes of the device: of the map where there is one.
    pub bytes: u64,
    /// The file systems that are mounted of it, each once; none where it is used
    /// as a block device.
    pub file_systems: Vec<FileSystem>,
}

/// A mounted file system.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FileSystem {
    /// What is mounted: the device, a partition of it, or what is stacked on it.
    pub device: DevNo,
    /// Where; see [`Mount::path`].
    pub path: PathBuf,
    /// See [`Mount::pid`].
    pub pid: Option<u32>,
    /// What it says; `None` where it does not answer.
    pub usage: Option<Usage>,
    /// Why it does not.
    pub error: Option<Error>,
}

/// The questions that have not been answered, by what is mounted. A file system
/// whose device is dead may keep one for ever, and with it a thread; there is
/// never a second one.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct FileSystemQueries(Arc<Mutex<BTreeMap<DevNo, Arc<FileSystemQuery>>>>);

type Answer = Result<(Usage, DevNo), (ErrorKind, String)>;

/// One that is under way; all who want to know wait for it.
#[derive(Debug, Default)]
struct FileSystemQuery {
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

impl FileSystemQueries {
    /// Asks, unless that is under way.
    fn ask(
        &self,
        device: DevNo,
        read: impl FnOnce() -> Result<(Usage, DevNo)> + Send + 'static,
    ) -> Result<Arc<FileSystemQuery>> {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(query) = asked.get(&device) {
            return Ok(Arc::clone(query));
        }
        let query = Arc::new(FileSystemQuery::default());
        let (ours, file_system_queries) = (Arc::clone(&query), self.clone());
        worker::start(Stage::Measure, move || {
            let answer = read();
            let mut asked = file_system_queries
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            asked.remove(&device);
            drop(asked);
            let answer = answer.map_err(|error| (error.kind(), error.to_string()));
            *ours.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
            ours.answered.notify_all();
            Ok(())
        })?;
        asked.insert(device, Arc::clone(&query));
        Ok(query)
    }
}

impl FileSystemQuery {
    /// # Errors
    /// Those of the file system; `TimedOut` at stage `measure`.
    fn wait(&self, path: &Path, deadline: Deadline) -> Result<(Usage, DevNo)> {
        let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*answer {
                Some(Ok(usage)) => return Ok(*usage),
                Some(Err((kind, text))) => {
                    return Err(Error::new(*kind, text.clone()).at(Stage::Measure));
                }
                None => {}
            }
            if deadline.has_passed() {
                let what = format!(
                    "the file system at {} to say how full it is",
                    path.display()
                );
                let error = Error::timed_out(Stage::Measure, deadline, &what);
                return Err(error.with_last_seen("no answer; it is not asked again before that"));
            }
            let woken = self.answered.wait_timeout(answer, deadline.turn());
            answer = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Engine {
    /// What CSI's `NodeGetVolumeStats` asks of an attached volume, by its node or
    /// a link to it: of a disk, a partition of it or its multipath map.
    ///
    /// A file system that does not answer by `deadline` is reported with that, and
    /// all else is as it is. The thread that asks it stays until it answers, and
    /// no second one asks meanwhile.
    ///
    /// # Errors
    /// `NotFound` where nothing is at the path; `InvalidInput` where it is no
    /// block device; `NotSupported` for a device that is neither a SCSI unit nor
    /// a connected NBD device; where sysfs or the mounts cannot be read.
    pub fn capacity(&self, node: &Path, deadline: Deadline) -> Result<Capacity> {
        let at = |error: Error| error.at(Stage::Resolve);
        let devno = blockdev::devno_at(self.roots(), node).map_err(at)?;
        let Some(unit) = self.unit_behind(devno).map_err(at)? else {
            let message = "no SCSI unit and no connected NBD device is behind it";
            let error = Error::new(ErrorKind::NotSupported, message);
            return Err(at(error).with_path(node));
        };
        Ok(Capacity {
            bytes: unit.size.unwrap_or(0),
            file_systems: self.file_systems(&unit, deadline),
        })
    }

    /// Asks the file systems that are mounted of a unit for their space, all at
    /// once; see [`capacity`](Self::capacity).
    #[must_use]
    pub fn file_systems(&self, unit: &InventoryUnit, deadline: Deadline) -> Vec<FileSystem> {
        // Its first mount: those in our own namespace come first.
        let mut mounted: BTreeMap<DevNo, &Mount> = BTreeMap::new();
        for mount in &unit.mounts {
            mounted.entry(mount.device).or_insert(mount);
        }
        let file_system_queries: Vec<_> = mounted
            .into_values()
            .map(|mount| {
                let path = self.seen_from_here(mount);
                let read = move || file_system::read(&path);
                (mount, self.file_system_queries.ask(mount.device, read))
            })
            .collect();
        let answers = file_system_queries.into_iter().map(|(mount, query)| {
            let answer = query.and_then(|query| query.wait(&mount.path, deadline));
            let usage = answer.and_then(|answer| self.check(mount, answer, deadline));
            let (usage, error) = match usage {
                Ok(usage) => (Some(usage), None),
                Err(error) => (None, Some(error)),
            };
            FileSystem {
                device: mount.device,
                path: mount.path.clone(),
                pid: mount.pid,
                usage,
                error,
            }
        });
        answers.collect()
    }

    /// Where a mount is as this process sees it.
    fn seen_from_here(&self, mount: &Mount) -> PathBuf {
        let Some(pid) = mount.pid else {
            return mount.path.clone();
        };
        let root = self.roots().proc.join(format!("{pid}/root"));
        root.join(mount.path.strip_prefix("/").unwrap_or(&mount.path))
    }

    /// Makes sure that what answered is what was asked: a file system that was
    /// unmounted meanwhile leaves its directory to the one below.
    fn check(
        &self,
        mount: &Mount,
        (usage, device): (Usage, DevNo),
        deadline: Deadline,
    ) -> Result<Usage> {
        // btrfs has a number of its own for each subvolume.
        let is_it = if device.major == 0 {
            let mounts = mounts::read_mounts(self.roots(), deadline)?;
            mounts.found.contains(mount)
        } else {
            device == mount.device
        };
        if is_it {
            return Ok(usage);
        }
        let message = format!("it was unmounted from {} meanwhile", mount.path.display());
        Err(Error::new(ErrorKind::Vanished, message).at(Stage::Measure))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const DEVICE: DevNo = DevNo { major: 8, minor: 0 };

    #[test]
    fn a_file_system_that_hangs_costs_its_caller_the_deadline_and_one_thread() {
        let file_system_queries = FileSystemQueries::default();
        let answer = file_system::read(Path::new("/")).unwrap();
        let (release, hang) = mpsc::channel::<()>();
        let query = file_system_queries.ask(DEVICE, move || {
            let _released = hang.recv();
            Ok(answer)
        });
        let path = Path::new("/mnt");
        let error = query
            .unwrap()
            .wait(path, Deadline::after(Duration::from_millis(20)))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.stage(), Some(Stage::Measure));
        let again = file_system_queries.ask(DEVICE, || panic!("asked a second time"));
        let again = again.unwrap();
        drop(release);
        let soon = Deadline::after(Duration::from_secs(30));
        assert_eq!(again.wait(path, soon).unwrap(), answer);
        // The next caller asks anew.
        let failing =
            file_system_queries.ask(DEVICE, || Err(Error::new(ErrorKind::Io, "shut down")));
        let error = failing.unwrap().wait(path, soon).unwrap_err();
        assert_eq!(error.to_string(), "measure: shut down");
    }
}
