//! The steps of one NBD attach, from top to bottom.

mod content;
mod existing;

use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::attach::{AttachRequest, Attachment, Unit};
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::nbd::receivers::{self, Receives};
use crate::engine::timing::StageTimer;
use crate::engine::usage::failed_flush::FailedFlush;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, ContentName, NbdIndex, NbdUri};
use crate::kernel::{Roots, blockdev};
use crate::nbd::{
    self, Connect, Content, Export, ExportFlags, Geometry, Link, NbdDevice, State, TlsInfo,
};
use crate::uevent::Watch;

impl Engine {
    pub(super) fn attach_nbd(
        &self,
        uri: &NbdUri,
        request: &AttachRequest,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let roots = self.roots();
        let refused = match () {
            () if !request.more.is_empty() => Some("an NBD source takes no further paths"),
            () if request.expected.is_some() => {
                Some("an NBD export has no world-wide name to expect")
            }
            () => None,
        };
        if let Some(message) = refused {
            return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
        }
        let backend = request.nbd.backend_of(&request.source);
        require_healable(uri, &backend, request)?;

        timer.enter(Stage::Lock);
        // Two processes that want the same export get the same device.
        let _lock = DeviceLock::take(roots, &DeviceLock::of_backend(&backend), deadline)?;
        if let Some(device) = self.nbd_of(&backend)? {
            if request.finishing {
                limit_as_served(&device, uri, timer, deadline);
            }
            return self.attach_existing_nbd(&device, uri, request, &backend, timer, deadline);
        }

        loop {
            if let Some(attachment) = self.attach_new(uri, request, &backend, timer, deadline)? {
                return Ok(attachment);
            }
            tracing::warn!(%uri, "the kernel did not receive over each connection: connecting again");
        }
    }

    /// Connects a device and proves it; `None` if the kernel did not receive over each
    /// connection, so that the device was disconnected again.
    fn attach_new(
        &self,
        uri: &NbdUri,
        request: &AttachRequest,
        backend: &BackendId,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<Option<Attachment>> {
        let roots = self.roots();
        timer.enter(Stage::Dial);
        let dial = || {
            let request_timeout = request.nbd.timeouts().request;
            nbd::dial_for_device(uri, Some(request_timeout), deadline)
        };
        let first = dial()?;
        let (export, tls) = (first.export.clone(), first.tls.clone());
        let mut connections = vec![first];
        let wanted = usize::from(request.nbd.connections.get());
        while connections.len() < wanted && export.can_multi_conn() {
            let next = dial()?;
            if next.export != export {
                return Err(content::serves_two());
            }
            connections.push(next);
        }
        let export = if request.nbd.read_only {
            export.made_read_only()
        } else {
            export
        };
        let geometry = export.geometry(nbd::page_size()?, request.nbd.block_size)?;

        timer.enter(Stage::Identify);
        let content = content::of_all(&connections, uri, deadline)?;
        content::require_expected(&request.nbd, content.as_deref(), uri)?;
        content::require_known(request, content.as_deref(), uri)?;

        timer.enter(Stage::Connect);
        let sockets = connections.into_iter().map(|connection| connection.stream);
        let mut offer = Offer {
            request,
            backend,
            export: &export,
            geometry,
            sockets: sockets.collect(),
        };
        let connected = self.connect_free(&offer, deadline)?;
        let Connected {
            device,
            written,
            mut watch,
            _lock: _held,
        } = connected;
        self.nbd_reads.has_new_connection(device.index());
        let known = content
            .clone()
            .map(|names| Content::Named(names).known(written));
        let timeouts = request.nbd.timeouts().into();
        let connected_by = device.pid().ok().flatten();
        let mut link = Link::new(
            uri.clone(),
            backend.clone(),
            std::mem::take(&mut offer.sockets),
            timeouts,
            connected_by,
        );
        link.content = known.flatten();
        link.tls.clone_from(&tls);
        let served = Served { content, tls };
        let received = device
            .limit_requests(export.maximum_payload(), deadline)
            .and_then(|()| self.receives(&device, &mut link, deadline));
        let connects_again = matches!(received, Ok(Receives::NotOverEach));
        let proven = received
            .and_then(|receives| receives.require(&device))
            .and_then(|()| self.prove_nbd(&device, request, served, &mut watch, timer, deadline))
            .and_then(|attachment| offer.compare(&attachment).map(|()| attachment));
        match proven {
            Ok(attachment) => {
                self.links.lock().insert(device.index(), link);
                Ok(Some(attachment))
            }
            Err(error) if error.kind() == ErrorKind::TimedOut => Err(error),
            Err(error) => {
                let deadline = deadline.for_rollback();
                link.shut_down();
                let index = device.index();
                // The device stays until its last close, which may be that of udev's probe.
                let taken_down = nbd::disconnect(roots, index, deadline)
                    .and_then(|()| nbd::wait_until_free(roots, index, &mut watch, deadline));
                match taken_down {
                    Ok(()) if connects_again && !deadline.has_passed() => Ok(None),
                    Ok(()) => Err(error),
                    Err(failure) => Err(error.with_last_seen(format!(
                        "nbd{index} was connected, and the rollback could not disconnect it: \
                         {failure}"
                    ))),
                }
            }
        }
    }

    /// Whether the kernel receives over each connection. For a single connection the settling
    /// proves it.
    fn receives(
        &self,
        device: &NbdDevice,
        link: &mut Link,
        deadline: Deadline,
    ) -> Result<Receives> {
        if link.state().live < 2 {
            return Ok(Receives::OverEach);
        }
        let (reads, roots) = (&self.nbd_reads, self.roots());
        receivers::look(reads, device, roots, || link.unread_for(), deadline)
    }

    /// The connected device of this id.
    pub(in crate::engine) fn nbd_of(&self, backend: &BackendId) -> Result<Option<NbdDevice>> {
        let mut found = self.backends.lock().of_backend(self.roots(), backend)?;
        if found.len() > 1 {
            let names: Vec<String> = found.iter().map(|d| d.index().name()).collect();
            let message = format!("{} all have backend id {backend}", names.join(" and "));
            return Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Resolve));
        }
        Ok(found.pop())
    }

    /// Connects the first free device, or the one that the caller requested.
    fn connect_free(&self, offer: &Offer<'_>, deadline: Deadline) -> Result<Connected> {
        if let Some(index) = offer.request.nbd.index {
            let lock = DeviceLock::take(self.roots(), &index.name(), deadline)?;
            return self.connect(offer, index, lock, true, deadline);
        }
        let mut events = self.hub().watch("block");
        let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(50));
        loop {
            let refused = match self.try_connect_free(offer, deadline)? {
                Ok(connected) => return Ok(connected),
                Err(refused) => refused,
            };
            // Other processes work on all devices, even on the next one to be created, or
            // udev's probes have them open for a moment.
            self.backends.lock().invalidate();
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

    /// Tries each free device once. If none can be connected, returns the last refusal.
    fn try_connect_free(
        &self,
        offer: &Offer<'_>,
        deadline: Deadline,
    ) -> Result<Result<Connected, Option<Error>>> {
        let mut refused = None;
        let candidates = self.backends.lock().candidates(self.roots())?;
        for index in candidates {
            let Some(lock) = DeviceLock::try_take(self.roots(), &index.name())? else {
                continue;
            };
            if let Some(device) = NbdDevice::find(self.roots(), index)?
                && let Some(facts) = device.facts_if_present()?
                && facts.state(&nbd::Hints::default()) != State::Free
            {
                continue;
            }
            match self.connect(offer, index, lock, false, deadline) {
                Ok(connected) => return Ok(Ok(connected)),
                Err(error) => match nbd::Refusal::of(&error) {
                    Some(
                        nbd::Refusal::OpenedByOther
                        | nbd::Refusal::Connected
                        | nbd::Refusal::Raced
                        | nbd::Refusal::GoingDown,
                    ) => refused = Some(error),
                    _ => return Err(error),
                },
            }
        }
        Ok(Err(refused))
    }

    /// Connects this device. With `patient`, since no other device would do, it waits for a
    /// probe that has the node open.
    fn connect(
        &self,
        offer: &Offer<'_>,
        index: NbdIndex,
        lock: DeviceLock,
        patient: bool,
        deadline: Deadline,
    ) -> Result<Connected> {
        let roots = self.roots();
        forget_last_connection(roots, index)?;
        let before = NbdDevice::find(roots, index)?;
        let written = before.map_or(Ok(0), |device| device.written())?;
        // The watch begins before the connect, or it could miss the connect's event.
        let mut watch = self.hub().watch(&index.name());
        loop {
            let Err(refused) = offer.connect(index)?.send(roots, deadline) else {
                break;
            };
            // A probe of udev has the node open for a moment, and that alone makes the
            // kernel refuse. Its close is an event.
            let open = nbd::Refusal::of(&refused) == Some(nbd::Refusal::OpenedByOther);
            if !open || !patient {
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
            _lock: lock,
        })
    }

    fn prove_nbd(
        &self,
        device: &NbdDevice,
        request: &AttachRequest,
        served: Served,
        watch: &mut Watch,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let (roots, disk) = (self.roots(), device.disk());
        timer.enter(Stage::Settle);
        let proof = self.settle(disk, watch, deadline)?;
        let facts = device.marks()?;
        if facts.pid.is_none() {
            let message = format!(
                "nbd{} was disconnected while it was attached",
                device.index()
            );
            return Err(Error::new(ErrorKind::Vanished, message).at(Stage::Settle));
        }
        let backend = facts.backend.as_deref();
        Ok(Attachment {
            source: request.source.clone(),
            node: disk.node(roots),
            devno: disk.devno(),
            diskseq: disk.diskseq()?,
            unit: Unit::Nbd {
                index: device.index(),
                backend: backend.map(str::parse).transpose()?,
                connections: device.connections()?,
                content: served.content,
                tls: served.tls,
            },
            size: disk.size()?,
            read_only: disk.read_only()?,
            links: blockdev::links_to(roots, disk.devno(), &proof.links),
            settled: proof.how,
            phases: Vec::new(),
            changed: true,
        })
    }
}

/// What an attach learned of an export over its connection.
struct Served {
    content: Option<Vec<ContentName>>,
    tls: Option<TlsInfo>,
}

/// Requires that a later process can find the server of the device: in its id, which is
/// the URI, or in the journal.
///
/// # Errors
/// `InvalidInput` at stage `resolve` if neither has the whole URI, and if the id is a URI
/// without TLS of a source with TLS.
fn require_healable(uri: &NbdUri, backend: &BackendId, request: &AttachRequest) -> Result<()> {
    let is_plain = |id: NbdUri| uri.uses_tls() && !id.uses_tls();
    if backend.as_str().parse().is_ok_and(is_plain) {
        let message = format!(
            "backend id {backend} is a URI without TLS: a later process would connect a device of \
             {uri} without TLS"
        );
        return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
    }
    let is_given = request.nbd.backend_is_given() || request.is_in_a_journal();
    if is_given || backend.as_str().parse().is_ok_and(|id: NbdUri| id == *uri) {
        return Ok(());
    }
    let message = format!(
        "an NBD URI of {} characters: the kernel keeps {} at most, and no later process would \
         find the server again to heal the device; attach it as a volume of a journal, or under \
         a backend id",
        uri.to_string().len(),
        BackendId::LONGEST
    );
    Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve))
}

/// Makes the kernel send no request longer than the server takes: the attach that connected
/// the device may have died before it did that. It does not wait for a server that takes no
/// second client or does not answer.
fn limit_as_served(device: &NbdDevice, uri: &NbdUri, timer: &mut StageTimer, deadline: Deadline) {
    const PATIENCE: Duration = Duration::from_secs(5);
    timer.enter(Stage::Dial);
    let limit = deadline.at_most(PATIENCE.min(deadline.remaining() / 4));
    let limited = nbd::dial(uri, limit)
        .and_then(|server| device.limit_requests(server.export.maximum_payload(), deadline));
    if let Err(error) = limited {
        tracing::warn!(%error, %uri, "requests may be longer than the server accepts");
    }
}

/// Clears the failed flush of an earlier connection: its loss does not concern the next
/// connection. The kernel numbers the lives of a disk, and a new connection begins no new one.
fn forget_last_connection(roots: &Roots, index: NbdIndex) -> Result<()> {
    if let Some(device) = NbdDevice::find(roots, index)?
        && device.pid()?.is_none()
    {
        let failures = FailedFlush::of(roots, device.disk())?;
        if failures.read()?.is_some() {
            failures.clear();
        }
    }
    Ok(())
}

/// A device that was just connected.
struct Connected {
    device: NbdDevice,
    /// The disk's write counter before it was connected.
    written: u64,
    watch: Watch,
    _lock: DeviceLock,
}

/// The connections and the settings that are offered to the kernel.
struct Offer<'a> {
    request: &'a AttachRequest,
    backend: &'a BackendId,
    export: &'a Export,
    geometry: Geometry,
    sockets: Vec<OwnedFd>,
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

    /// Checks that what was read back is what was offered.
    fn compare(&self, attachment: &Attachment) -> Result<()> {
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

#[cfg(test)]
mod tests;
