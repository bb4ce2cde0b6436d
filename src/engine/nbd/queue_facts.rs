//! The attributes of a device's queue.
//!
//! A process that changes one may wait for the requests in flight, and a read of the attributes
//! waits for that process. On a dead link the requests wait for a heal. So a heal must not wait for
//! the attributes: after a moment it goes by what this process knew of them.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::error::{Error, Result, Stage};
use crate::nbd::{NbdDevice, QueueFacts};

/// A kernel that can show the attributes does so at once.
const LIMIT_IF_NOT_NEEDED: Duration = Duration::from_secs(1);

/// What the device's queue shows, or showed when this process read it last.
///
/// # Errors
/// Fails if sysfs cannot be read; `TimedOut` at stage `probe` if the kernel does not show the
/// attributes, and this process does not know them.
pub(in crate::engine) fn queue_facts(
    engine: &Engine,
    device: &NbdDevice,
    deadline: Deadline,
) -> Result<QueueFacts> {
    let (index, connected_by) = (device.index(), device.pid()?);
    let known = engine.nbd_queues.known(index, connected_by);
    let limit = match known {
        Some(_) => deadline.at_most(LIMIT_IF_NOT_NEEDED),
        None => deadline,
    };
    match (
        read(engine, device, limit, NbdDevice::read_queue_facts)?,
        known,
    ) {
        (Some(facts), _) => {
            engine.nbd_queues.note(index, connected_by, facts.clone());
            Ok(facts)
        }
        (None, Some(known)) => {
            tracing::warn!(%index, "the kernel does not show the attributes of the queue");
            known.with_size_of(device)
        }
        (None, None) => Err(not_shown(device, deadline)),
    }
}

/// Reads what the queue of a device of another process shows, unless this process knows it. A later
/// heal may need it.
pub(in crate::engine) fn learn_queue_facts(
    engine: &Engine,
    device: &NbdDevice,
    deadline: Deadline,
) {
    let connected_by = device.pid().ok().flatten();
    if engine
        .nbd_queues
        .known(device.index(), connected_by)
        .is_some()
    {
        return;
    }
    let limit = deadline.at_most(LIMIT_IF_NOT_NEEDED);
    if let Err(error) = queue_facts(engine, device, limit) {
        tracing::debug!(%error, index = %device.index(), "the queue is not known");
    }
}

/// As [`NbdDevice::require_block_size`], by `deadline`.
///
/// # Errors
/// Also `TimedOut` at stage `probe`.
pub(in crate::engine) fn require_block_size(
    engine: &Engine,
    device: &NbdDevice,
    wanted: u32,
    deadline: Deadline,
) -> Result<()> {
    let require = move |device: &NbdDevice| device.require_block_size(wanted);
    read(engine, device, deadline, require)?.ok_or_else(|| not_shown(device, deadline))
}

/// Reads attributes of the queue, of each device on one thread at a time; `None` if the kernel has
/// not shown them by `deadline`.
fn read<T: Send + 'static>(
    engine: &Engine,
    device: &NbdDevice,
    deadline: Deadline,
    read: impl FnOnce(&NbdDevice) -> Result<T> + Send + 'static,
) -> Result<Option<T>> {
    let own = device.clone();
    let read = move |_: &_, _: &_| read(&own);
    let reads = &engine.nbd_queues.reads;
    let begun = reads.start(device, engine.roots(), deadline, read)?;
    begun.and_then(|begun| begun.wait(deadline)).transpose()
}

fn not_shown(device: &NbdDevice, deadline: Deadline) -> Error {
    let what = format!(
        "the kernel to show the queue of nbd{}, which a process may be changing",
        device.index()
    );
    Error::timed_out(Stage::Probe, deadline, &what)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;
    use crate::error::ErrorKind;
    use crate::kernel::Roots;
    use crate::nbd::connected;

    #[test]
    fn facts_that_the_kernel_does_not_show_are_those_from_before_and_one_thread_waits_for_them() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        fs::create_dir_all(&roots.run).unwrap();
        let (device, queue) = connected(&roots);
        let dir = device.disk().dir().to_owned();
        fs::write(dir.join("pid"), "1\n").unwrap();
        fs::write(queue.join("iostats"), "1\n").unwrap();
        let engine = Engine::start(roots).unwrap();
        let index = device.index();
        let facts = |seconds| {
            let deadline = Deadline::after(Duration::from_secs(seconds));
            queue_facts(&engine, &device, deadline)
        };
        learn_queue_facts(&engine, &device, Deadline::after(Duration::from_secs(60)));
        let before = engine.nbd_queues.known(index, Some(1)).unwrap();
        assert!(before.counts_requests);
        // A process changes an attribute: an open of this blocks until a writer comes.
        let attribute = queue.join("iostats");
        fs::remove_file(&attribute).unwrap();
        mkfifo(&attribute, Mode::S_IRWXU).unwrap();
        fs::write(dir.join("size"), "4096\n").unwrap();
        let grown = before.clone().with_size_of(&device).unwrap();
        assert_ne!(grown, before);
        assert_eq!(facts(60).unwrap(), grown);
        // That of the device's facts, and the one that waits.
        assert_eq!(engine.nbd_queues.reads.begun(), 2);
        assert_eq!(facts(60).unwrap(), grown);
        assert_eq!(engine.nbd_queues.reads.begun(), 2);
        // Another process connects it anew.
        fs::write(dir.join("pid"), "2\n").unwrap();
        let error = facts(0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        let now = Deadline::after(Duration::ZERO);
        let error = require_block_size(&engine, &device, 512, now).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        // This ends the waiting open.
        let writer = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(attribute);
        drop(writer.unwrap());
    }
}
