//! How a volume stands, and what a recovery did about it.

use std::path::PathBuf;

use crate::error::Error;
use crate::id::Wwid;

/// How a volume was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Condition {
    /// It is attached, as the device that was handed out, and it answers.
    Complete,
    /// Its attach, or its resize, was begun, and something of it stands.
    HalfAttached,
    /// Its detach was begun, and something of it stands.
    HalfDetached,
    /// Nothing of it stands.
    Gone,
    /// Something else stands: another unit answers at its place, or it is
    /// another device than the one that was handed out.
    Changed,
    /// It stands and does not answer: an NBD device whose server went away, a
    /// SCSI unit none of whose paths works.
    LinkDead,
}

/// What was done about a volume.
#[derive(Debug, serde::Serialize)]
#[serde(tag = "action", content = "error", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Action {
    /// Nothing: there was nothing to do, or nothing that was asked for.
    Nothing,
    /// What was begun came to its end.
    Finished,
    /// Its attach had left nothing, which was proven, and its record is gone.
    Undone,
    /// It has its server again, or the size that the kernel had lost.
    Healed,
    /// It was tried, and it stands as the error says. A later recovery tries
    /// again.
    Failed(Error),
}

/// A device that the journal does not know.
#[derive(Debug, Clone, serde::Serialize)]
#[non_exhaustive]
pub struct Foreign {
    /// Its address, `scsi:2:0:0:1`, or its name, `nbd3`.
    pub device: String,
    /// Its node; `None` where it has none.
    pub node: Option<PathBuf>,
    /// The names that the kernel has read of it.
    pub names: Vec<Wwid>,
    /// The backend id of an NBD device.
    pub backend: Option<String>,
}
