//! An attach of a device that is attached already.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::nbd::content;
use crate::engine::attach::nbd::prove::{Served, prove_nbd};
use crate::engine::attach::{AttachRequest, Attachment};
use crate::engine::call::CallContext;
use crate::engine::nbd::known::{
    change_own_link, known_source, known_tls, require_answer, require_source,
};
use crate::engine::nbd::queue_facts::require_block_size;
use crate::engine::nbd::receivers::{self, ReceiverCheck};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdUri};
use crate::nbd::{self, Link, NbdDevice};

/// Returns the device that is attached already, after it has proven it again.
pub(super) fn attach_existing_nbd(
    engine: &Engine,
    device: &NbdDevice,
    uri: &NbdUri,
    request: &AttachRequest,
    backend: &BackendId,
    call: &mut CallContext,
) -> Result<Attachment> {
    if let Some(index) = request.nbd.index.filter(|&index| index != device.index()) {
        let found = device.index();
        let message = format!("backend id {backend} is attached as nbd{found}, not as nbd{index}");
        return Err(Error::new(ErrorKind::InUse, message).at(Stage::Connect));
    }
    if request.nbd.read_only && !device.disk().read_only()? {
        let found = device.index();
        let message = format!(
            "backend id {backend} is attached as nbd{found}, which is writable, and is wanted \
             read-only: detach it first"
        );
        return Err(Error::new(ErrorKind::InUse, message).at(Stage::Connect));
    }
    if let Some(wanted) = request.nbd.block_size {
        require_block_size(engine, device, wanted, call.deadline)?;
    }
    require_source(engine, device, uri, backend)?;
    require_tls_known(engine, device, uri, request, backend)?;
    call.enter(Stage::Probe);
    let first = require_answer(engine, device, backend, call.deadline)?;
    let content = nbd::content_names(&first);
    content::require_expected(&request.nbd, Some(&content), uri)?;
    require_receivers(engine, device, backend, call.deadline)?;
    let mut watch = engine.hub().watch(&device.index().name());
    let served = Served {
        content: Some(content),
        tls: known_tls(engine, device, backend, None),
    };
    let mut attachment = prove_nbd(engine, device, request, served, &mut watch, call)?;
    attachment.changed = false;
    Ok(attachment)
}

/// Requires that the kernel receives over each live connection of this process. An attach or a
/// heal that timed out may not have seen that.
fn require_receivers(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
    deadline: Deadline,
) -> Result<()> {
    let unproven = |link: &mut Link| link.has_live_without_receiver().then(|| link.state().live);
    let Some(live) = change_own_link(engine, device, backend, unproven).flatten() else {
        return Ok(());
    };
    match receivers::check_own(engine, device, backend, live, deadline)? {
        ReceiverCheck::AllReceive => Ok(()),
        ReceiverCheck::NotAllReceive => {
            let message = format!(
                "nbd{} is attached, and the kernel does not receive over each of its connections: \
                 heal it, or detach it",
                device.index()
            );
            Err(Error::new(ErrorKind::NotReady, message).at(Stage::Probe))
        }
    }
}

/// Requires that a device that is wanted over TLS is known to use TLS. The kernel does not
/// show this. This process's connections, an id that is made of the URI, or the journal
/// show it.
fn require_tls_known(
    engine: &Engine,
    device: &NbdDevice,
    uri: &NbdUri,
    request: &AttachRequest,
    backend: &BackendId,
) -> Result<()> {
    let is_known = || {
        request.is_recorded
            || *backend == BackendId::derived(&uri.to_string())
            || known_source(engine, device, backend).is_some()
    };
    if !uri.uses_tls() || is_known() {
        return Ok(());
    }
    let message = format!(
        "another process has attached nbd{} under backend id {backend}, and neither the id \
         nor a journal says whether its connections use TLS: detach it first",
        device.index()
    );
    Err(Error::new(ErrorKind::InUse, message).at(Stage::Connect))
}
