//! Connects a free device, or the one that the caller requested.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::attach::{AttachRequest, Attachment, Unit};
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::usage::failed_flush::FailedFlush;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex, NbdUri};
use crate::kernel::Roots;
use crate::nbd::{self, Connect, Export, ExportFlags, Geometry, Link, NbdDevice, State};
use crate::uevent::Watch;

/// A device that was just connected.
pub(super) struct Connected {
    pub(super) device: NbdDevice,
    /// The disk's write counter before it was connected.
    pub(super) written: Option<u64>,
    pub(super) watch: Watch,
    pub(super) lock: Arc<DeviceLock>,
}

/// What the attach does if a process has the device open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfOpened {
    /// It waits for the close, since the caller wants this device and no other.
    Wait,
    Refuse,
}

/// The connections and the settings that are offered to the kernel.
pub(super) struct Offer<'a> {
    pub(super) uri: &'a NbdUri,
    pub(super) request: &'a AttachRequest,
    pub(super) backend: &'a BackendId,
    pub(super) export: &'a Export,
    pub(super) geometry: Geometry,
    pub(super) sockets: Vec<OwnedFd>,
    /// The locks of the backend id and of its connections.
    pub(super) locks: Arc<[DeviceLock; 2]>,
}

impl Offer<'_> {
    /// The command, with duplicates of the sockets: the kernel takes the connections, and this
    /// process keeps its own sockets to be able to shut them down.
    fn connect(&self, index: NbdIndex) -> Result<Connect> {
        let sockets = nbd::duplicate(&self.sockets)?;
        let timeouts = self.request.nbd.timeouts();
        Ok(Connect::new(sockets, self.geometry.size, timeouts)
            .index(index)
            .block_size(self.geometry.block_size)
            .server_flags(self.export.flags)
            .backend(self.backend.clone()))
    }

    /// The link of the connected device; it takes this process's sockets out of the offer.
    pub(super) fn take_link(&mut self, connected_by: Option<u32>) -> Link {
        let nbd = &self.request.nbd;
        let mut link = Link::new(
            self.uri.clone(),
            self.backend.clone(),
            std::mem::take(&mut self.sockets),
            nbd.timeouts().into(),
            connected_by,
        );
        link.expected.clone_from(&nbd.expected);
        link
    }

    /// Checks that what was read back is what was offered.
    pub(super) fn compare(&self, attachment: &Attachment) -> Result<()> {
        let differs = |what: &str, found: &str, expected: &str| {
            let node = attachment.node.display();
            let message = format!("{node} has {what} {found}, expected {expected}");
            Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify))
        };
        if attachment.size != self.geometry.size {
            let (found, expected) = (attachment.size, self.geometry.size);
            return differs("size", &found.to_string(), &expected.to_string());
        }
        let read_only = self.export.flags.contains(ExportFlags::READ_ONLY);
        if attachment.read_only != read_only {
            let found = attachment.read_only.to_string();
            return differs("read-only", &found, &read_only.to_string());
        }
        match &attachment.unit {
            Unit::Nbd {
                backend: Some(found),
                ..
            } if found != self.backend => {
                differs("backend id", found.as_str(), self.backend.as_str())
            }
            _ => Ok(()),
        }
    }
}

/// Connects the first free device, or the one that the caller requested.
pub(super) fn connect_free(
    engine: &Engine,
    offer: &Offer<'_>,
    deadline: Deadline,
) -> Result<Connected> {
    if let Some(index) = offer.request.nbd.index {
        let lock = DeviceLock::take(engine.roots(), &index.name(), deadline)?;
        return connect(engine, offer, index, lock, IfOpened::Wait, deadline);
    }
    let mut events = engine.hub().watch("block");
    let mut pauses = Backoff::for_kernel_state();
    loop {
        let mut refused = None;
        if let Some(connected) = try_connect_free(engine, offer, &mut refused, deadline)? {
            return Ok(connected);
        }
        // Other processes work on all devices, even on the next one to be created, or
        // udev's probes have them open for a moment.
        engine.backends.lock().invalidate();
        if deadline.has_passed() {
            let message = "no NBD device is free";
            let error = Error::new(ErrorKind::InUse, message).at(Stage::Connect);
            return Err(match refused {
                Some(cause) => error.caused_by(cause),
                None => error,
            });
        }
        events.next(deadline.at_most(pauses.pause()));
    }
}

/// Tries each free device once. If none can be connected, `refused` is the last refusal.
fn try_connect_free(
    engine: &Engine,
    offer: &Offer<'_>,
    refused: &mut Option<Error>,
    deadline: Deadline,
) -> Result<Option<Connected>> {
    let candidates = engine.backends.lock().candidates(engine.roots())?;
    for index in candidates {
        let Some(lock) = DeviceLock::try_take(engine.roots(), &index.name())? else {
            continue;
        };
        if let Some(device) = NbdDevice::find(engine.roots(), index)?
            && let Some(facts) = device.facts_if_present()?
            && facts.state(&nbd::Hints::default()) != State::Free
        {
            continue;
        }
        match connect(engine, offer, index, lock, IfOpened::Refuse, deadline) {
            Ok(connected) => return Ok(Some(connected)),
            Err(error) => match nbd::Refusal::of(&error) {
                Some(
                    nbd::Refusal::OpenedByOther
                    | nbd::Refusal::Connected
                    | nbd::Refusal::Raced
                    | nbd::Refusal::GoingDown,
                ) => *refused = Some(error),
                _ => return Err(error),
            },
        }
    }
    Ok(None)
}

/// Connects this device.
fn connect(
    engine: &Engine,
    offer: &Offer<'_>,
    index: NbdIndex,
    lock: DeviceLock,
    if_opened: IfOpened,
    deadline: Deadline,
) -> Result<Connected> {
    let (roots, lock) = (engine.roots(), Arc::new(lock));
    forget_last_connection(roots, index)?;
    let before = NbdDevice::find(roots, index)?;
    let written = before.map_or(Ok(Some(0)), |device| {
        // A free device has no requests for which a change of its queue would wait.
        device.written(device.counts_requests()?)
    })?;
    // The watch begins before the connect, or it could miss the connect's event.
    let mut watch = engine.hub().watch(&index.name());
    loop {
        let locks = Box::new((Arc::clone(&offer.locks), Arc::clone(&lock)));
        let connect = offer.connect(index)?;
        let Err(refused) = connect.send_under(locks, roots, deadline) else {
            break;
        };
        // A probe of udev has the node open for a moment, and that alone makes the
        // kernel refuse. Its close is an event.
        let open = nbd::Refusal::of(&refused) == Some(nbd::Refusal::OpenedByOther);
        if !open || if_opened == IfOpened::Refuse {
            return Err(refused);
        }
        nbd::wait_until_closed(roots, index, &mut watch, deadline, refused)?;
    }
    let device = NbdDevice::find(roots, index)?.ok_or_else(|| {
        let message = format!("nbd{index} went away as soon as it was connected");
        Error::new(ErrorKind::Vanished, message).at(Stage::Connect)
    })?;
    Ok(Connected {
        device,
        written,
        watch,
        lock,
    })
}

/// Clears the mark of a failed flush of an earlier connection, whose loss does not concern the next
/// connection. A new connection does not change the disk sequence number, so the mark would still
/// count.
pub(super) fn forget_last_connection(roots: &Roots, index: NbdIndex) -> Result<()> {
    if let Some(device) = NbdDevice::find(roots, index)?
        && device.pid()?.is_none()
    {
        FailedFlush::of(roots, device.disk())?.clear();
    }
    Ok(())
}
