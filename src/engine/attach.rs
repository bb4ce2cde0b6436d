//! The public call of an attach; [`scsi`] and [`nbd`] hold the steps for each kind of source.

mod access_state;
pub(super) mod addresses;
mod alias;
pub(super) mod attachment;
mod best_path;
mod multipath_map;
mod multipathd;
pub(super) mod nbd;
pub(super) mod nbd_options;
mod path_set;
pub(super) mod request;
mod rollback;
mod scan;
mod scsi;
pub(super) mod scsi_path;
mod settle;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::nbd::attach_nbd;
use crate::engine::attach::scsi::attach_scsi;
use crate::engine::call::CallContext;
use crate::engine::telemetry::{self, Call};
pub use crate::error::MissingPath;
use crate::error::Result;
use crate::id::Source;
pub use attachment::{Attachment, Unit, UnitPath};
pub(super) use request::UnitClaim;
pub use request::{AttachRequest, Multipath};

impl Engine {
    /// Attaches one device and returns when udev has settled.
    ///
    /// **SCSI**: finds the addresses to which the sources lead, scans for one logical unit on each
    /// path and for nothing else, waits for the disks and reads the names of each unit: all must be
    /// one unit, and the expected one. A device that is there already is read too. Where the array
    /// has given its address to another unit since the scan, the call replaces the device if
    /// nothing uses it, and never returns the stale one. With multipathd it returns the multipath
    /// map. Linux 5.10 or later; needs write access to the hosts' `scan` attribute (root) and
    /// `CAP_SYS_ADMIN`.
    ///
    /// **NBD**: negotiates with the server, reads from it the names of the content, hands the
    /// sockets to the kernel's driver over netlink under a backend id, and reads size, access and
    /// id back. A device that has this backend id already is returned as it is. Linux 5.14 or later
    /// for backend ids; 5.10 connects without them. Needs the `nbd` module and `CAP_SYS_ADMIN` in
    /// the initial user namespace.
    ///
    /// A device that was attached already comes back with `changed: false`. A failed call removes
    /// what it brought in, with one exception: after a timeout the device stays as the error says,
    /// and a repeated attach continues with it. A call that is [cancelled](crate::Cancel) has 15
    /// seconds for the rollback. If the kernel does not return within three seconds of the
    /// cancellation, its scan or its connect may still bring the device later.
    ///
    /// # Errors
    /// `InvalidInput` (an NBD source with further paths or an expected name, or as a further path),
    /// `NoSuchHost`, `NotFound`, `TooFewPaths`, `IdentityMismatch`, `InUse` (a stale disk is in
    /// use; no NBD index is free; the NBD device has another index than the wanted one, or is
    /// writable and read-only is wanted), `Quarantined`, `NotSupported` (no disk; no `nbd` module),
    /// `NotReady` (blocked or offline; no path serves I/O in its ALUA access state; the
    /// connections of an attached NBD device have ended), `Unreachable` and `Protocol` (the NBD
    /// server), `Refused`, `NotPermitted`, `Vanished`, `TimedOut` and `Cancelled` at the stage that
    /// they name, `Io`.
    #[tracing::instrument(skip_all, fields(source = %request.source, node))]
    pub fn attach(&self, request: &AttachRequest, deadline: Deadline) -> Result<Attachment> {
        telemetry::measured(Call::Attach, || attach_timed(self, request, deadline))
    }
}

fn attach_timed(
    engine: &Engine,
    request: &AttachRequest,
    deadline: Deadline,
) -> Result<Attachment> {
    let mut call = CallContext::new(Call::Attach, request.observer.as_ref(), deadline);
    let mut attachment = match &request.source {
        Source::Scsi(_) | Source::Iscsi(_) | Source::Fc(_) => {
            attach_scsi(engine, request, &mut call)?
        }
        Source::Nbd(uri) => attach_nbd(engine, uri, request, &mut call)?,
    };
    attachment.phases = call.finish();
    let node = attachment.node.display();
    tracing::Span::current().record("node", tracing::field::display(node));
    Ok(attachment)
}
