//! The steps of resizing an NBD device, from top to bottom.

mod requirements;

use std::sync::Arc;

use nix::libc;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::DetachTarget;
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::nbd::backend::{device_of_backend, lock_backend};
use crate::engine::nbd::known::{current_links, known_source, require_answer, require_source};
use crate::engine::nbd::queue_facts::queue_facts;
use crate::engine::nbd::reconnect::NbdReconnect;
use crate::engine::nbd::same_volume::require_same_volume;
#[cfg(feature = "journal")]
pub(in crate::engine) use crate::engine::resize::nbd::requirements::serves_its_size;
use crate::engine::resize::nbd::requirements::{
    ServesItsSize, cannot_replace_several, only_new_connections_have_size, require_min_size,
    require_renewed, require_served_last_block, size_on_server,
};
use crate::engine::resize::request::{ResizeRequest, Resized};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdUri, Source};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, sysfs};
use crate::nbd::{self, Connection, KnownContent, NbdDevice, NewTimeouts};
use crate::uevent;

/// Takes over the size that the server of this backend id's device reports.
pub(super) fn resize_nbd_backend(
    engine: &Engine,
    backend: &BackendId,
    request: &ResizeRequest,
    call: &mut CallContext,
) -> Result<Resized> {
    call.enter(Stage::Lock);
    let lock = lock_backend(engine, backend, call.deadline)?;
    let Some(device) = device_of_backend(engine, backend)? else {
        let message = format!("no NBD device has backend id {backend}");
        return Err(Error::new(ErrorKind::NotFound, message).at(Stage::Resolve));
    };
    grow_nbd(engine, &device, backend, lock, request, call)
}

/// Does the same for the named device.
pub(super) fn resize_nbd_device(
    engine: &Engine,
    device: &NbdDevice,
    request: &ResizeRequest,
    call: &mut CallContext,
) -> Result<Resized> {
    let index = device.index();
    if device.pid()?.is_none() {
        let message = format!("nbd{index} is not connected");
        return Err(Error::new(ErrorKind::NotFound, message).at(Stage::Resolve));
    }
    let id = device.backend()?.and_then(|id| id.parse().ok());
    let Some(backend) = id else {
        let message = format!(
            "nbd{index} has no backend id, so its server is unknown: an attach by lunbd \
             gives one, on Linux 5.14 or later"
        );
        return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Resolve));
    };
    call.enter(Stage::Lock);
    let lock = lock_backend(engine, &backend, call.deadline)?;
    grow_nbd(engine, device, &backend, lock, request, call)
}

fn grow_nbd(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
    lock: DeviceLock,
    request: &ResizeRequest,
    call: &mut CallContext,
) -> Result<Resized> {
    let resize = NbdResize {
        engine,
        device,
        backend,
        lock: Arc::new(lock),
        interrupted_at: request.interrupted_at,
        deadline: call.deadline,
    };
    resize.run(request, call)
}

/// The resize of a device whose id is locked.
struct NbdResize<'a> {
    engine: &'a Engine,
    device: &'a NbdDevice,
    backend: &'a BackendId,
    /// The lock of the id. A command to the kernel holds it too, also after its timeout.
    lock: Arc<DeviceLock>,
    /// The size before an earlier resize that was interrupted.
    interrupted_at: Option<u64>,
    deadline: Deadline,
}

impl NbdResize<'_> {
    fn run(&self, request: &ResizeRequest, call: &mut CallContext) -> Result<Resized> {
        let (engine, device, deadline) = (self.engine, self.device, self.deadline);
        let (index, disk) = (device.index(), device.disk());
        let uri = self.server(request)?;
        // The kernel holds I/O while it changes the size, so no request may wait for a
        // dead server.
        call.enter(Stage::Probe);
        require_answer(engine, device, self.backend, deadline)?;
        let connections = self.connections()?;

        call.enter(Stage::Dial);
        let request_timeout = connections.own.and_then(|timeouts| timeouts.request);
        let server = nbd::dial_for_device(&uri, request_timeout, deadline)?;
        let old_size = self.restore_unless_served(&connections, &server)?;
        let facts = queue_facts(engine, device, deadline)?;
        let differences = facts.differences_of(server.export.clone());
        let size = size_on_server(index, old_size, &differences)
            .and_then(|size| require_min_size(size, request).map(|()| size))
            .map_err(|error| self.refused(error, None))?;

        let changed = size != old_size;
        if changed && connections.are_several && connections.own.is_none() {
            return Err(self.refused(cannot_replace_several(index), None));
        }
        // Up to here nothing has changed but the size that an interrupted resize had left.
        call.enter(Stage::Identify);
        let written = device.written(facts.counts_requests)?;
        let first = require_same_volume(engine, device, &server, deadline)?;
        require_served_last_block(index, &server, deadline)?;
        let mut watch = engine.hub().watch(&index.name());
        if changed {
            call.enter(Stage::Reconfigure);
            self.set_size(size)?;
        }
        call.enter(Stage::Probe);
        let renew = |timeouts| {
            let content = KnownContent { first, written };
            let reconnect = NbdReconnect::new(device.clone(), uri, self.backend.clone(), timeouts);
            reconnect.with_proven(server, content, differences)
        };
        self.require_served(&connections, old_size, changed, renew)?;
        if changed {
            call.enter(Stage::Settle);
            let mode = engine.hub().mode();
            uevent::settle_again(&mut watch, mode, engine.roots(), disk.dir(), deadline)?;
        }
        Ok(Resized {
            node: disk.node(engine.roots()),
            old_size,
            size,
            names: Vec::new(),
            paths: Vec::new(),
            map: None,
            phases: Vec::new(),
            changed,
        })
    }

    /// Makes sure that every connection serves the size: reads the last block, and renews the
    /// connections that do not serve it, or of which one read proves only one.
    ///
    /// The read also happens where the kernel has the size already: an earlier resize may have
    /// been interrupted before it.
    fn require_served(
        &self,
        connections: &Connections,
        old_size: u64,
        changed: bool,
        renew: impl FnOnce(NewTimeouts) -> NbdReconnect,
    ) -> Result<()> {
        let index = self.device.index();
        if !changed || !connections.are_several {
            match self.require_last_block() {
                Ok(()) => return Ok(()),
                Err(error) if error.errno() != Some(libc::EIO) => return Err(error),
                Err(error) if connections.own.is_none() => {
                    let refused = only_new_connections_have_size(index, old_size);
                    if changed {
                        self.set_size(old_size)?;
                    }
                    return Err(self.refused(refused, Some(error)));
                }
                Err(_) => {}
            }
        }
        let timeouts = connections
            .own
            .ok_or_else(|| cannot_replace_several(index))?;
        // Ends this process's connections, so that new ones can replace them.
        if let Some(link) = current_links(self.engine, self.device).get(&index) {
            link.shut_down();
        }
        let mut reconnect = renew(timeouts);
        require_renewed(reconnect.reconnect(self.engine, self.deadline).outcome)?;
        self.require_last_block()
    }

    /// Restores the size before a resize that was interrupted after it had told the kernel a size
    /// that the only connection does not serve. A size that is served stays, since it may be in
    /// use. Returns the size that the kernel has then.
    fn restore_unless_served(&self, connections: &Connections, server: &Connection) -> Result<u64> {
        let shown = self.device.disk().size()?;
        let before = self.interrupted_at.filter(|before| *before < shown);
        // One read proves nothing of several connections.
        let Some(before) = before.filter(|_| !connections.are_several) else {
            return Ok(shown);
        };
        if !self.connection_ends_at(before, shown)? {
            return Ok(shown);
        }
        // If the server itself fails reads, a failed read does not show where a connection ends.
        require_served_last_block(self.device.index(), server, self.deadline)?;
        self.set_size(before)?;
        Ok(before)
    }

    /// Whether the connection serves the block before `size`, also after it has refused the next
    /// one and the last one of the device, which has `shown` bytes.
    fn connection_ends_at(&self, size: u64, shown: u64) -> Result<bool> {
        self.read(move |disk, roots| {
            let block: u32 = sysfs::parse(&disk.dir().join("queue/logical_block_size"))?;
            let before = |end: u64| end.saturating_sub(block.into());
            let offsets = [before(size), size, before(shown), before(size)];
            let length = usize::try_from(block).unwrap_or(usize::MAX);
            let blocks = disk.read_at_each(roots, &offsets, length)?;
            Ok(matches!(blocks[..], [Some(_), None, None, Some(_)]))
        })
    }

    /// The error of a resize that was refused. A recovery must know whether the device serves its
    /// size to the end nevertheless.
    fn refused(&self, refused: Error, cause: Option<Error>) -> Error {
        if self.interrupted_at.is_some() && self.require_last_block().is_ok() {
            return refused.caused_by(ServesItsSize(cause));
        }
        match cause {
            Some(cause) => refused.caused_by(cause),
            None => refused,
        }
    }

    /// Sets the size in the kernel, and reads it back.
    fn set_size(&self, size: u64) -> Result<()> {
        let (roots, index) = (self.engine.roots(), self.device.index());
        let lock = Box::new(Arc::clone(&self.lock));
        nbd::set_size(lock, roots, index, self.backend, size, self.deadline)?;
        let shown = self.device.disk().size()?;
        if shown == size {
            return Ok(());
        }
        let message = format!("the kernel took {size} bytes for nbd{index} and shows {shown}");
        Err(Error::new(ErrorKind::NotReady, message).at(Stage::Reconfigure))
    }

    /// Checks with a read that the connections serve the new size.
    fn require_last_block(&self) -> Result<()> {
        self.read(BlockDevice::read_last_block)
    }

    fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&BlockDevice, &Roots) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (engine, device, deadline) = (self.engine, self.device, self.deadline);
        let read = engine
            .nbd_reads
            .start(device, engine.roots(), deadline, read)?;
        let answer = read.and_then(|read| read.wait(deadline));
        answer.unwrap_or_else(|| {
            let what = format!("a read of nbd{}", device.index());
            let error = Error::timed_out(Stage::Probe, deadline, &what);
            Err(error.with_last_seen(device.disk().describe()))
        })
    }

    /// # Errors
    /// `NotReady` where one of this process's connections is dead.
    fn connections(&self) -> Result<Connections> {
        let index = self.device.index();
        let links = current_links(self.engine, self.device);
        let link = links.get(&index);
        let Some(link) = link.filter(|link| link.backend == *self.backend) else {
            let slots = self.device.slots(self.engine.roots())?;
            return Ok(Connections {
                are_several: slots.count > 1,
                own: None,
            });
        };
        let state = link.state();
        if state.dead > 0 {
            let message = format!("a connection of nbd{index} is dead: heal the device first");
            return Err(Error::new(ErrorKind::NotReady, message).at(Stage::Probe));
        }
        // Without that timeout requests would fail when the old connections end.
        let waits = link.timeouts.dead_connection;
        let can_be_replaced = state.is_whole() && waits.is_some_and(|limit| !limit.is_zero());
        Ok(Connections {
            are_several: state.has_several(),
            own: can_be_replaced.then_some(link.timeouts),
        })
    }

    /// The server of the device: the named source, the server of this process's
    /// connections, or a backend id that is a URI.
    fn server(&self, request: &ResizeRequest) -> Result<NbdUri> {
        let (engine, device, backend) = (self.engine, self.device, self.backend);
        if let DetachTarget::Source(Source::Nbd(uri)) = &request.target {
            require_source(engine, device, uri, backend)?;
            return Ok(uri.clone());
        }
        known_source(engine, device, backend).ok_or_else(|| {
            let message = format!(
                "nbd{} was attached by another process under backend id {backend}, which does \
                 not name a server: give its source and the id",
                device.index()
            );
            Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve)
        })
    }
}

struct Connections {
    are_several: bool,
    /// The device's timeouts, where this process made all connections and can replace
    /// them.
    own: Option<NewTimeouts>,
}

#[cfg(test)]
mod tests;
