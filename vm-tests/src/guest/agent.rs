//! The calls of an agent that links `lunbd`, on the target of a test.

use std::fs;
use std::fs::OpenOptions;
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::Duration;

use lunbd::engine::DetachFailure;
use lunbd::engine::journal::Record;
use lunbd::id::{Hctl, HostNo, Lun};
use lunbd::transport::RouteKind;
use lunbd::{AttachRequest, Attachment, Deadline, Detachment, Engine, Roots, Source};

use super::ScsiDebug;

/// Starts an engine on the guest.
#[must_use]
pub fn engine() -> Engine {
    super::enter();
    Engine::start(Roots::default()).expect("an engine")
}

/// A deadline longer than any call here takes that is not meant to time out.
#[must_use]
pub fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// The address of a LUN of target 0 on the first host.
#[must_use]
pub fn at(target: &ScsiDebug, lun: Lun) -> Hctl {
    Hctl {
        host: HostNo(target.host()),
        channel: 0,
        target: 0,
        lun,
    }
}

/// The same as a source, by the kernel's LUN number.
#[must_use]
pub fn unit(target: &ScsiDebug, lun: u64) -> Source {
    at(target, Lun::from_kernel(lun)).into()
}

/// Attaches the unit; panics if that fails.
#[allow(
    clippy::must_use_candidate,
    reason = "some tests want the device and not the answer"
)]
pub fn attach(engine: &Engine, target: &ScsiDebug, lun: u64) -> Attachment {
    let request = AttachRequest::new(unit(target, lun));
    engine.attach(&request, soon()).expect("an attach")
}

/// Detaches the unit.
pub fn detach(engine: &Engine, target: &ScsiDebug, lun: u64) -> Result<Detachment, DetachFailure> {
    engine.detach(unit(target, lun), soon())
}

/// Panics unless `second` is a new scan of a disk that `first` had before. The kernel numbers
/// the instances of disks since 5.15; before that only the scan distinguishes them.
pub fn assert_is_another_life(first: &Attachment, second: &Attachment) {
    assert!(second.changed, "{second:?}");
    assert_eq!(second.diskseq.is_some(), super::kernel() >= (5, 15));
    if second.diskseq.is_some() {
        assert_ne!(second.diskseq, first.diskseq);
    }
}

/// The number of the session of the attachment's first path; panics if the path is not iSCSI's.
#[must_use]
pub fn session_of(attachment: &Attachment) -> u32 {
    let path = attachment.paths().first().expect("a path");
    match &path.via {
        RouteKind::Iscsi {
            session: Some(id), ..
        } => id.0,
        other => panic!("{other:?}"),
    }
}

/// Panics unless data that is written comes back when it is read from the device again.
pub fn writes_and_reads(attachment: &Attachment) {
    let data: Vec<u8> = (0..256 * 1024_u32)
        .map(|at| at.to_le_bytes()[0] ^ 0x5a)
        .collect();
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&attachment.node);
    let mut disk = disk.expect("the node");
    disk.write_all(&data).expect("a write");
    disk.sync_all().expect("a flush");
    let node = attachment.node.to_str().expect("UTF-8");
    super::run(&["blockdev", "--flushbufs", node]);
    disk.rewind().expect("its beginning");
    let mut found = vec![0; data.len()];
    disk.read_exact(&mut found).expect("a read");
    assert!(found == data, "other data came back");
}

/// The names in a journal's directory, except its lock and the records of volumes whose
/// detach is proven.
#[must_use]
pub fn journal_files(journal: &Path) -> Vec<String> {
    let is_detached = |name: &str| {
        let read = fs::read(journal.join(name)).ok();
        let record = read.and_then(|bytes| Record::parse(&bytes).ok());
        record.is_some_and(|record| record.detached.is_some())
    };
    let mut names = super::entries(journal);
    names.retain(|name| name != "journal.lock" && !is_detached(name));
    names
}
