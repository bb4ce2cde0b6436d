//! The journal's record of one volume.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::engine::{
    AttachRequest, Attachment, Detachment, Multipath, NbdOptions, NotLookedAt, Unit,
};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{
    BackendId, ContentName, DevNo, DiskSeq, InterfaceName, Iqn, NbdIndex, Source, VolumeId, Wwid,
};
use crate::iscsi::{CredentialsSource, Proof, SessionName, SessionOptions, Tunables};
use crate::nbd::TlsInfo;

/// One volume: how it is attached, what is under way, and what was read back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Record {
    /// The caller's name of the volume.
    pub volume: VolumeId,
    /// How it is attached: all that a repeated attach needs.
    pub spec: VolumeSpec,
    /// What was about to be done. It stays until the outcome is written: a record with an
    /// intent means that the call still runs, that it timed out, or that its process died.
    pub intent: Option<Intent>,
    /// What the last attach read back; `None` if no attach has finished.
    pub outcome: Option<Outcome>,
    /// The machine's boot in which this was begun: after another boot an address such as
    /// `scsi:2:0:0:1` may mean another device. Records of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// What its detach has proven. Such a record says that nothing of the volume is left on
    /// this machine, and the journal keeps it for a repeated detach: see
    /// [`Journal::detached`](super::Journal::detached).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached: Option<Detached>,
}

/// What a detach has proven.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Detached {
    /// As [`Detachment::safe_to_unmap`](crate::Detachment::safe_to_unmap).
    pub safe_to_unmap: bool,
    /// As [`Detachment::not_looked_at`](crate::Detachment::not_looked_at).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_looked_at: Vec<NotLookedAt>,
    /// When it was proven, by the machine's clock, in UTC.
    pub at: String,
    /// Each detach has a higher number than those that the journal already keeps; the clock may
    /// be set back. Records of earlier versions lack it.
    #[serde(default)]
    pub sequence: u64,
}

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

/// What was about to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Intent {
    /// The operation.
    pub operation: Operation,
    /// When it began, by the machine's clock, in UTC: for people.
    pub begun_at: String,
}

/// An operation on a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Operation {
    /// An attach.
    Attach,
    /// A detach.
    Detach {
        /// Whether the detach goes on if the volume cannot be written back.
        abandon_unwritten: bool,
    },
    /// A resize: the kernel takes over the size that the array or the NBD server reports.
    Resize {
        /// The least size in bytes that the volume must have.
        at_least: Option<u64>,
    },
}

/// What an attach read back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Outcome {
    /// The node of the device that was handed out.
    pub node: PathBuf,
    /// Its device number.
    pub devno: DevNo,
    /// Its disk sequence number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// Its size in bytes.
    pub size: u64,
    /// The names of the SCSI unit, the strongest first; empty for NBD.
    pub names: Vec<Wwid>,
    /// The name of the multipath map, if the device is one.
    pub map: Option<String>,
    /// The index of the NBD device.
    pub nbd_index: Option<NbdIndex>,
    /// The names of the NBD volume's content, as an attach, or udev since then, last read
    /// them. Empty if the volume was blank; `None` if they are not known, as in records of
    /// earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Vec<ContentName>>,
    /// The TLS of the last NBD connection that a process with this journal made: by an
    /// attach, or by a reconciler's reconnect since. `None` without TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsInfo>,
    /// When it was read back, by the machine's clock, in UTC.
    pub at: String,
}

impl Record {
    /// The unit's names, from the outcome or else from the caller, the strongest first. They
    /// are sorted here because earlier versions wrote them in another order.
    pub(in crate::engine) fn names(&self) -> Vec<Wwid> {
        let read_back = self.outcome.iter().flat_map(|outcome| &outcome.names);
        let mut names: Vec<Wwid> = read_back.cloned().collect();
        if names.is_empty() {
            names.extend(self.spec.expect.clone());
        }
        names.sort();
        names
    }

    /// The options with which an NBD volume is healed.
    pub(in crate::engine) fn nbd_options(&self) -> NbdOptions {
        let mut options = self.spec.nbd_options();
        let outcome = self.outcome.as_ref();
        options.last_content = outcome.and_then(|outcome| outcome.content.clone());
        options
    }
}

impl VolumeSpec {
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
}

impl VolumeSpec {
    /// Where the CHAP secrets of a session of this volume are.
    pub(crate) fn credentials_of(&self, session: &SessionName) -> Option<&CredentialsSource> {
        let is_of = |source: &Source| match source {
            Source::Iscsi(uri) => {
                *uri.target() == session.target && uri.portals().contains(&session.portal)
            }
            _ => false,
        };
        let log_in = self.log_in.as_ref()?;
        let is_ours = log_in.initiator == session.initiator && self.sources.iter().any(is_of);
        log_in.credentials.as_ref().filter(|_| is_ours)
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

impl Detached {
    pub(in crate::engine) fn of(detachment: &Detachment) -> Self {
        Self {
            safe_to_unmap: detachment.safe_to_unmap,
            not_looked_at: detachment.not_looked_at.clone(),
            at: now(),
            sequence: 0,
        }
    }
}

impl Intent {
    /// An intent that begins now.
    pub(in crate::engine) fn now(operation: Operation) -> Self {
        Self {
            operation,
            begun_at: now(),
        }
    }
}

impl Outcome {
    /// The outcome of an attach of a volume whose last outcome is `last`. If the device is
    /// the same, the TLS of connections that another process made stays known.
    pub(in crate::engine) fn after(attachment: &Attachment, last: Option<&Self>) -> Self {
        let mut new = Self::of(attachment);
        if let Some(last) = last
            && !attachment.changed
            && (last.devno, last.diskseq) == (new.devno, new.diskseq)
        {
            new.tls = new.tls.or_else(|| last.tls.clone());
        }
        new
    }

    pub(in crate::engine) fn of(attachment: &Attachment) -> Self {
        let (map, content, tls) = match &attachment.unit {
            Unit::Scsi { map, .. } => (map.clone(), None, None),
            Unit::Nbd { content, tls, .. } => (None, content.clone(), tls.clone()),
        };
        let identity = attachment.identity();
        Self {
            node: attachment.node.clone(),
            devno: attachment.devno,
            diskseq: attachment.diskseq,
            size: attachment.size,
            names: identity.map_or_else(Vec::new, |identity| identity.names.clone()),
            map,
            nbd_index: attachment.nbd_index(),
            content,
            tls,
            at: now(),
        }
    }
}

fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
