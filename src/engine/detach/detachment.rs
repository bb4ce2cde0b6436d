//! What a detach answers.

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
    /// Where nothing is now.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub place: Place,
    /// The node: of SCSI it is gone, of NBD it is free. `None` where there was
    /// no disk.
    pub node: Option<PathBuf>,
    /// Its number.
    pub devno: Option<DevNo>,
    /// Its life's serial number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// What became of the dirty pages; `None` where nothing was attached.
    pub flush: Option<Flush>,
    /// Where the time went.
    pub phases: Vec<Phase>,
    /// Whether this call took it down; `false` where it was gone already.
    pub changed: bool,
    /// All was flushed and nothing of it is left on this machine: each was read
    /// back. Where it is `false`, the receipt's notes say what is not proven.
    pub safe_to_unmap: bool,
    /// Where somebody may have had it open who was not seen: what such a user wrote
    /// after the flush is lost. Of a SCSI unit the same as in its receipt.
    pub not_looked_at: Vec<NotLookedAt>,
    /// What was read back of a SCSI unit, path by path.
    pub receipt: Option<Receipt>,
    /// The iSCSI sessions that were logged out: made by the engine, and with no
    /// device left.
    pub logged_out: Vec<SessionId>,
    /// The volume of the journal that it was.
    pub volume: Option<VolumeId>,
    /// When an earlier detach took the volume down, by the journal, in UTC. What is said
    /// here of pages and users is that one's.
    pub detached_at: Option<String>,
}

/// Where a device was.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Place {
    /// A SCSI unit.
    Scsi {
        /// The address of its first path; `None` where none was there and the
        /// caller named none.
        hctl: Option<Hctl>,
        /// Its strongest name, where somebody could say it.
        name: Option<Wwid>,
    },
    /// The kernel's NBD driver.
    Nbd {
        /// The index; `None` where no device had the backend id.
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
    /// Nothing was attached.
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

    /// One answer for this one and the `next` one, of another source of the same
    /// volume. One that found nothing says nothing beside one that did.
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
        NotLookedAt::note(&mut self.not_looked_at, &next.not_looked_at);
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
