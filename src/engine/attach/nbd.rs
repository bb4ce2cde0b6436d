//! The steps of one NBD attach, from top to bottom.

mod connect;
mod content;
mod existing;
mod prove;

use std::sync::Arc;
use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::attach::nbd::connect::{Connected, Offer, connect_free};
use crate::engine::attach::nbd::existing::attach_existing_nbd;
use crate::engine::attach::nbd::prove::{Served, prove_nbd};
use crate::engine::attach::{AttachRequest, Attachment};
use crate::engine::call::CallContext;
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::nbd::backend::{device_of_backend, lock_backend};
use crate::engine::nbd::known::change_own_link;
use crate::engine::nbd::receivers::{self, ReceiverCheck};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdUri};
use crate::nbd::{self, Connection, Export, KnownContent, Link, NbdDevice, QueueFacts, TlsInfo};

pub(super) fn attach_nbd(
    engine: &Engine,
    uri: &NbdUri,
    request: &AttachRequest,
    call: &mut CallContext,
) -> Result<Attachment> {
    let roots = engine.roots();
    let refused = match () {
        () if !request.more.is_empty() => Some("an NBD source takes no further paths"),
        () if request.expected.is_some() => Some("an NBD export has no world-wide name to expect"),
        () => None,
    };
    if let Some(message) = refused {
        return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
    }
    let backend = request.nbd.backend_of(&request.source);
    require_healable(uri, &backend, request)?;

    call.enter(Stage::Lock);
    // Two processes that want the same export get the same device.
    let backend_lock = lock_backend(engine, &backend, call.deadline)?;
    if let Some(device) = device_of_backend(engine, &backend)? {
        if request.may_resume {
            limit_request_length(&device, uri, call);
        }
        return attach_existing_nbd(engine, &device, uri, request, &backend, call);
    }

    let connections = DeviceLock::of_connections(&backend);
    let connections_lock = DeviceLock::take(roots, &connections, call.deadline)?;
    let locks = Arc::new([backend_lock, connections_lock]);
    // A server may end one of the connections each time.
    let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    loop {
        if let Some(attachment) = attach_new(engine, uri, request, &backend, &locks, call)? {
            return Ok(attachment);
        }
        tracing::warn!(%uri, "the kernel did not receive over each connection: connecting again");
        call.deadline.pause(pauses.pause());
    }
}

/// Connects a device and proves it; `None` if the kernel did not receive over each
/// connection: the call has then disconnected the device again.
fn attach_new(
    engine: &Engine,
    uri: &NbdUri,
    request: &AttachRequest,
    backend: &BackendId,
    locks: &Arc<[DeviceLock; 2]>,
    call: &mut CallContext,
) -> Result<Option<Attachment>> {
    let deadline = call.deadline;
    call.enter(Stage::Dial);
    let (connections, export, tls) = dial_all(uri, request, deadline)?;
    let geometry = export.geometry(nbd::page_size()?, request.nbd.block_size)?;

    call.enter(Stage::Identify);
    let first = content::read_and_compare(&connections, uri, deadline)?;
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
        locks: Arc::clone(locks),
    };
    let connected = connect_free(engine, &offer, deadline)?;
    engine
        .nbd_reads
        .note_new_connection(connected.device.index());
    let (index, written) = (connected.device.index(), connected.written);
    let connected_by = connected.device.pid().ok().flatten();
    let facts = QueueFacts::of_offer(&export, geometry, written.is_some());
    engine.nbd_queues.note(index, connected_by, facts);
    let mut link = offer.take_link(connected_by);
    link.content = first.map(|first| KnownContent { first, written });
    link.tls.clone_from(&tls);
    // An attach that times out leaves the device connected.
    engine.links.lock().insert(index, link);
    prove_new(engine, &offer, connected, Served { content, tls }, call)
}

/// Proves a device that this attach connected; `None` if it was disconnected again, so that the
/// attach connects another.
fn prove_new(
    engine: &Engine,
    offer: &Offer<'_>,
    mut connected: Connected,
    served: Served,
    call: &mut CallContext,
) -> Result<Option<Attachment>> {
    let (deadline, device) = (call.deadline, &connected.device);
    // One that has ended already counts too.
    let all = |link: &mut Link| link.state().live + link.state().dead;
    let connections = change_own_link(engine, device, offer.backend, all).unwrap_or(0);
    let checked = device
        .limit_requests(offer.export.maximum_payload(), deadline)
        .and_then(|()| receivers::check_own(engine, device, offer.backend, connections, deadline));
    let connects_again = matches!(checked, Ok(ReceiverCheck::NotAllReceive));
    let watch = &mut connected.watch;
    let proven = checked
        .and_then(|check| check.require(device))
        .and_then(|()| prove_nbd(engine, device, offer.request, served, watch, call))
        .and_then(|attachment| offer.compare(&attachment).map(|()| attachment));
    match proven {
        Ok(attachment) => Ok(Some(attachment)),
        Err(error) if error.kind() == ErrorKind::TimedOut => Err(error),
        Err(error) => {
            let link = engine.links.lock().remove(&device.index());
            link.iter().for_each(Link::shut_down);
            let end = deadline.for_rollback();
            match rollback_connect(engine, offer, &mut connected, end) {
                Ok(()) if connects_again && !end.has_passed() => Ok(None),
                Ok(()) => Err(error),
                Err(failure) => Err(error.with_last_seen(format!(
                    "nbd{} was connected, and the rollback could not disconnect it: {failure}",
                    connected.device.index()
                ))),
            }
        }
    }
}

/// Disconnects a device that this attach connected, and waits until it is free. The device
/// stays until its last close, which may be the close of udev's probe.
fn rollback_connect(
    engine: &Engine,
    offer: &Offer<'_>,
    connected: &mut Connected,
    deadline: Deadline,
) -> Result<()> {
    let (roots, index) = (engine.roots(), connected.device.index());
    let locks = Box::new((Arc::clone(&offer.locks), Arc::clone(&connected.lock)));
    let (device, watch) = (&connected.device, &mut connected.watch);
    let connected_by = device.pid().ok().flatten();
    nbd::disconnect_under(locks, roots, index, deadline)?;
    nbd::wait_until_free(device, connected_by, watch, deadline)
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
            return Err(content::exports_differ());
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
/// the device may have died before it did that. The call does not wait for a server that
/// takes no second client or does not answer.
fn limit_request_length(device: &NbdDevice, uri: &NbdUri, call: &mut CallContext) {
    const SERVER_LIMIT: Duration = Duration::from_secs(5);
    let deadline = call.deadline;
    call.enter(Stage::Dial);
    let limit = deadline.at_most(SERVER_LIMIT.min(deadline.remaining() / 4));
    let limited = nbd::dial(uri, limit)
        .and_then(|server| device.limit_requests(server.export.maximum_payload(), deadline));
    if let Err(error) = limited {
        tracing::warn!(%error, %uri, "requests may be longer than the server accepts");
    }
}

#[cfg(test)]
mod tests;
