//! The result of a detach.

use std::fmt;
use std::path::PathBuf;

use crate::engine::detach::receipt::{Flush, Receipt};
use crate::engine::timing::Phase;
use crate::engine::usage::NotLookedAt;
use crate::id::{BackendId, DevNo, DiskSeq, Hctl, NbdIndex, SessionId, VolumeId, Wwid};

/// What a detach did.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Detachment {
    /// Where the device was.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub place: Place,
    /// The device node: a SCSI node is gone, an NBD node is free. `None` if there was no
    /// disk.
    pub node: Option<PathBuf>,
    /// The disk's device number.
    pub devno: Option<DevNo>,
    /// The disk's sequence number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// What became of the dirty pages; `None` if nothing was attached.
    pub flush: Option<Flush>,
    /// How long each phase took.
    pub phases: Vec<Phase>,
    /// Whether this call removed the device; `false` if it was gone already.
    pub changed: bool,
    /// Whether all data was flushed and nothing of the volume is left on this machine, both
    /// as read back. If it is `false`, the notes of a SCSI unit's receipt say what is not proven.
    /// For an NBD device, `flush` says it. There `safe_to_unmap` means this device alone: the
    /// detach does not look for another device of the same export, which has another backend id.
    pub safe_to_unmap: bool,
    /// Places where a user of the device would not have been seen: what such a user wrote
    /// after the flush is lost. For a SCSI unit these are the places of its receipt.
    pub not_looked_at: Vec<NotLookedAt>,
    /// What was read back for each path of a SCSI unit; `None` for an NBD device.
    pub receipt: Option<Receipt>,
    /// The iSCSI sessions that the detach logged out: the engine had made them, and they
    /// had no device left.
    pub logged_out: Vec<SessionId>,
    /// The journal's volume to which the device belonged.
    pub volume: Option<VolumeId>,
    /// When an earlier detach removed the volume, according to the journal, in UTC. What
    /// this result says of pages and users then comes from that detach.
    pub detached_at: Option<String>,
}

/// The place of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Place {
    /// A SCSI unit.
    Scsi {
        /// The address of its first path; `None` if no path was there and the caller named
        /// no address.
        hctl: Option<Hctl>,
        /// Its strongest name, if one is known.
        name: Option<Wwid>,
    },
    /// An NBD device.
    Nbd {
        /// The index; `None` if no device had the backend id.
        index: Option<NbdIndex>,
        /// The backend id of the device.
        backend: Option<BackendId>,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scsi {
                hctl: Some(hctl), ..
            } => write!(f, "scsi:{hctl}"),
            Self::Scsi {
                name: Some(name), ..
            } => name.fmt(f),
            Self::Scsi { .. } => f.write_str("scsi"),
            Self::Nbd {
                backend: Some(id), ..
            } => id.fmt(f),
            Self::Nbd {
                index: Some(index), ..
            } => write!(f, "nbd{index}"),
            Self::Nbd { .. } => f.write_str("nbd"),
        }
    }
}

impl Detachment {
    /// The result of a detach that found nothing attached.
    pub(in crate::engine) fn unchanged(place: Place) -> Self {
        Self {
            place,
            node: None,
            devno: None,
            diskseq: None,
            flush: None,
            phases: Vec::new(),
            changed: false,
            safe_to_unmap: false,
            not_looked_at: Vec::new(),
            receipt: None,
            logged_out: Vec::new(),
            volume: None,
            detached_at: None,
        }
    }

    /// Joins this result with the `next` one, which is for another source of the same
    /// volume. A result that found nothing adds only its phases and logouts.
    pub(in crate::engine) fn and(mut self, mut next: Self) -> Self {
        self.phases.append(&mut next.phases);
        self.logged_out.append(&mut next.logged_out);
        if self.found_nothing() && (next.changed || next.receipt.is_some()) {
            (next.phases, next.logged_out) = (self.phases, self.logged_out);
            return next;
        }
        if next.found_nothing() {
            return self;
        }
        if next.changed && !self.changed {
            std::mem::swap(&mut self, &mut next);
            (self.phases, self.logged_out) = (next.phases, next.logged_out);
        }
        self.safe_to_unmap &= next.safe_to_unmap;
        NotLookedAt::merge(&mut self.not_looked_at, &next.not_looked_at);
        match (&mut self.receipt, next.receipt) {
            (Some(receipt), Some(next)) => receipt.append(next),
            (receipt @ None, next) => *receipt = next,
            (Some(_), None) => {}
        }
        self
    }

    fn found_nothing(&self) -> bool {
        !self.changed && self.receipt.as_ref().is_none_or(Receipt::found_nothing)
    }
}
