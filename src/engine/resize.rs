//! The resize of a SCSI unit or an NBD device.

mod nbd;
mod scsi;

use std::path::PathBuf;

use super::Engine;
use super::call::CallContext;
use super::detach::DetachTarget;
use super::detach::resolve::Resolved;
use super::telemetry::{self, Call};
use super::timing::{Phase, StageObserver};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, Hctl, Source, Wwid};

/// What to resize, and what the caller expects of it.
#[derive(Debug, Clone)]
pub struct ResizeRequest {
    pub(super) target: DetachTarget,
    more: Vec<Source>,
    expected: Option<Wwid>,
    backend: Option<BackendId>,
    pub(super) at_least: Option<u64>,
    observer: Option<StageObserver>,
}

impl ResizeRequest {
    /// A resize to the size that the array or the NBD server reports.
    pub fn new(target: impl Into<DetachTarget>) -> Self {
        Self {
            target: target.into(),
            more: Vec::new(),
            expected: None,
            backend: None,
            at_least: None,
            observer: None,
        }
    }

    /// Resizes only the unit that has this name.
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Adds another source of the same unit, as [`DetachRequest::path`](super::DetachRequest::path)
    /// does.
    #[must_use]
    pub fn path(mut self, source: impl Into<Source>) -> Self {
        self.more.push(source.into());
        self
    }

    /// The backend id of an NBD source that was attached with
    /// [`NbdOptions::backend`](super::NbdOptions::backend).
    #[must_use]
    pub fn backend(mut self, id: BackendId) -> Self {
        self.backend = Some(id);
        self
    }

    /// The size in bytes to which the array or the NBD server was resized: where a path or the
    /// server reports less, the resize fails.
    #[must_use]
    pub fn at_least(mut self, bytes: u64) -> Self {
        self.at_least = Some(bytes);
        self
    }

    /// Calls `observer` for each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

/// A unit whose paths and map all have the size that the unit itself reports, or an NBD device with
/// the size that its server reports.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Resized {
    /// The node of its map, of its first path, or of the NBD device.
    pub node: PathBuf,
    /// The size in bytes before.
    pub old_size: u64,
    /// The size in bytes now.
    pub size: u64,
    /// The unit's names.
    pub names: Vec<Wwid>,
    /// The addresses of its paths; each has the new size.
    pub paths: Vec<Hctl>,
    /// The name of its map, which has the new size.
    pub map: Option<String>,
    /// The time that each stage took.
    pub phases: Vec<Phase>,
    /// Whether a path or the map had another size before.
    pub changed: bool,
}

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
    /// never shrinks an NBD device. The server must accept one more client: over that connection
    /// the call compares the first bytes of the volume with the device's and reads the last block,
    /// before it changes anything of the device. Where the server serves the new size on new
    /// connections only, as nbdkit does, the call replaces those of this process: a request in
    /// flight on one waits for its [`io_timeout`](super::NbdOptions::io_timeout). Where another
    /// process made them, the device gets its old size again and the resize fails as `NotReady`.
    /// Linux 5.14 or later, for backend ids. Newer kernels (6.12) hold the device's I/O while they
    /// change its size: where the server dies at that moment, requests wait, and no heal is
    /// possible, until they fail after
    /// [`dead_connection_timeout`](super::NbdOptions::dead_connection_timeout). After a timeout at
    /// stage `reconfigure` the kernel may still change the size.
    ///
    /// # Errors
    /// `NotFound` where nothing is attached; `NotReady` naming each path that does not have the new
    /// size, and where the unit is smaller than [`at_least`](ResizeRequest::at_least): then the
    /// kernel keeps the size that it has. Without `at_least` it takes over a smaller size too;
    /// `IdentityMismatch`, also where the NBD export is smaller than the device, with both sizes,
    /// or is another volume; `InvalidInput` where the server of an NBD device is not known;
    /// `NotSupported` for a device that is neither a SCSI unit nor an NBD device with a backend id;
    /// those of [`dial`](crate::nbd::dial); `TimedOut` at the stage that it names.
    #[tracing::instrument(skip_all, fields(target = %request.target))]
    pub fn resize(&self, request: &ResizeRequest, deadline: Deadline) -> Result<Resized> {
        telemetry::measured(Call::Resize, || self.resize_timed(request, deadline))
    }

    fn resize_timed(&self, request: &ResizeRequest, deadline: Deadline) -> Result<Resized> {
        let mut call = CallContext::new(Call::Resize, request.observer.as_ref(), deadline);
        call.enter(Stage::Resolve);
        let found = self.find(&request.target, request.backend.clone(), deadline)?;
        let is_nbd = !matches!(found, Resolved::Scsi(_));
        if is_nbd && (request.expected.is_some() || !request.more.is_empty()) {
            let message = "an NBD device has one source, and no name of a unit";
            return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
        }
        let resized = match found {
            Resolved::Scsi(resolved) => self.resize_scsi(resolved, request, &mut call),
            Resolved::NbdBackend(id) => self.resize_nbd_backend(&id, request, &mut call),
            Resolved::Nbd(device) => self.resize_nbd_device(&device, request, &mut call),
        };
        Ok(Resized {
            phases: call.finish(),
            ..resized?
        })
    }
}
