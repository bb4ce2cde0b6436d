//! How a volume is attached, as the journal stores it.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::{AttachRequest, Multipath, NbdOptions};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, ContentName, InterfaceName, Iqn, NbdIndex, Source, Wwid};
use crate::iscsi::{CredentialsSource, Proof, SessionName, SessionOptions, Tunables};

/// How a volume is attached, without the options of a single call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct VolumeSpec {
    /// Its source, and further paths; at least one.
    pub sources: Vec<Source>,
    /// The name that the unit must have.
    pub expect: Option<Wwid>,
    /// The least number of paths that must lead to it.
    pub min_paths: usize,
    /// Whether it is used through a multipath map.
    pub multipath: Multipath,
    /// How an NBD source is attached; `None` for other sources.
    pub nbd: Option<NbdSpec>,
    /// How the engine logs in to an iSCSI source; `None` if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_in: Option<LogInSpec>,
}

/// How the engine logs in to an iSCSI source. The secret itself is never written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct LogInSpec {
    /// The name with which it logs in.
    pub initiator: Iqn,
    /// Where the CHAP secrets are.
    pub credentials: Option<CredentialsSource>,
    /// See [`SessionOptions::digests`].
    pub header_digest: bool,
    /// See [`SessionOptions::digests`].
    pub data_digest: bool,
    /// See [`SessionOptions::require_digests`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub requires_digests: bool,
    /// See [`SessionOptions::recovery_timeout`].
    pub recovery_timeout_ms: Option<u64>,
    /// See [`SessionOptions::tunables`].
    #[serde(default, skip_serializing_if = "Tunables::is_empty")]
    pub tune: Tunables,
    /// See [`SessionOptions::interface`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<InterfaceName>,
    /// See [`SessionOptions::source_address`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_address: Option<IpAddr>,
}

/// How an NBD source is attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct NbdSpec {
    /// The id by which the device is found again.
    pub backend: BackendId,
    /// The index of the device, if the caller named one.
    pub index: Option<NbdIndex>,
    /// The number of connections.
    pub connections: NonZeroU16,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
    /// See [`NbdOptions::block_size`]. Records of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// See [`NbdOptions::expect`]. Records of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<ContentName>,
    /// See [`NbdOptions::io_timeout`].
    pub io_timeout_ms: u64,
    /// See [`NbdOptions::dead_connection_timeout`].
    pub dead_connection_timeout_ms: u64,
}

impl VolumeSpec {
    /// The first of its sources that shares a path with one of the other's.
    pub(super) fn source_on_a_path_of(&self, other: &Self) -> Option<&Source> {
        let is_shared = |source: &&Source| other.has_a_path_of(source);
        self.sources.iter().find(is_shared)
    }

    /// Whether one of its sources shares a path with this one.
    pub(in crate::engine) fn has_a_path_of(&self, source: &Source) -> bool {
        self.sources.iter().any(|own| own.shares_a_path(source))
    }

    /// What `request` asks for, without the CHAP secrets that the request itself may hold.
    #[must_use]
    pub fn of(request: &AttachRequest) -> Self {
        let options = &request.nbd;
        let milliseconds = |limit: Duration| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let is_nbd = matches!(request.source, Source::Nbd(_));
        let is_iscsi = |source| matches!(source, &Source::Iscsi(_));
        let log_in = request.log_in.as_ref();
        Self {
            sources: request.sources().cloned().collect(),
            expect: request.expected.clone(),
            min_paths: request.min_paths,
            multipath: request.multipath,
            nbd: is_nbd.then(|| NbdSpec {
                backend: options.backend_of(&request.source),
                index: options.index,
                connections: options.connections,
                read_only: options.read_only,
                block_size: options.block_size,
                expect: options.expected.clone(),
                io_timeout_ms: milliseconds(options.timeouts().request),
                dead_connection_timeout_ms: milliseconds(options.timeouts().dead_connection),
            }),
            log_in: log_in
                .filter(|_| request.sources().any(is_iscsi))
                .map(|options| LogInSpec {
                    initiator: options.initiator.clone(),
                    credentials: match &options.proof {
                        Some(Proof::At(source)) => Some(source.clone()),
                        Some(Proof::Known(_)) | None => None,
                    },
                    header_digest: options.header_digest,
                    data_digest: options.data_digest,
                    requires_digests: options.requires_digests,
                    recovery_timeout_ms: options.recovery_timeout.map(milliseconds),
                    tune: options.tunables.clone(),
                    interface: options.local.interface.clone(),
                    source_address: options.local.address,
                }),
        }
    }

    /// The request from which it was made, without its observer.
    ///
    /// # Errors
    /// `InvalidInput` if it has no source. Every record that this library wrote has one.
    pub fn request(&self) -> Result<AttachRequest> {
        let mut sources = self.sources.iter().cloned();
        let Some(source) = sources.next() else {
            let error = Error::new(ErrorKind::InvalidInput, "the volume has no source");
            return Err(error.at(Stage::Journal));
        };
        let request = AttachRequest::new(source)
            .min_paths(self.min_paths)
            .multipath(self.multipath)
            .nbd(self.nbd_options());
        let mut request = sources.fold(request, AttachRequest::path);
        request.expected.clone_from(&self.expect);
        request.log_in = self.log_in.as_ref().map(LogInSpec::options);
        Ok(request)
    }

    /// The options of an NBD source; the defaults for another source.
    pub(in crate::engine) fn nbd_options(&self) -> NbdOptions {
        let mut options = NbdOptions::default();
        let Some(spec) = &self.nbd else {
            return options;
        };
        options.index = spec.index;
        options.read_only = spec.read_only;
        options.block_size = spec.block_size;
        options.expected.clone_from(&spec.expect);
        options
            .backend(spec.backend.clone())
            .connections(spec.connections)
            .io_timeout(Duration::from_millis(spec.io_timeout_ms))
            .dead_connection_timeout(Duration::from_millis(spec.dead_connection_timeout_ms))
    }

    /// Where the CHAP secrets of a session of this volume are.
    pub(crate) fn credentials_of(&self, session: &SessionName) -> Option<&CredentialsSource> {
        self.log_in_of(session)?.credentials.as_ref()
    }

    /// How this volume logs in to a session, if the session is one of its own.
    pub(crate) fn log_in_of(&self, session: &SessionName) -> Option<&LogInSpec> {
        let is_of = |source: &Source| match source {
            Source::Iscsi(uri) => {
                *uri.target() == session.target && uri.portals().contains(&session.portal)
            }
            _ => false,
        };
        let log_in = self.log_in.as_ref()?;
        let is_ours = log_in.initiator == session.initiator && self.sources.iter().any(is_of);
        is_ours.then_some(log_in)
    }
}

impl LogInSpec {
    fn options(&self) -> SessionOptions {
        let mut options = SessionOptions::new(self.initiator.clone())
            .digests(self.header_digest, self.data_digest);
        options.requires_digests = self.requires_digests;
        options.proof = self.credentials.clone().map(Proof::At);
        options.recovery_timeout = self.recovery_timeout_ms.map(Duration::from_millis);
        options.tunables = self.tune.clone();
        options.local.interface.clone_from(&self.interface);
        options.local.address = self.source_address;
        options
    }
}

impl AttachRequest {
    /// # Errors
    /// `InvalidInput` if it has what a journal cannot store for the next process (a CHAP
    /// secret, or a relative path to one), or if its session options are not valid.
    pub(crate) fn require_repeatable(&self) -> Result<()> {
        if let Some(options) = &self.log_in {
            options.require_valid()?;
        }
        let proof = self
            .log_in
            .as_ref()
            .and_then(|options| options.proof.as_ref());
        let message = match proof {
            Some(Proof::Known(_)) => {
                "the journal stores no CHAP secret: name the file or the variables that hold it"
            }
            Some(Proof::At(CredentialsSource::File(path))) if !path.is_absolute() => {
                "the path of a CHAP file must be absolute"
            }
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::InvalidInput, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_of_a_stored_volume_asks_for_all_that_was_stored() {
        let unit: Wwid = "naa.5000c500a1b2c3d4".parse().unwrap();
        let [one, two] =
            ["scsi:2:0:0:1", "scsi:3:0:0:1"].map(|text| text.parse::<Source>().unwrap());
        let scsi = AttachRequest::new(one)
            .path(two)
            .expect(unit.clone())
            .min_paths(2)
            .multipath(Multipath::Off);
        let spec = VolumeSpec::of(&scsi);
        assert_eq!(spec.expect, Some(unit));
        assert_eq!(VolumeSpec::of(&spec.request().unwrap()), spec);
        let source: Source = "nbd://192.0.2.1/vol-7".parse().unwrap();
        let options = NbdOptions::default()
            .backend("mine".parse().unwrap())
            .index(NbdIndex::new(7).unwrap())
            .connections(NonZeroU16::new(3).unwrap())
            .read_only()
            .block_size(4096)
            .expect("mbr.1234abcd".parse().unwrap())
            .io_timeout(Duration::from_secs(90))
            .dead_connection_timeout(Duration::from_secs(45));
        let spec = VolumeSpec::of(&AttachRequest::new(source).nbd(options));
        let nbd = spec.nbd.as_ref().unwrap();
        assert!(nbd.read_only && nbd.index.is_some() && nbd.expect.is_some());
        assert_eq!(nbd.block_size, Some(4096));
        assert_eq!(VolumeSpec::of(&spec.request().unwrap()), spec);
    }
}
