//! What a detach can prove: the answer to "may the array take the volume away?".

use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;

use crate::engine::telemetry::Failure;
use crate::engine::usage::NotLookedAt;
use crate::error::{Error, ErrorKind};
use crate::id::{DevNo, DiskSeq, Hctl, Wwid};

/// What was read back of a detach, step by step. A detach that failed has one
/// too: it says how far it came.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Receipt {
    /// The names of the unit by which its paths were looked for; none where
    /// nobody could say them.
    pub names: Vec<Wwid>,
    /// Its multipath map, where there was one.
    pub map: Option<MapReceipt>,
    /// Its SCSI paths, each in the order in which it was found; those that came
    /// in the middle are among them.
    pub paths: Vec<PathReceipt>,
    /// Where somebody may have it open who was not seen: what such a user writes after
    /// the flush is lost.
    pub not_looked_at: Vec<NotLookedAt>,
    /// What was done besides, and what is not proven, in words.
    pub notes: Vec<String>,
    /// All was flushed, and nothing of it is left on this machine: no map, no
    /// path, none known to multipathd. Each was read back. It says nothing of users in
    /// the places that were [not looked at](Self::not_looked_at).
    pub safe_to_unmap: bool,
}

/// What became of a multipath map.
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
    /// It queued with no path left and was told to fail its I/O instead.
    pub told_to_fail: bool,
    /// What became of its dirty pages; `None` where it did not come to that.
    pub flush: Option<Flush>,
    /// sysfs shows it no more.
    pub gone: bool,
}

/// What became of one path.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PathReceipt {
    /// Its address.
    pub hctl: Hctl,
    /// The disk's node; `None` where there was no disk.
    pub node: Option<PathBuf>,
    /// Its number.
    pub devno: Option<DevNo>,
    /// Its life's serial number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// What became of its dirty pages; `None` where it did not come to that.
    pub flush: Option<Flush>,
    /// sysfs shows it no more.
    pub gone: bool,
    /// multipathd has forgotten it; `None` where none runs, or where it was not
    /// asked yet.
    pub forgotten: Option<bool>,
    /// It was below the map when that was flushed and taken down.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) in_map: bool,
}

impl PathReceipt {
    fn was_flushed(&self) -> bool {
        match &self.flush {
            Some(Flush::Done | Flush::NoDisk | Flush::ThroughMap(_)) => true,
            // What it held went through the map.
            Some(Flush::Unreachable(_)) => self.in_map,
            _ => false,
        }
    }
}

/// What became of the dirty pages and of the device's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Flush {
    /// `fsync` and `BLKFLSBUF` both succeeded, under an exclusive claim.
    Done,
    /// The device served no opens any more and nobody had it open, so nothing
    /// was left to write; the text is the kernel's refusal.
    Unreachable(String),
    /// The path did not write back, and had nothing of its own to write: all
    /// went through the multipath map, whose flush was done before. The text is
    /// the path's failure.
    ThroughMap(String),
    /// All pages were written, and the path took no flush of the unit's cache in its ALUA
    /// access state. Enough where another path is `Done`: it flushed the cache, which is
    /// the unit's, after that. The text names the state, and the path's failure.
    PagesWritten(String),
    /// Another unit answers at the address now, so nothing may be written
    /// there; nobody had the disk open. The text says who answers.
    Replaced(String),
    /// It failed, and the caller had said to go on: what was not written is
    /// lost; the text is the failure.
    Abandoned(String),
    /// The device had no disk.
    NoDisk,
}

const NAMELESS: &str = "no path reported a name of the unit, so other paths were not searched \
                        for";

impl Receipt {
    /// Whether there was nothing, and no name by which to look for more.
    pub(super) fn found_nothing(&self) -> bool {
        let nothing = self.paths.is_empty() && self.map.is_none() && self.names.is_empty();
        nothing && self.notes.iter().all(|note| note == NAMELESS)
    }

    /// Takes in what was read back of another source of the same volume. Each has
    /// drawn its own conclusion.
    pub(in crate::engine) fn append(&mut self, next: Self) {
        let known = std::mem::take(&mut self.names);
        let new = next.names.into_iter().filter(|name| !known.contains(name));
        self.names = known.iter().cloned().chain(new).collect();
        if let (Some(_), Some(map)) = (&self.map, &next.map) {
            let stands = if map.gone { "is gone" } else { "stands" };
            self.notes.push(format!("the map {} {stands}", map.name));
        }
        self.map = self.map.take().or(next.map);
        self.paths.extend(next.paths);
        NotLookedAt::note(&mut self.not_looked_at, &next.not_looked_at);
        self.notes.extend(next.notes);
        self.safe_to_unmap &= next.safe_to_unmap;
    }

    /// Nothing of the unit was found any more: what others took away meanwhile is
    /// gone too.
    pub(super) fn nothing_is_there(&mut self) {
        for path in &mut self.paths {
            path.gone = true;
        }
        if let Some(map) = &mut self.map {
            map.gone = true;
        }
    }

    /// Draws the conclusion, from what it says itself and from `doubts`.
    pub(in crate::engine) fn conclude(&mut self, mut doubts: Vec<String>) {
        if self.names.iter().all(Wwid::is_made_up) {
            doubts.push(NAMELESS.to_owned());
        }
        if let Some(map) = &self.map {
            if map.flush != Some(Flush::Done) {
                doubts.push(format!("the map {} was not flushed", map.name));
            }
            if !map.gone {
                doubts.push(format!("the map {} stands", map.name));
            }
        }
        let paths = self.paths.iter();
        let cache_was_flushed = paths.clone().any(|path| path.flush == Some(Flush::Done));
        for path in paths {
            let hctl = path.hctl;
            let pages_written = matches!(path.flush, Some(Flush::PagesWritten(_)));
            if !(path.was_flushed() || pages_written && cache_was_flushed) {
                doubts.push(format!("{hctl} was not flushed"));
            }
            if !path.gone {
                doubts.push(format!("{hctl} stands"));
            }
            if path.forgotten == Some(false) {
                doubts.push(format!("multipathd still knows {hctl}"));
            }
        }
        self.safe_to_unmap = doubts.is_empty();
        self.notes.extend(doubts);
    }
}

/// A detach that did not come to its end: why, and how far it came. It reads
/// as its [`Error`] and turns into it with `?`.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DetachFailure {
    /// What stopped it. Whether a repeated detach can help is its
    /// [`retry`](Error::retry); to repeat it is always safe.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub error: Error,
    /// What was done, and what stands.
    pub receipt: Box<Receipt>,
}

impl DetachFailure {
    /// What it says of itself is not all: it was not looked whether more is there.
    pub(in crate::engine) fn new(error: Error, mut receipt: Receipt) -> Self {
        receipt.conclude(vec!["the detach is incomplete".to_owned()]);
        Self::after(error, Some(receipt))
    }

    /// The same failure, after the detach of another source of the same volume.
    pub(in crate::engine) fn after_part(self, done: Option<Receipt>) -> Self {
        let Some(mut receipt) = done.filter(|done| !done.found_nothing()) else {
            return self;
        };
        receipt.append(*self.receipt);
        Self::after(self.error, Some(receipt))
    }

    /// What failed after a detach had come to its end, which has drawn its conclusion;
    /// NBD has no receipt.
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
    /// With an empty receipt: of what fails before anything is done, and of NBD.
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
        let stands = self.receipt.paths.iter().filter(|path| !path.gone);
        let stands: Vec<String> = stands.map(|path| path.hctl.to_string()).collect();
        if self.receipt.paths.len() > stands.len() && !stands.is_empty() {
            write!(f, "; partly detached: {} remains", stands.join(", "))?;
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
