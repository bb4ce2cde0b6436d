//! Finds the device that is connected under a backend id, without a read of each device
//! for each question.
//!
//! When a device is connected, its `pid` appears and the kernel sends a `change` event.
//! Its `backend` appears after the event or, on newer kernels, before its `pid`. A
//! disconnect removes the size, sends its event, and then removes `pid` and `backend`
//! (`drivers/block/nbd.c`, `nbd_genl_connect`, `nbd_config_put`). So a device that was
//! free or had an id when it was read sends an event before it is connected under another
//! id. A device with a `pid` and no id may get an id without a further event, so it is
//! read at each question.

use std::collections::{BTreeMap, BTreeSet};

use super::device::NbdDevice;
use crate::error::Result;
use crate::id::{BackendId, NbdIndex};
use crate::kernel::{Roots, sysfs};
use crate::uevent::{Changed, Changes, Hub};

/// The devices of the machine and their backend ids. Without events it reads each device
/// at each question.
#[derive(Debug)]
pub(crate) struct Backends {
    changes: Option<Changes>,
    known: Option<BTreeMap<NbdIndex, BackendState>>,
}

/// The state that was read of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
enum BackendState {
    /// The device is not connected.
    Free,
    /// The device has this id. After its disconnect has begun it keeps the id for a
    /// moment. A device with a size is `settled`, because its disconnect will send an
    /// event.
    Named { backend: String, settled: bool },
    /// The device has a `pid` and shows no id.
    Unnamed,
}

impl Backends {
    /// Listens from now on. It reads nothing yet.
    pub(crate) fn new(hub: &Hub) -> Self {
        Self::of(hub.changes(device_in))
    }

    fn of(changes: Option<Changes>) -> Self {
        let known = None;
        Self { changes, known }
    }

    /// The connected devices with this id: at most one, unless another program gave an id
    /// twice, which the kernel does not check.
    pub(crate) fn of_backend(&mut self, roots: &Roots, id: &BackendId) -> Result<Vec<NbdDevice>> {
        let (known, read_alone) = self.read(roots, true)?;
        let is_named = |seen: &BackendState| matches!(seen, BackendState::Named { backend, .. } if backend == id.as_str());
        let named: Vec<NbdIndex> = known
            .iter()
            .filter(|(_, seen)| is_named(seen))
            .map(|(index, _)| *index)
            .collect();
        let mut devices = Vec::new();
        for index in named {
            // A disconnect may have begun since the device was read, unless this question has just
            // read it alone.
            if read_alone == Some(index)
                || backend_of(roots, index)?.as_deref() == Some(id.as_str())
            {
                devices.extend(NbdDevice::find(roots, index)?);
            } else if let Some(known) = &mut self.known {
                read_one(roots, index, known)?;
            }
        }
        Ok(devices)
    }

    /// The indexes to try, lowest first: the unconnected ones, then the next index, which
    /// the kernel creates a device for.
    pub(crate) fn candidates(&mut self, roots: &Roots) -> Result<Vec<NbdIndex>> {
        if self.changes.is_none() {
            return NbdDevice::candidates(roots);
        }
        let (known, _) = self.read(roots, false)?;
        let is_free = |seen: &BackendState| matches!(seen, BackendState::Free);
        let free = known.iter().filter(|(_, seen)| is_free(seen));
        let mut indexes: Vec<NbdIndex> = free.map(|(index, _)| *index).collect();
        let last = known.keys().next_back();
        indexes.extend(NbdIndex::new(
            last.map_or(0, |last| last.get().saturating_add(1)),
        ));
        Ok(indexes)
    }

    /// Makes the next question read each device.
    pub(crate) fn invalidate(&mut self) {
        self.known = None;
    }

    /// The current devices, and the device that this question has read if it has read one alone.
    /// With `settle` it reads the sizes that the first read left out.
    fn read(
        &mut self,
        roots: &Roots,
        settle: bool,
    ) -> Result<(&BTreeMap<NbdIndex, BackendState>, Option<NbdIndex>)> {
        let changed = self
            .changes
            .as_mut()
            .map_or(Changed::Unknown, Changes::take);
        let mut read_alone = None;
        // An error on the way leaves nothing behind that could be out of date.
        let known = match (changed, self.known.take()) {
            (Changed::These(names), Some(mut known)) => {
                let changed = names.iter().filter_map(|name| NbdIndex::of_name(name));
                let mut to_read: BTreeSet<NbdIndex> = changed.collect();
                let unsettled = known.iter().filter(|(_, seen)| match seen {
                    BackendState::Free => false,
                    BackendState::Named { settled, .. } => settle && !settled,
                    BackendState::Unnamed => true,
                });
                to_read.extend(unsettled.map(|(index, _)| *index));
                for &index in &to_read {
                    read_one(roots, index, &mut known)?;
                }
                read_alone = to_read.pop_first().filter(|_| to_read.is_empty());
                known
            }
            _ => read_all(roots)?,
        };
        Ok((self.known.insert(known), read_alone))
    }
}

/// The name of the NBD device in the path of its event, or of an event of its partition.
fn device_in(devpath: &str) -> Option<&str> {
    let mut names = devpath.split('/');
    names.find(|name| NbdIndex::of_name(name).is_some())
}

/// Reads one file of each connected device, because there may be a thousand.
fn read_all(roots: &Roots) -> Result<BTreeMap<NbdIndex, BackendState>> {
    let mut known = BTreeMap::new();
    for index in NbdDevice::indexes(roots)? {
        let seen = match backend_of(roots, index)? {
            Some(backend) => BackendState::Named {
                backend,
                settled: false,
            },
            None if folder(roots, index).join("pid").exists() => BackendState::Unnamed,
            None => BackendState::Free,
        };
        known.insert(index, seen);
    }
    Ok(known)
}

fn read_one(
    roots: &Roots,
    index: NbdIndex,
    known: &mut BTreeMap<NbdIndex, BackendState>,
) -> Result<()> {
    let folder = folder(roots, index);
    let seen = if let Some(backend) = backend_of(roots, index)? {
        let size = sysfs::read_if_there(&folder.join("size"))?;
        let settled = size.is_some_and(|size| size != "0");
        Some(BackendState::Named { backend, settled })
    } else if folder.join("pid").exists() {
        Some(BackendState::Unnamed)
    } else {
        folder.exists().then_some(BackendState::Free)
    };
    match seen {
        Some(seen) => known.insert(index, seen),
        None => known.remove(&index),
    };
    Ok(())
}

fn folder(roots: &Roots, index: NbdIndex) -> std::path::PathBuf {
    roots.sysfs.join("block").join(index.name())
}

/// The device's id; empty if it was connected without one; `None` if the kernel shows
/// none.
fn backend_of(roots: &Roots, index: NbdIndex) -> Result<Option<String>> {
    sysfs::read_if_there(&folder(roots, index).join("backend"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::*;
    use crate::uevent::ChangedNames;

    struct Machine {
        _root: tempfile::TempDir,
        roots: Roots,
        noted: Arc<ChangedNames>,
        backends: Backends,
    }

    impl Machine {
        /// A machine with these devices, none of them connected.
        fn new(indexes: std::ops::Range<u32>) -> Self {
            let root = tempfile::tempdir().unwrap();
            let roots = Roots::below(root.path());
            fs::create_dir_all(roots.sysfs.join("block")).unwrap();
            let (changes, noted) = Changes::for_test(device_in);
            let machine = Self {
                _root: root,
                roots,
                noted,
                backends: Backends::of(Some(changes)),
            };
            for index in indexes {
                machine.add(index);
            }
            machine
        }

        fn dir(&self, index: u32) -> PathBuf {
            self.roots.sysfs.join(format!("block/nbd{index}"))
        }

        fn add(&self, index: u32) {
            fs::create_dir_all(self.dir(index)).unwrap();
            let files = [("dev", format!("43:{index}\n")), ("size", "0\n".to_owned())];
            for (file, text) in files {
                fs::write(self.dir(index).join(file), text).unwrap();
            }
        }

        fn event(&self, index: u32) {
            self.noted.event(&format!("/block/nbd{index}"));
        }

        /// Shows the files of a connected device, without the event.
        fn show(&self, index: u32, id: &str) {
            for (file, text) in [("pid", "7\n"), ("size", "8\n"), ("backend", id)] {
                fs::write(self.dir(index).join(file), text).unwrap();
            }
        }

        fn connect(&self, index: u32, id: &str) {
            self.show(index, id);
            self.event(index);
        }

        fn disconnect(&self, index: u32) {
            fs::write(self.dir(index).join("size"), "0\n").unwrap();
            self.event(index);
            for file in ["pid", "backend"] {
                fs::remove_file(self.dir(index).join(file)).unwrap();
            }
        }

        fn with(&mut self, id: &str) -> Vec<u32> {
            let id = id.parse().unwrap();
            let found = self.backends.of_backend(&self.roots, &id).unwrap();
            found.iter().map(|device| device.index().get()).collect()
        }

        fn free(&mut self) -> Vec<u32> {
            let free = self.backends.candidates(&self.roots).unwrap();
            free.iter().map(|index| index.get()).collect()
        }
    }

    #[test]
    fn a_connect_and_a_disconnect_of_another_process_are_seen_by_their_events() {
        let mut machine = Machine::new(0..3);
        machine.connect(0, "first");
        assert_eq!(machine.with("first"), [0]);
        assert!(machine.with("second").is_empty());
        assert_eq!(machine.free(), [1, 2, 3]);
        machine.connect(2, "second");
        assert_eq!(machine.with("second"), [2]);
        assert_eq!(machine.free(), [1, 3]);
        machine.disconnect(0);
        assert!(machine.with("first").is_empty());
        assert_eq!(machine.free(), [0, 1, 3]);
        machine.connect(0, "third");
        assert_eq!(machine.with("third"), [0]);
        machine.add(3);
        machine.event(3);
        assert_eq!(machine.free(), [1, 3, 4]);
    }

    #[test]
    fn the_id_that_a_connect_shows_after_its_event_is_found() {
        let mut machine = Machine::new(0..1);
        assert!(machine.with("late").is_empty());
        fs::write(machine.dir(0).join("pid"), "7\n").unwrap();
        machine.event(0);
        assert!(machine.with("late").is_empty());
        machine.show(0, "late");
        assert_eq!(machine.with("late"), [0]);
    }

    #[test]
    fn a_device_whose_disconnect_had_begun_when_it_was_read_is_free_in_the_end() {
        for known_before in [true, false] {
            let mut machine = Machine::new(0..1);
            machine.connect(0, "going");
            if known_before {
                assert_eq!(machine.with("going"), [0]);
            }
            fs::write(machine.dir(0).join("size"), "0\n").unwrap();
            machine.event(0);
            // The id stays a moment longer than the event.
            assert_eq!(machine.with("going"), [0]);
            for file in ["pid", "backend"] {
                fs::remove_file(machine.dir(0).join(file)).unwrap();
            }
            assert!(machine.with("going").is_empty());
            assert_eq!(machine.free(), [0, 1]);
        }
    }

    #[test]
    fn a_device_without_an_event_is_not_read_again_until_events_are_lost() {
        let mut machine = Machine::new(0..2);
        machine.connect(0, "first");
        assert_eq!(machine.with("first"), [0]);
        // No kernel does this. It proves which devices are read.
        machine.show(1, "unseen");
        assert!(machine.with("unseen").is_empty());
        machine.noted.mark_lost();
        assert_eq!(machine.with("unseen"), [1]);
        machine.backends.invalidate();
        machine.show(0, "other");
        assert_eq!(machine.with("other"), [0]);
    }

    #[test]
    fn an_id_is_read_again_on_the_device_before_it_is_believed() {
        let mut machine = Machine::new(0..1);
        machine.connect(0, "first");
        // After two questions the device is settled: its disconnect would send an event.
        for _ in 0..2 {
            assert_eq!(machine.with("first"), [0]);
        }
        machine.show(0, "other");
        assert!(machine.with("first").is_empty());
        assert_eq!(machine.with("other"), [0]);
    }

    #[test]
    fn two_devices_with_one_id_are_both_found_and_one_that_was_removed_is_not() {
        let mut machine = Machine::new(0..3);
        machine.connect(0, "twice");
        machine.connect(2, "twice");
        assert_eq!(machine.with("twice"), [0, 2]);
        fs::remove_dir_all(machine.dir(2)).unwrap();
        machine.event(2);
        assert_eq!(machine.with("twice"), [0]);
        assert_eq!(machine.free(), [1, 2]);
    }

    #[test]
    fn without_events_each_question_looks_at_each_device() {
        let mut machine = Machine::new(0..2);
        machine.backends = Backends::of(None);
        machine.show(1, "first");
        assert_eq!(machine.with("first"), [1]);
        machine.show(0, "second");
        assert_eq!(machine.with("second"), [0]);
        assert_eq!(machine.free(), [2]);
    }

    /// How many reads this thread has made.
    fn reads() -> u64 {
        let io = fs::read_to_string("/proc/thread-self/io").unwrap();
        let count = io.lines().find_map(|line| line.strip_prefix("syscr: "));
        count.unwrap().parse().unwrap()
    }

    #[test]
    fn the_questions_of_one_more_device_read_as_much_beside_a_thousand_others_as_beside_ten() {
        let read_beside = |others: u32| {
            let mut machine = Machine::new(0..others + 1);
            for index in 0..others {
                machine.connect(index, &format!("v{index}"));
            }
            // The first question reads the ids, and the second the sizes.
            for _ in 0..2 {
                assert!(machine.with("wanted").is_empty());
            }
            let before = reads();
            assert!(machine.with("wanted").is_empty());
            assert_eq!(machine.free(), [others, others + 1]);
            machine.connect(others, "wanted");
            assert_eq!(machine.with("wanted"), [others]);
            reads() - before
        };
        let few = read_beside(10);
        assert!(few > 0);
        assert_eq!(read_beside(1000), few);
    }
}
