//! The evidence that a detach leaves, by which the caller decides whether the array may
//! unmap the volume.

use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;

use crate::engine::telemetry::Failure;
use crate::engine::usage::NotLookedAt;
use crate::error::{Error, ErrorKind};
use crate::id::{DevNo, DiskSeq, Hctl, Wwid};

/// The read-back results of a detach, step by step. A failed detach has a receipt too,
/// which says how far it came.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Receipt {
    /// The names of the unit by which its paths were searched for; empty where no name
    /// was known.
    pub names: Vec<Wwid>,
    /// Its multipath map, where there was one.
    pub map: Option<MapReceipt>,
    /// Its SCSI paths in the order in which they were found, including those that
    /// appeared during the detach.
    pub paths: Vec<PathReceipt>,
    /// The places in which a user could not be looked for. Data that such a user writes
    /// after the flush is lost.
    pub not_looked_at: Vec<NotLookedAt>,
    /// Further actions, and facts that are not proven, in words.
    pub notes: Vec<String>,
    /// Everything was flushed, and nothing of the unit is left on this machine: no map,
    /// no path, and no path known to multipathd. Each was read back. It does not cover
    /// users in the places that were [not looked at](Self::not_looked_at).
    pub safe_to_unmap: bool,
    /// A path has sent a flush of the unit's cache after all paths had written their pages, or no path
    /// shows a cache.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(in crate::engine) cache_was_flushed: bool,
}

/// The result for a multipath map.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MapReceipt {
    /// Its name.
    pub name: String,
    /// Its uuid, which begins with `mpath-`.
    pub uuid: String,
    /// Its node, `/dev/dm-N`.
    pub node: PathBuf,
    /// The map queued I/O with no path left, and was told to fail it instead: the caller
    /// abandons unwritten data.
    pub told_to_fail: bool,
    /// The result of writing back its dirty pages; `None` before that step.
    pub flush: Option<Flush>,
    /// sysfs no longer shows the map.
    pub gone: bool,
}

/// The result for one path.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PathReceipt {
    /// Its SCSI address.
    pub hctl: Hctl,
    /// The disk's node; `None` where there was no disk.
    pub node: Option<PathBuf>,
    /// The disk's device number.
    pub devno: Option<DevNo>,
    /// The disk's sequence number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// The result of writing back its dirty pages; `None` before that step.
    pub flush: Option<Flush>,
    /// sysfs no longer shows the path.
    pub gone: bool,
    /// multipathd has forgotten the path; `None` where no multipathd runs, and before it
    /// is asked.
    pub forgotten: Option<bool>,
    /// The path was below the map when the map was flushed and removed.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) in_map: bool,
    /// The path wrote its own pages back after its map was flushed, if it had any.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) wrote_own_pages: bool,
}

impl PathReceipt {
    /// Why data of the path may be lost. The cache belongs to the unit, so another path that
    /// flushed it has stored the pages of this path too.
    fn doubt(&self, cache_was_flushed: bool) -> Option<String> {
        let hctl = self.hctl;
        match &self.flush {
            Some(Flush::Done | Flush::NoDisk) => None,
            _ if self.needs_cache_flush() => {
                (!cache_was_flushed).then(|| format!("no path flushed the cache behind {hctl}"))
            }
            // Its data went through the map.
            Some(Flush::Unreachable(_)) if self.in_map => None,
            _ => Some(format!("{hctl} was not flushed")),
        }
    }

    /// Whether pages of the path may be in the unit's cache alone, unless another path flushes it.
    pub(super) fn needs_cache_flush(&self) -> bool {
        match &self.flush {
            Some(Flush::ThroughMap(_) | Flush::PagesWritten(_)) => true,
            Some(Flush::Unreachable(_)) => self.in_map && self.wrote_own_pages,
            _ => false,
        }
    }

    /// As [`needs_cache_flush`](Self::needs_cache_flush), and true also if the detach has ended before
    /// it flushed the path.
    pub(super) fn may_be_unflushed(&self) -> bool {
        let is_not_reached = self.flush.is_none() && self.in_map && self.wrote_own_pages;
        is_not_reached || self.needs_cache_flush()
    }
}

/// The result of writing back the dirty pages and the device's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Flush {
    /// All pages were written, and `fsync` succeeded, under an exclusive claim. `BLKFLSBUF`
    /// succeeded too, unless it found a path of a map dead or the map suspended, which only
    /// kernels before 5.11 report.
    Done,
    /// The device no longer served opens, and no process had it open. The kernel has written
    /// its pages, or lost them: only what went through a flushed map is safe. A process that
    /// wrote to a path itself, beside its map, may have lost that. The text is the kernel's
    /// refusal. An NBD device that an earlier call has disconnected is such a device too, although
    /// a reader has it open.
    Unreachable(String),
    /// The path did not flush the unit's cache. The multipath map was flushed before, and the
    /// path's own pages, if it had any, were written after that. This suffices where another path
    /// flushes the cache. The text is the path's failure.
    ThroughMap(String),
    /// All pages were written, but in its ALUA access state the path refused to flush the
    /// unit's cache. This suffices where another path is `Done`: it flushed the cache,
    /// which belongs to the unit, after that. The text names the state and the path's
    /// failure.
    PagesWritten(String),
    /// The flush succeeded, and does not prove that earlier writes are stored. The process of an
    /// earlier flush of the device ended before it saw the result, and an NBD server may report a
    /// failure once (`nbdkit file` passes on what `fdatasync` says). The text says this.
    Unproven(String),
    /// Another unit answers at the address now, or the target has none there, so nothing may be
    /// written there; no process had the disk open. The text names that unit.
    Replaced(String),
    /// The flush failed, or reached no unit, and the caller had asked to go on: unwritten data is
    /// lost. The text is the failure.
    Abandoned(String),
    /// The device had no disk.
    NoDisk,
}

const NO_NAME_NOTE: &str = "no path reported a name of the unit, so other paths were not searched \
                        for";

impl Receipt {
    /// Whether nothing was found, and there was no name by which to search for more.
    pub(super) fn found_nothing(&self) -> bool {
        let nothing = self.paths.is_empty() && self.map.is_none() && self.names.is_empty();
        nothing && self.notes.iter().all(|note| note == NO_NAME_NOTE)
    }

    /// Adds the receipt for another source of the same volume. Both are concluded
    /// already.
    pub(in crate::engine) fn append(&mut self, next: Self) {
        let known = std::mem::take(&mut self.names);
        let new = next.names.into_iter().filter(|name| !known.contains(name));
        self.names = known.iter().cloned().chain(new).collect();
        if let (Some(_), Some(map)) = (&self.map, &next.map) {
            let state = if map.gone {
                "is gone"
            } else {
                "is still there"
            };
            self.notes.push(format!("the map {} {state}", map.name));
        }
        self.map = self.map.take().or(next.map);
        self.paths.extend(next.paths);
        NotLookedAt::merge(&mut self.not_looked_at, &next.not_looked_at);
        self.notes.extend(next.notes);
        self.safe_to_unmap &= next.safe_to_unmap;
    }

    /// Marks everything as gone, after a search that found nothing of the unit.
    pub(super) fn mark_all_gone(&mut self) {
        for path in &mut self.paths {
            path.gone = true;
        }
        if let Some(map) = &mut self.map {
            map.gone = true;
        }
    }

    /// Sets `safe_to_unmap` from the receipt and `doubts`, and adds each doubt to the notes.
    pub(in crate::engine) fn conclude(&mut self, mut doubts: Vec<String>) {
        if self.names.iter().all(Wwid::is_vendor_defined) {
            doubts.push(NO_NAME_NOTE.to_owned());
        }
        if let Some(map) = &self.map {
            if map.flush != Some(Flush::Done) {
                doubts.push(format!("the map {} was not flushed", map.name));
            }
            if !map.gone {
                doubts.push(format!("the map {} is still there", map.name));
            }
        }
        for path in &self.paths {
            let hctl = path.hctl;
            doubts.extend(path.doubt(self.cache_was_flushed));
            if !path.gone {
                doubts.push(format!("{hctl} is still there"));
            }
            if path.forgotten == Some(false) {
                doubts.push(format!("multipathd still knows {hctl}"));
            }
        }
        self.safe_to_unmap = doubts.is_empty();
        self.notes.extend(doubts);
    }
}

/// A detach that failed: the reason, and how far it came. It displays as its [`Error`]
/// and converts into it with `?`.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DetachFailure {
    /// What stopped the detach. Its [`retry`](Error::retry) says whether a repeated
    /// detach can help; a repeated detach is always safe.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub error: Error,
    /// What was done, and what is left.
    pub receipt: Box<Receipt>,
}

impl DetachFailure {
    /// Marks the receipt as incomplete: the detach did not look for more.
    pub(in crate::engine) fn new(error: Error, mut receipt: Receipt) -> Self {
        receipt.conclude(vec!["the detach is incomplete".to_owned()]);
        Self::after(error, Some(receipt))
    }

    /// The same failure, with the receipt of another source of the same volume that was
    /// detached before.
    pub(in crate::engine) fn after_part(self, done: Option<Receipt>) -> Self {
        let Some(mut receipt) = done.filter(|done| !done.found_nothing()) else {
            return self;
        };
        receipt.append(*self.receipt);
        Self::after(self.error, Some(receipt))
    }

    /// A failure after a completed detach, whose receipt is concluded; NBD has no
    /// receipt.
    pub(in crate::engine) fn after(error: Error, concluded: Option<Receipt>) -> Self {
        let receipt = Box::new(concluded.unwrap_or_default());
        Self { error, receipt }
    }
}

impl Failure for DetachFailure {
    fn kind(&self) -> ErrorKind {
        self.error.kind()
    }
}

impl From<Error> for DetachFailure {
    /// The receipt is empty: nothing was done before the failure, or the device is NBD.
    fn from(error: Error) -> Self {
        let receipt = Box::default();
        Self { error, receipt }
    }
}

impl From<DetachFailure> for Error {
    fn from(failure: DetachFailure) -> Self {
        failure.error
    }
}

impl Deref for DetachFailure {
    type Target = Error;

    fn deref(&self) -> &Error {
        &self.error
    }
}

impl fmt::Display for DetachFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)?;
        let remaining = self.receipt.paths.iter().filter(|path| !path.gone);
        let remaining: Vec<String> = remaining.map(|path| path.hctl.to_string()).collect();
        if self.receipt.paths.len() > remaining.len() && !remaining.is_empty() {
            write!(f, "; partly detached: {} remains", remaining.join(", "))?;
        }
        Ok(())
    }
}

impl std::error::Error for DetachFailure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

#[cfg(test)]
mod tests;
