//! The steps of one NBD attach, from top to bottom.

mod connect;
mod content;
mod existing;

use std::time::Duration;

use self::connect::{Connected, Offer};
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::{AttachRequest, Attachment, Unit};
use crate::engine::call::CallContext;
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::nbd::receivers::{self, Receives};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, ContentName, NbdUri};
use crate::kernel::blockdev;
use crate::nbd::{self, Connection, Export, KnownContent, Link, NbdDevice, TlsInfo};
use crate::uevent::Watch;

impl Engine {
    pub(super) fn attach_nbd(
        &self,
        uri: &NbdUri,
        request: &AttachRequest,
        call: &mut CallContext,
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

        call.enter(Stage::Lock);
        // Two processes that want the same export get the same device.
        let _lock = self.lock_backend(&backend, call.deadline)?;
        if let Some(device) = self.nbd_of(&backend)? {
            if request.finishing {
                limit_as_served(&device, uri, call);
            }
            return self.attach_existing_nbd(&device, uri, request, &backend, call);
        }

        let connections = DeviceLock::of_connections(&backend);
        let _connections = DeviceLock::take(roots, &connections, call.deadline)?;
        loop {
            if let Some(attachment) = self.attach_new(uri, request, &backend, call)? {
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
        call: &mut CallContext,
    ) -> Result<Option<Attachment>> {
        let deadline = call.deadline;
        call.enter(Stage::Dial);
        let (connections, export, tls) = dial_all(uri, request, deadline)?;
        let geometry = export.geometry(nbd::page_size()?, request.nbd.block_size)?;

        call.enter(Stage::Identify);
        let first = content::of_all(&connections, uri, deadline)?;
        let content = first.as_ref().map(|first| first.names.clone());
        content::require_expected(&request.nbd, content.as_deref(), uri)?;
        content::require_known(request, content.as_deref(), uri)?;

        call.enter(Stage::Connect);
        let sockets = connections.into_iter().map(|connection| connection.stream);
        let mut offer = Offer {
            uri,
            request,
            backend,
            export: &export,
            geometry,
            sockets: sockets.collect(),
        };
        let Connected {
            device,
            written,
            mut watch,
            _lock: _held,
        } = self.connect_free(&offer, deadline)?;
        self.nbd_reads.has_new_connection(device.index());
        let mut link = offer.take_link(&device);
        link.content = first.map(|first| KnownContent { first, written });
        link.tls.clone_from(&tls);
        let served = Served { content, tls };
        let received = device
            .limit_requests(export.maximum_payload(), deadline)
            .and_then(|()| self.receives(&device, &mut link, deadline));
        let connects_again = matches!(received, Ok(Receives::NotOverEach));
        let proven = received
            .and_then(|receives| receives.require(&device))
            .and_then(|()| self.prove_nbd(&device, request, served, &mut watch, call))
            .and_then(|attachment| offer.compare(&attachment).map(|()| attachment));
        match proven {
            Ok(attachment) => {
                self.links.lock().insert(device.index(), link);
                Ok(Some(attachment))
            }
            Err(error) if error.kind() == ErrorKind::TimedOut => Err(error),
            Err(error) => {
                link.shut_down();
                self.disconnect_again(&device, &mut watch, connects_again, error, deadline)?;
                Ok(None)
            }
        }
    }

    /// Disconnects a device that this attach connected, and waits until it is free: it stays
    /// until its last close, which may be that of udev's probe.
    ///
    /// # Errors
    /// `error`, unless the attach connects again.
    fn disconnect_again(
        &self,
        device: &NbdDevice,
        watch: &mut Watch,
        connects_again: bool,
        error: Error,
        deadline: Deadline,
    ) -> Result<()> {
        let (roots, index, deadline) = (self.roots(), device.index(), deadline.for_rollback());
        let disconnected = nbd::disconnect(roots, index, deadline)
            .and_then(|()| nbd::wait_until_free(roots, index, watch, deadline));
        match disconnected {
            Ok(()) if connects_again && !deadline.has_passed() => Ok(()),
            Ok(()) => Err(error),
            Err(failure) => Err(error.with_last_seen(format!(
                "nbd{index} was connected, and the rollback could not disconnect it: {failure}"
            ))),
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
        let connections = link.state().live;
        if connections < 2 {
            return Ok(Receives::OverEach);
        }
        let (reads, roots) = (&self.nbd_reads, self.roots());
        let unread_for = || link.unread_for();
        receivers::look(reads, device, roots, connections, unread_for, deadline)
    }

    /// Locks the device of this id for an attach, a detach or a resize.
    pub(in crate::engine) fn lock_backend(
        &self,
        backend: &BackendId,
        deadline: Deadline,
    ) -> Result<DeviceLock> {
        DeviceLock::take(self.roots(), &DeviceLock::of_backend(backend), deadline)
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

    fn prove_nbd(
        &self,
        device: &NbdDevice,
        request: &AttachRequest,
        served: Served,
        watch: &mut Watch,
        call: &mut CallContext,
    ) -> Result<Attachment> {
        let (roots, disk) = (self.roots(), device.disk());
        call.enter(Stage::Settle);
        let proof = self.settle(disk, watch, call.deadline)?;
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

/// Dials as many connections as the request wants and the server takes. Also returns what the
/// first one serves, read-only if the request wants that, and its TLS.
fn dial_all(
    uri: &NbdUri,
    request: &AttachRequest,
    deadline: Deadline,
) -> Result<(Vec<Connection>, Export, Option<TlsInfo>)> {
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
    Ok((connections, export, tls))
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
fn limit_as_served(device: &NbdDevice, uri: &NbdUri, call: &mut CallContext) {
    const PATIENCE: Duration = Duration::from_secs(5);
    let deadline = call.deadline;
    call.enter(Stage::Dial);
    let limit = deadline.at_most(PATIENCE.min(deadline.remaining() / 4));
    let limited = nbd::dial(uri, limit)
        .and_then(|server| device.limit_requests(server.export.maximum_payload(), deadline));
    if let Err(error) = limited {
        tracing::warn!(%error, %uri, "requests may be longer than the server accepts");
    }
}

#[cfg(test)]
mod tests;
