//! The steps of an NBD detach, from top to bottom.

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::receipt::Flush;
use crate::engine::detach::{DetachRequest, Detachment, Place};
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::lock::udev_lock;
use crate::engine::nbd::backend::{device_of_backend, lock_backend};
use crate::engine::usage::claim::Claim;
use crate::engine::usage::failed_flush::FailedFlush;
use crate::engine::usage::write_back::{Claimed, claim_and_flush};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::machine;
use crate::nbd::{self, Link, NbdDevice, NewTimeouts, Reconfigure, Refusal};
use crate::uevent;

/// Detaches the device of this backend id, and no other.
pub(super) fn detach_nbd_backend(
    engine: &Engine,
    backend: BackendId,
    request: &DetachRequest,
    call: &mut CallContext,
) -> Result<Detachment> {
    call.enter(Stage::Lock);
    let lock = lock_backend(engine, &backend, call.deadline)?;
    if let Some(device) = device_of_backend(engine, &backend)? {
        let connected_by = device.pid()?;
        let backend = Some((&backend, lock));
        return disconnect(engine, &device, backend, connected_by, request, call);
    }
    require_ids(engine)?;
    Ok(Detachment::unchanged(Place::Nbd {
        index: None,
        backend: Some(backend),
    }))
}

/// Refuses the detach if the kernel stores no backend ids and an NBD device is connected. A
/// missing id then proves nothing.
fn require_ids(engine: &Engine) -> Result<()> {
    if machine::kernel_version(engine.roots()).is_ok_and(|version| version >= (5, 14)) {
        return Ok(());
    }
    for device in NbdDevice::all(engine.roots())? {
        if device.pid()?.is_none() {
            continue;
        }
        let message = format!(
            "this kernel stores no backend ids (Linux 5.14 does), so nbd{} may belong to \
             this source: name the device's node",
            device.index()
        );
        return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Resolve));
    }
    Ok(())
}

/// Detaches the device that was named, whatever its backend id. It leaves a device alone that a
/// client connects anew meanwhile.
pub(super) fn detach_nbd_device(
    engine: &Engine,
    device: &NbdDevice,
    request: &DetachRequest,
    call: &mut CallContext,
) -> Result<Detachment> {
    call.enter(Stage::Lock);
    let connected_by = device.pid()?;
    // Another client's id may be one that lunbd does not accept.
    let id = device
        .backend()?
        .and_then(|id| id.parse::<BackendId>().ok());
    let lock = |id| Ok::<_, Error>((id, lock_backend(engine, id, call.deadline)?));
    let backend = id.as_ref().map(lock).transpose()?;
    disconnect(engine, device, backend, connected_by, request, call)
}

fn disconnect(
    engine: &Engine,
    device: &NbdDevice,
    backend: Option<(&BackendId, DeviceLock)>,
    connected_by: Option<u32>,
    request: &DetachRequest,
    call: &mut CallContext,
) -> Result<Detachment> {
    let deadline = call.deadline;
    let (roots, index, disk) = (engine.roots(), device.index(), device.disk());
    let (backend, backend_lock) = backend.unzip();
    let place = Place::Nbd {
        index: Some(index),
        backend: backend.cloned(),
    };
    let Some(index_lock) = lock_connected(engine, device, connected_by, deadline)? else {
        return Ok(Detachment::unchanged(place));
    };
    let locks = Arc::new((index_lock, backend_lock));
    let mut watch = engine.hub().watch(&index.name());
    let mark = FailedFlush::of(roots, disk)?;
    let has_lost_before = mark.read()?.is_some();
    // This call holds the lock of the connections to its end: until the device is free, a kernel
    // without the fix of 6.14 would take another connection of a heal.
    let (flush, not_looked_at, _connections) =
        match claim_and_flush(engine, disk, request.flush_policy, &mut watch, call) {
            Err(error)
                if !has_lost_before
                    && (error.kind(), error.stage()) == (ErrorKind::Io, Some(Stage::Flush))
                    && matches!(was_disconnected(engine, index, backend, deadline), Ok(true)) =>
            {
                mark.clear();
                let why = format!("{WAS_DISCONNECTED}: {error}");
                (Flush::Unreachable(why), Vec::new(), None)
            }
            claimed => {
                let Claimed {
                    claim,
                    mut flush,
                    not_looked_at,
                } = claimed?;
                // With no page to write and no cache to flush, the kernel sends nothing and reports
                // success. An earlier call may have lost pages of the device, and has left no mark.
                call.enter(Stage::Disconnect);
                if flush == Flush::Done && was_disconnected(engine, index, backend, deadline)? {
                    flush = Flush::Unreachable(WAS_DISCONNECTED.to_owned());
                }
                let lock = |id| lock_connections_of(engine, device, id, deadline);
                let connections = backend.map(lock).transpose()?;
                if let Claim::Held(file) = &claim {
                    udev_lock::keep_udev_away(file, deadline);
                }
                let held = Box::new(Arc::clone(&locks));
                end_link(engine, index, &flush, held, deadline)?;
                // The kernel releases the configuration at the last close.
                drop(claim);
                (flush, not_looked_at, connections)
            }
        };

    call.enter(Stage::Confirm);
    nbd::wait_until_free(device, connected_by, &mut watch, deadline)?;
    engine.nbd_offers.close(index);

    // A flush that hung has ended by now and recorded its result.
    mark.clear();

    call.enter(Stage::Settle);
    match uevent::settle_again(&mut watch, engine.hub().mode(), roots, disk.dir(), deadline) {
        // A device that was made for one connection is removed after it.
        Err(error) if error.kind() == ErrorKind::Vanished => {}
        result => drop(result?),
    }
    Ok(Detachment {
        node: Some(disk.node(roots)),
        devno: Some(disk.devno()),
        diskseq: disk.diskseq()?,
        safe_to_unmap: flush == Flush::Done,
        flush: Some(flush),
        changed: true,
        not_looked_at,
        ..Detachment::unchanged(place)
    })
}

const WAS_DISCONNECTED: &str = "it had been disconnected before this call";

/// Whether the device had been disconnected. A device that a process has open stays until its last
/// close, and fails all I/O. A kernel that does not tell (before 6.14, and stable kernels without
/// that fix) leaves a failed flush a loss. So does a device without a backend id: the kernel gives
/// the same answer for one that an ioctl has connected (`drivers/block/nbd.c`, `NBD_RT_BOUND`).
///
/// # Errors
/// If the kernel does not answer, or in a way that no state of the device explains.
fn was_disconnected(
    engine: &Engine,
    index: NbdIndex,
    backend: Option<&BackendId>,
    deadline: Deadline,
) -> Result<bool> {
    let Some(backend) = backend else {
        return Ok(false);
    };
    // A disconnect ends each connection (`drivers/block/nbd.c`, `sock_shutdown`), so a live one
    // saves the question.
    let lives = |link: &Link| link.state().live > 0;
    if engine.links.lock().get(&index).is_some_and(lives) {
        return Ok(false);
    }
    let question = Reconfigure::new(index, NewTimeouts::default()).backend(backend.clone());
    let Err(error) = question.send(engine.roots(), deadline) else {
        return Ok(false);
    };
    match Refusal::of(&error) {
        Some(Refusal::GoingDown) => Ok(true),
        // It ended meanwhile, and the disconnect finds that too.
        Some(Refusal::NotConnected | Refusal::UnknownIndex | Refusal::OtherBackend) => Ok(false),
        _ => Err(error),
    }
}

/// Locks the index of a device that `connected_by` connected; `None` if it is not connected.
///
/// # Errors
/// `Vanished` if a client has connected it anew before the lock was taken; `TimedOut` at stage
/// `lock`.
fn lock_connected(
    engine: &Engine,
    device: &NbdDevice,
    connected_by: Option<u32>,
    deadline: Deadline,
) -> Result<Option<DeviceLock>> {
    let index = device.index();
    let lock = DeviceLock::take(engine.roots(), &index.name(), deadline)?;
    let connected_by_now = device.pid()?;
    if connected_by_now.is_none() {
        // An earlier disconnect, whose end no caller saw, has left these.
        engine.links.lock().remove(&index);
        engine.nbd_offers.close(index);
        if let Ok(mark) = FailedFlush::of(engine.roots(), device.disk()) {
            mark.clear();
        }
        return Ok(None);
    }
    if connected_by_now != connected_by {
        let message = format!("nbd{index} was connected anew meanwhile: it was left alone");
        return Err(Error::new(ErrorKind::Vanished, message).at(Stage::Lock));
    }
    Ok(Some(lock))
}

/// Locks the connections of this backend id, which the device must still have. Under the
/// claim no other process can start to use the device, but a client may have connected the
/// index anew before.
fn lock_connections_of(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
    deadline: Deadline,
) -> Result<DeviceLock> {
    let connections = DeviceLock::of_connections(backend);
    let lock = DeviceLock::take(engine.roots(), &connections, deadline)?;
    let now = device.backend()?.unwrap_or_default();
    if now == backend.as_str() {
        return Ok(lock);
    }
    let index = device.index();
    let message = format!("nbd{index} has backend id {now:?} now: it was left alone");
    Err(Error::new(ErrorKind::Vanished, message).at(Stage::Disconnect))
}

fn end_link(
    engine: &Engine,
    index: NbdIndex,
    flush: &Flush,
    locks: Box<dyn Send>,
    deadline: Deadline,
) -> Result<()> {
    // The link is removed first, so that its end is not reported as a death.
    let link = engine.links.lock().remove(&index);
    // The kernel first sends a disconnect request on each connection, which blocks
    // where the peer is dead or hangs and the buffer is full.
    if let Some(link) = link
        .as_ref()
        .filter(|link| *flush != Flush::Done || link.is_dead())
    {
        link.shut_down();
    }
    nbd::disconnect_under(locks, engine.roots(), index, deadline).inspect_err(|_| {
        // The device may still be connected; a heal needs the link.
        if let Some(link) = link {
            engine.links.lock().entry(index).or_insert(link);
        }
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::engine::nbd::known::current_links;
    use crate::id::Source;
    use crate::kernel::Roots;

    const SOURCE: &str = "nbd://192.0.2.1/vol-7";

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(10))
    }

    /// A machine with this kernel and one connected device without a backend id.
    fn machine(release: &str) -> (tempfile::TempDir, Engine) {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let (dir, kernel) = (
            roots.sysfs.join("block/nbd0"),
            roots.proc.join("sys/kernel"),
        );
        for dir in [&dir, &kernel, &roots.run] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(dir.join("dev"), "43:0\n").unwrap();
        fs::write(dir.join("pid"), "1\n").unwrap();
        fs::write(kernel.join("osrelease"), release).unwrap();
        (root, Engine::start(roots).unwrap())
    }

    #[test]
    fn a_device_that_a_client_connects_anew_before_its_detach_has_the_lock_is_left_alone() {
        let (_root, engine) = machine("6.1.0-30-amd64\n");
        let dir = engine.roots().sysfs.join("block/nbd0");
        let index = NbdIndex::new(0).unwrap();
        let device = NbdDevice::find(engine.roots(), index).unwrap().unwrap();
        let lock = |connected_by| {
            let lock = lock_connected(&engine, &device, connected_by, soon());
            lock.map(|lock| lock.is_some())
        };
        assert!(lock(Some(1)).unwrap());
        fs::write(dir.join("pid"), "2\n").unwrap();
        assert_eq!(lock(Some(1)).unwrap_err().kind(), ErrorKind::Vanished);
        fs::remove_file(dir.join("pid")).unwrap();
        let mark = FailedFlush::of(engine.roots(), device.disk()).unwrap();
        mark.set(&Error::new(ErrorKind::Io, "no"));
        assert!(!lock(Some(1)).unwrap());
        assert_eq!(mark.read().unwrap(), None);
    }

    #[test]
    fn a_source_is_not_detached_by_finding_no_id_where_the_kernel_keeps_none() {
        let source: Source = SOURCE.parse().unwrap();
        let (_root, engine) = machine("5.10.0-30-amd64\n");
        let error = engine.detach(source.clone(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
        let device = engine.roots().sysfs.join("block/nbd0");
        fs::remove_file(device.join("pid")).unwrap();
        assert!(!engine.detach(source.clone(), soon()).unwrap().changed);
        // There a device that nbd-client connected has no backend id either.
        let (_root, engine) = machine("6.1.0\n");
        assert!(!engine.detach(source, soon()).unwrap().changed);
    }

    #[test]
    fn a_link_of_an_earlier_device_of_the_same_number_is_not_taken_for_its_link() {
        let (_root, engine) = machine("6.1.0\n");
        let index = NbdIndex::new(0).unwrap();
        // The `pid` attribute shows the thread that connected the device.
        let device = NbdDevice::find(engine.roots(), index).unwrap().unwrap();
        for (connected_by, is_its_own) in [(Some(1), true), (None, true), (Some(5), false)] {
            let (uri, backend) = (SOURCE.parse().unwrap(), BackendId::derived(SOURCE));
            let timeouts = NewTimeouts::default();
            let link = Link::new(uri, backend, Vec::new(), timeouts, connected_by);
            engine.links.lock().insert(index, link);
            let is_there = current_links(&engine, &device).contains_key(&index);
            assert_eq!(is_there, is_its_own, "connected by {connected_by:?}");
        }
    }

    #[test]
    fn a_link_that_the_kernel_was_not_brought_to_end_is_not_forgotten() {
        let (_root, engine) = machine("6.1.0\n");
        // The nbd module assigns no index as high as this.
        let index = NbdIndex::new(1 << 20).unwrap();
        let (uri, backend) = (SOURCE.parse().unwrap(), BackendId::derived(SOURCE));
        let link = Link::new(uri, backend, Vec::new(), NewTimeouts::default(), None);
        engine.links.lock().insert(index, link);
        end_link(&engine, index, &Flush::Done, Box::new(()), soon()).unwrap_err();
        assert!(engine.links.lock().contains_key(&index));
    }
}
