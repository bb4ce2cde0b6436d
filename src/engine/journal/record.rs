//! The journal's record of one volume.

use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::engine::journal::spec::VolumeSpec;
use crate::engine::{Attachment, Detachment, NbdOptions, NotLookedAt, Unit};
use crate::id::{ContentName, DevNo, DiskSeq, NbdIndex, VolumeId, Wwid};
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
    /// The operation that is unfinished.
    pub(in crate::engine) fn operation(&self) -> Option<Operation> {
        self.intent.as_ref().map(|intent| intent.operation)
    }

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

    /// The options with which an NBD volume is healed; the defaults for another volume.
    #[must_use]
    pub fn nbd_options(&self) -> NbdOptions {
        let mut options = self.spec.nbd_options();
        let outcome = self.outcome.as_ref();
        options.last_content = outcome.and_then(|outcome| outcome.content.clone());
        options
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

    /// Of two detaches, the later one is greater.
    pub(in crate::engine) fn order(&self) -> (u64, &str) {
        (self.sequence, &self.at)
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
