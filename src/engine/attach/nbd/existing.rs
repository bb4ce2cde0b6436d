//! An attach of a device that is attached already.

use std::time::Duration;

use super::{Served, content};
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::{AttachRequest, Attachment};
use crate::engine::call::CallContext;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdUri};
use crate::kernel::blockdev::BlockDevice;
use crate::nbd::{self, Link, NbdDevice, TlsInfo};

impl Engine {
    /// Returns the device that is attached already, after it has proven it again.
    pub(super) fn attach_existing_nbd(
        &self,
        device: &NbdDevice,
        uri: &NbdUri,
        request: &AttachRequest,
        backend: &BackendId,
        call: &mut CallContext,
    ) -> Result<Attachment> {
        if let Some(index) = request.nbd.index.filter(|&index| index != device.index()) {
            let found = device.index();
            let message =
                format!("backend id {backend} is attached as nbd{found}, not as nbd{index}");
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
            device.require_block_size(wanted)?;
        }
        self.require_source(device, uri, backend)?;
        self.require_tls_known(device, uri, request, backend)?;
        call.enter(Stage::Probe);
        let first = self.require_answer(device, backend, call.deadline)?;
        let content = nbd::content_names(&first);
        content::require_expected(&request.nbd, Some(&content), uri)?;
        let mut watch = self.hub().watch(&device.index().name());
        let served = Served {
            content: Some(content),
            tls: self.known_tls(device, backend, None),
        };
        let mut attachment = self.prove_nbd(device, request, served, &mut watch, call)?;
        attachment.changed = false;
        Ok(attachment)
    }

    /// Requires that neither this process nor an id that is a URI shows another source of the
    /// device than `uri`.
    pub(in crate::engine) fn require_source(
        &self,
        device: &NbdDevice,
        uri: &NbdUri,
        backend: &BackendId,
    ) -> Result<()> {
        let index = device.index();
        let source = self.known_source(device, backend);
        let Some(other) = source.filter(|source| source != uri) else {
            return Ok(());
        };
        let message = format!(
            "backend id {backend} is attached as nbd{index} from {other}, not from {uri}: detach \
             it first, or give this source another id"
        );
        Err(Error::new(ErrorKind::InUse, message).at(Stage::Connect))
    }

    /// Requires that a device that is wanted over TLS is known to use TLS. The kernel does not
    /// show it. This process's connections, an id that is made of the URI, or the journal say
    /// it.
    fn require_tls_known(
        &self,
        device: &NbdDevice,
        uri: &NbdUri,
        request: &AttachRequest,
        backend: &BackendId,
    ) -> Result<()> {
        let is_known = || {
            request.is_recorded
                || *backend == BackendId::derived(&uri.to_string())
                || self.known_source(device, backend).is_some()
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

    /// Requires that the device is not known to use TLS if `uri` does not.
    pub(in crate::engine) fn require_no_less_tls(
        &self,
        device: &NbdDevice,
        uri: &NbdUri,
        backend: &BackendId,
    ) -> Result<()> {
        let source = self.known_source(device, backend);
        let Some(known) = source.filter(|source| source.uses_tls() && !uri.uses_tls()) else {
            return Ok(());
        };
        let message = format!(
            "backend id {backend} is attached as nbd{} over TLS from {known}, and {uri} is without \
             TLS: detach it first",
            device.index()
        );
        Err(Error::new(ErrorKind::InUse, message).at(Stage::Resolve))
    }

    /// The source of a device, from this process's connections or from an id that is a URI.
    pub(in crate::engine) fn known_source(
        &self,
        device: &NbdDevice,
        backend: &BackendId,
    ) -> Option<NbdUri> {
        let is_its_own = |link: &&Link| link.backend == *backend;
        let links = self.links_beside(device);
        match links.get(&device.index()).filter(is_its_own) {
            Some(link) => Some(link.uri.clone()),
            None => backend.as_str().parse().ok(),
        }
    }

    /// The TLS of the device's last connection: that of this process, or the recorded one if
    /// this process has made none. It is not known if another process has since replaced the
    /// connections of this one.
    pub(in crate::engine) fn known_tls(
        &self,
        device: &NbdDevice,
        backend: &BackendId,
        recorded: Option<&TlsInfo>,
    ) -> Option<TlsInfo> {
        let links = self.links_beside(device);
        match links.get(&device.index()) {
            Some(link) if link.backend != *backend => recorded.cloned(),
            Some(link) if link.is_of_another_now() => None,
            Some(Link { tls: Some(tls), .. }) => Some(tls.clone()),
            _ => recorded.cloned(),
        }
    }

    /// Reads the bytes that hold the names of the device's content, which proves that the
    /// device answers.
    pub(in crate::engine) fn require_answer(
        &self,
        device: &NbdDevice,
        backend: &BackendId,
        deadline: Deadline,
    ) -> Result<Vec<u8>> {
        /// The limit for a device whose connections of this process have ended: another process
        /// may have given it new ones.
        const PATIENCE: Duration = Duration::from_secs(1);
        let index = device.index();
        let dead = |link: &Link| link.backend == *backend && link.is_dead();
        let is_dead = self.links_beside(device).get(&index).is_some_and(dead);
        let length = usize::try_from(nbd::CONTENT_LENGTH).unwrap_or(usize::MAX);
        let limit = deadline.at_most(if is_dead { PATIENCE } else { Duration::MAX });
        let first_bytes =
            move |disk: &_, roots: &_| BlockDevice::read_first_bytes(disk, roots, length);
        let read = self
            .nbd_reads
            .start(device, self.roots(), limit, first_bytes)?;
        let earlier = if read.is_none() {
            "an earlier read has not returned, "
        } else {
            ""
        };
        let answer = read.and_then(|read| read.wait(limit));
        answer.unwrap_or_else(|| {
            let error = if is_dead {
                let message = format!(
                    "nbd{index} is attached, and its connections have ended: heal it, or detach it"
                );
                Error::new(ErrorKind::NotReady, message).at(Stage::Probe)
            } else {
                let what = format!(
                    "a read of nbd{index}, which is attached already: its connections may be \
                     dead, and a heal replaces those"
                );
                Error::timed_out(Stage::Probe, deadline, &what)
            };
            Err(error.with_last_seen(format!("{earlier}{}", device.disk().describe())))
        })
    }
}
