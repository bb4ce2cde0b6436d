//! What a detach can prove: the answer to "may the array take the volume away?".

use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;

use crate::error::Error;
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
    /// What was done besides, and what is not proven, in words.
    pub notes: Vec<String>,
    /// All was flushed, and nothing of it is left on this machine: no map, no
    /// path, none known to multipathd. Each was read back.
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
    /// Another unit answers at the address now, so nothing may be written
    /// there; nobody had the disk open. The text says who answers.
    Replaced(String),
    /// It failed, and the caller had said to go on: what was not written is
    /// lost; the text is the failure.
    Abandoned(String),
    /// The device had no disk.
    NoDisk,
}

impl Receipt {
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
    pub(super) fn conclude(&mut self, mut doubts: Vec<String>) {
        if !self.names.iter().any(Wwid::is_registered) {
            doubts.push(
                "nobody could say a name that the unit alone can have, so other paths to it were \
                 not looked for"
                    .to_owned(),
            );
        }
        let mut through_map = false;
        if let Some(map) = &self.map {
            through_map = map.flush == Some(Flush::Done);
            if !through_map {
                doubts.push(format!("the map {} was not flushed", map.name));
            }
            if !map.gone {
                doubts.push(format!("the map {} stands", map.name));
            }
        }
        for path in &self.paths {
            let PathReceipt { hctl, flush, .. } = path;
            // What a map held went through the map.
            if !through_map && !matches!(flush, Some(Flush::Done | Flush::NoDisk)) {
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
    pub(super) fn new(error: Error, mut receipt: Receipt) -> Self {
        receipt.conclude(Vec::new());
        let receipt = Box::new(receipt);
        Self { error, receipt }
    }
}

impl From<Error> for DetachFailure {
    /// Nothing was done.
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
            write!(f, "; taken down in part: {} stands", stands.join(", "))?;
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
mod tests {
    use super::*;

    fn path(flush: Flush) -> PathReceipt {
        PathReceipt {
            hctl: "2:0:0:1".parse().unwrap(),
            node: None,
            devno: None,
            diskseq: None,
            flush: Some(flush),
            gone: true,
            forgotten: None,
        }
    }

    fn concluded(change: impl FnOnce(&mut Receipt)) -> bool {
        let mut receipt = Receipt {
            names: vec!["naa.5000c500a1b2c3d4".parse().unwrap()],
            paths: vec![path(Flush::Done), path(Flush::Done)],
            ..Receipt::default()
        };
        change(&mut receipt);
        receipt.conclude(Vec::new());
        assert_eq!(receipt.safe_to_unmap, receipt.notes.is_empty());
        receipt.safe_to_unmap
    }

    fn map(flush: Option<Flush>) -> MapReceipt {
        MapReceipt {
            name: "m".to_owned(),
            uuid: "mpath-m".to_owned(),
            node: PathBuf::from("/dev/dm-0"),
            told_to_fail: false,
            flush,
            gone: true,
        }
    }

    #[test]
    fn it_is_safe_to_unmap_only_when_all_was_flushed_and_all_is_gone() {
        assert!(concluded(|_| {}));
        assert!(!concluded(|receipt| receipt.names.clear()));
        let vendors = "t10.VENDOR_disk".parse().unwrap();
        assert!(!concluded(|receipt| receipt.names = vec![vendors]));
        assert!(!concluded(|receipt| receipt.paths[1].gone = false));
        assert!(!concluded(|receipt| receipt.paths[1].flush = None));
        let unreachable = || path(Flush::Unreachable("ENXIO".to_owned()));
        assert!(!concluded(|receipt| receipt.paths[1] = unreachable()));
        assert!(!concluded(
            |receipt| receipt.paths[0].forgotten = Some(false)
        ));
    }

    #[test]
    fn what_others_took_away_meanwhile_is_gone_and_was_not_flushed_by_us() {
        let taken = |flush| {
            concluded(|receipt| {
                receipt.paths[1].gone = false;
                receipt.paths[1].flush = flush;
                receipt.nothing_is_there();
            })
        };
        assert!(taken(Some(Flush::Done)));
        assert!(!taken(None));
    }

    #[test]
    fn what_went_through_a_map_was_flushed_though_a_path_was_dead() {
        let dead = || path(Flush::Unreachable("ENXIO".to_owned()));
        assert!(concluded(|receipt| {
            receipt.map = Some(map(Some(Flush::Done)));
            receipt.paths[1] = dead();
        }));
        assert!(!concluded(|receipt| {
            receipt.map = Some(map(None));
        }));
        assert!(!concluded(|receipt| {
            receipt.map = Some(map(Some(Flush::Done)));
            receipt.map.as_mut().unwrap().gone = false;
        }));
    }
}
