//! The resize of a SCSI unit or an NBD device.

mod nbd;
mod request;
mod scsi;

use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::resolve::{Resolved, resolve_target};
use crate::engine::telemetry::{self, Call};

use crate::deadline::Deadline;
#[cfg(feature = "journal")]
pub(in crate::engine) use crate::engine::resize::nbd::serves_its_size;
use crate::engine::resize::nbd::{resize_nbd_backend, resize_nbd_device};
pub use crate::engine::resize::request::{ResizeRequest, Resized};
use crate::engine::resize::scsi::resize_scsi;
use crate::error::{Error, ErrorKind, Result, Stage};

impl Engine {
    /// Makes the kernel take over the size that a SCSI unit has on the array now: on each of its
    /// paths, then on its multipath map; or the size that the server of an NBD device reports on a
    /// new connection. File systems are not touched.
    ///
    /// The call succeeds only when every path of the unit, found by its identity, and the map have
    /// the size that the unit itself reports. Where a path is dead, the others get the new size and
    /// the map keeps the old one: otherwise I/O past the end of the dead path would fail when that
    /// path comes back. Repeating the call is safe. Linux 5.10 or later; needs write access to the
    /// `rescan` attribute (root) and `CAP_SYS_ADMIN`.
    ///
    /// An NBD device must answer a read first, and the call reads its last block at the end. It
    /// never shrinks an NBD device. The server must accept one more client. Over that connection
    /// the call compares the first 68 KiB of the volume with the device's. If the server allows
    /// several connections, the call also compares a block at the end and 24 random blocks. Then it
    /// reads the last block over that connection. It does all this before it changes anything of
    /// the device. Where the server serves the new size on new connections only, as nbdkit does,
    /// the call replaces those of this process: a request in flight on one waits for its
    /// [`io_timeout`](super::NbdOptions::io_timeout). Where another process made them, the device
    /// gets its old size again and the resize fails as `NotReady`. Linux 5.14 or later, for backend
    /// ids. Newer kernels (6.12) hold the device's I/O while they change its size: where the server
    /// dies at that moment, requests wait, and no heal is possible, until they fail after
    /// [`dead_connection_timeout`](super::NbdOptions::dead_connection_timeout). After a timeout at
    /// stage `reconfigure` the kernel may still change the size.
    ///
    /// # Errors
    /// `NotFound` where nothing is attached; `NotReady` naming each path that does not have the new
    /// size, where the connections of the NBD device have ended, and where the unit is smaller than
    /// [`at_least`](ResizeRequest::at_least): then the kernel keeps the size that it has. Without
    /// `at_least` it takes over a smaller size too; `IdentityMismatch`, also where the NBD export
    /// is smaller than the device, with both sizes, or is another volume; `InvalidInput` where the
    /// server of an NBD device is not known, and where a map would shrink and no multipathd runs;
    /// `NotSupported` for a device that is neither a SCSI unit nor an NBD device with a backend id;
    /// those of [`dial`](crate::nbd::dial); `TimedOut` at the stage that it names.
    #[tracing::instrument(skip_all, fields(target = %request.target))]
    pub fn resize(&self, request: &ResizeRequest, deadline: Deadline) -> Result<Resized> {
        telemetry::measured(Call::Resize, || resize_timed(self, request, deadline))
    }
}

fn resize_timed(engine: &Engine, request: &ResizeRequest, deadline: Deadline) -> Result<Resized> {
    let mut call = CallContext::new(Call::Resize, request.observer.as_ref(), deadline);
    call.enter(Stage::Resolve);
    let found = resolve_target(engine, &request.target, request.backend.clone(), deadline)?;
    let is_nbd = !matches!(found, Resolved::Scsi(_));
    if is_nbd && (request.expected.is_some() || !request.more.is_empty()) {
        let message = "an NBD device has one source, and no name of a unit";
        return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
    }
    let resized = match found {
        Resolved::Scsi(resolved) => resize_scsi(engine, resolved, request, &mut call),
        Resolved::NbdBackend(id) => resize_nbd_backend(engine, &id, request, &mut call),
        Resolved::Nbd(device) => resize_nbd_device(engine, &device, request, &mut call),
    };
    Ok(Resized {
        phases: call.finish(),
        ..resized?
    })
}
