//! The proof that an attached NBD device is ready, and its facts.

use crate::engine::Engine;
use crate::engine::attach::settle::settle_disk;
use crate::engine::attach::{AttachRequest, Attachment, Unit};
use crate::engine::call::CallContext;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::ContentName;
use crate::kernel::blockdev;
use crate::nbd::{NbdDevice, TlsInfo};
use crate::uevent::Watch;

/// What an attach learned of an export over its connection.
pub(super) struct Served {
    pub(super) content: Option<Vec<ContentName>>,
    pub(super) tls: Option<TlsInfo>,
}

/// Waits for udev, and reads the facts of the device back.
pub(super) fn prove_nbd(
    engine: &Engine,
    device: &NbdDevice,
    request: &AttachRequest,
    served: Served,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Result<Attachment> {
    let (roots, disk) = (engine.roots(), device.disk());
    call.enter(Stage::Settle);
    let proof = settle_disk(engine, disk, watch, call.deadline)?;
    let facts = device.connection_facts()?;
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
