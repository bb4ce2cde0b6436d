//! A map whose first path has dirty pages of its own, which the map does not know.

use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;

use lunbd::{AttachRequest, Engine, Source};

use super::agent::soon;
use super::direct::stored;
use super::queueing_map::QueueingMap;
use super::udevd::NoWriteBackGuard;
use super::{ScsiDebug, udevd};

const WRITE_PROTECT: &str = "/sys/module/scsi_debug/parameters/wp";
const LENGTH: usize = 64 << 10;

/// A place of the disk that no table of partitions uses.
pub const WITHIN: usize = 4 << 20;

/// Makes each write to the disks of `scsi_debug` fail, or succeed again.
pub fn protect_disks(protect: bool) {
    let digit = if protect { "1" } else { "0" };
    fs::write(WRITE_PROTECT, digit).expect("scsi_debug's parameter");
}

/// The target of the paths. Neither a rule of udev nor the kernel's timer writes their pages back.
#[derive(Debug)]
pub struct Target {
    /// The target.
    pub target: ScsiDebug,
    _no_write_back: NoWriteBackGuard,
    _late_write_back: LateWriteBack,
}

/// The kernel's timer writes nothing back within ten minutes, while this lives. It writes a new
/// disk's pages back after five seconds otherwise, whatever their age: such a disk has no share of
/// the memory that may be dirty yet.
#[derive(Debug)]
struct LateWriteBack {
    /// The setting from before.
    before: String,
}

const WRITE_BACK_INTERVAL: &str = "/proc/sys/vm/dirty_writeback_centisecs";

impl LateWriteBack {
    fn new() -> Self {
        let before = fs::read_to_string(WRITE_BACK_INTERVAL).expect(WRITE_BACK_INTERVAL);
        fs::write(WRITE_BACK_INTERVAL, "60000").expect(WRITE_BACK_INTERVAL);
        Self { before }
    }
}

impl Drop for LateWriteBack {
    fn drop(&mut self) {
        let _stays_late = fs::write(WRITE_BACK_INTERVAL, &self.before);
    }
}

/// Attaches both paths of a unit, and returns their nodes.
#[must_use]
pub fn attached_paths(engine: &Engine) -> (Target, Vec<PathBuf>) {
    let no_write_back = udevd::without_write_back();
    let late_write_back = LateWriteBack::new();
    let (target, sources) = ScsiDebug::two_paths_of(16);
    let target = Target {
        target,
        _no_write_back: no_write_back,
        _late_write_back: late_write_back,
    };
    let attach = |source: &String| {
        let source: Source = source.parse().expect("a source");
        let attached = engine.attach(&AttachRequest::new(source), soon());
        let attached = attached.expect("an attachment");
        attached.paths().last().expect("a path").node.clone()
    };
    let disks = sources.iter().map(attach).collect();
    udevd::settle();
    (target, disks)
}

/// The map and its disks.
#[derive(Debug)]
pub struct DirtyPath {
    /// The nodes of the paths. The first is dirty.
    pub disks: Vec<PathBuf>,
    /// The map over them.
    pub map: QueueingMap,
    _target: Target,
}

impl DirtyPath {
    /// Attaches the paths, makes the map and writes to the path beside it.
    #[must_use]
    pub fn new(engine: &Engine) -> Self {
        let (target, disks) = attached_paths(engine);
        let map = QueueingMap::over(&disks);
        // No event is left that could write the path back, and no probe of the map that would
        // make some detaches flush it twice.
        udevd::settle();
        // The map has the path open, so that no close writes it back.
        let mut writes = OpenOptions::new()
            .write(true)
            .open(&disks[0])
            .expect("the path");
        let place = SeekFrom::Start(WITHIN as u64);
        writes.seek(place).expect("the place");
        writes.write_all(&vec![0xa5; LENGTH]).expect("a write");
        drop(writes);
        let dirty = Self {
            disks,
            map,
            _target: target,
        };
        assert!(!dirty.is_stored(), "it is written back");
        dirty
    }

    /// Whether the disk stores what was written to its page cache.
    #[must_use]
    pub fn is_stored(&self) -> bool {
        stored(&self.disks[1], WITHIN, LENGTH) == vec![0xa5; LENGTH]
    }
}
