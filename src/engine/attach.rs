//! Attach, from the call on: [`scsi`] and [`nbd`] go on from here.

mod alias;
pub(super) mod attachment;
mod best_path;
mod multipath_map;
mod multipathd;
pub(super) mod nbd;
pub(super) mod nbd_options;
pub(super) mod request;
mod rollback;
mod scsi;
mod scsi_path;

use super::Engine;
use super::telemetry::{self, Call};
use super::timing::StageTimer;
use crate::deadline::Deadline;
use crate::error::{ErrorKind, Result};
use crate::id::Source;
use crate::kernel::blockdev::BlockDevice;
use crate::uevent::{self, Proof, Watch};
pub use attachment::{Attachment, MissingPath, Unit, UnitPath};
pub(super) use request::UnitClaim;
pub use request::{AttachRequest, Multipath};

impl Engine {
    /// Attaches one device and returns when it has settled.
    ///
    /// **SCSI**: finds where the sources lead, scans for one logical unit on each
    /// path and for nothing else, waits for the disks, asks each who it is: all
    /// must be one unit, and the expected one. A device that is there already is
    /// asked too; where the array has given its address to another unit since it
    /// was scanned, it is replaced if nobody uses it, and never handed out. With
    /// multipathd the map is handed out. Linux 5.10 or later; needs write access
    /// to the hosts' `scan` attribute (root) and `CAP_SYS_ADMIN`.
    ///
    /// **NBD**: shakes hands with the server, hands the sockets to the kernel's
    /// driver over netlink under a backend id, and reads size, access and id
    /// back. Before that it reads what names the content from the server. A device that has this backend id already is returned as it is.
    /// Linux 5.14 or later for backend ids; 5.10 connects without. Needs the
    /// `nbd` module and `CAP_SYS_ADMIN` in the initial user namespace.
    ///
    /// What was attached already comes back with `changed: false`. A failure
    /// leaves nothing behind: what this call brought in is taken down again,
    /// except after a timeout, when it stands as the error says and a repeated
    /// attach goes on with it. A call that is [cancelled](crate::Cancel) has 15 seconds for
    /// that.
    ///
    /// # Errors
    /// `InvalidInput` (an NBD source with further paths or an expected name, or as a
    /// further path), `NoSuchHost`, `NotFound`, `TooFewPaths`, `IdentityMismatch`,
    /// `InUse` (a stale disk that somebody holds; no NBD index that is free; an NBD
    /// device that stands under another index than the wanted one, or writable and is
    /// wanted read-only), `Quarantined`,
    /// `NotSupported` (no disk; no `nbd` module), `NotReady` (blocked
    /// or offline; no path serves I/O in its ALUA access state), `Unreachable` and `Protocol`
    /// (the NBD server), `Refused`, `NotPermitted`, `Vanished`, `TimedOut` and `Cancelled` at
    /// the stage that they name, `Io`.
    #[tracing::instrument(skip_all, fields(source = %request.source, node))]
    pub fn attach(&self, request: &AttachRequest, deadline: Deadline) -> Result<Attachment> {
        telemetry::measured(Call::Attach, || self.attach_timed(request, deadline))
    }

    fn attach_timed(&self, request: &AttachRequest, deadline: Deadline) -> Result<Attachment> {
        let mut timer = StageTimer::new(Call::Attach, request.observer.as_ref());
        let mut attachment = match &request.source {
            Source::Scsi(_) | Source::Iscsi(_) | Source::Fc(_) => {
                self.attach_scsi(request, &mut timer, deadline)?
            }
            Source::Nbd(uri) => self.attach_nbd(uri, request, &mut timer, deadline)?,
        };
        attachment.phases = timer.finish();
        let node = attachment.node.display();
        tracing::Span::current().record("node", tracing::field::display(node));
        Ok(attachment)
    }

    /// Waits until udev is done with the disk and with its partitions.
    pub(super) fn settle(
        &self,
        disk: &BlockDevice,
        watch: &mut Watch,
        deadline: Deadline,
    ) -> Result<Proof> {
        let (roots, mode) = (self.roots(), self.hub().mode());
        let proof = uevent::settle(watch, mode, roots, disk.dir(), deadline)?;
        for partition in disk.partitions()? {
            match uevent::settle(watch, mode, roots, partition.dir(), deadline) {
                // Somebody rereads the partition table; that is no fault here.
                Err(error) if error.kind() == ErrorKind::Vanished => {}
                result => drop(result?),
            }
        }
        Ok(proof)
    }
}
