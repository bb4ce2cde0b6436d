//! The condition of a volume, and the action of a recovery.

use std::path::PathBuf;

use crate::error::Error;
use crate::id::Wwid;

/// The condition in which a volume was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Condition {
    /// The volume is attached as the device that the attach returned, and answers.
    Complete,
    /// Its attach or its resize is unfinished, and a device of it is there.
    HalfAttached,
    /// Its detach is unfinished, and a device of it is there.
    HalfDetached,
    /// No device of it is there.
    Gone,
    /// Another unit answers at its place, or it is attached as another device than the
    /// attach returned.
    Changed,
    /// It does not answer: an NBD device whose server went away, or a SCSI unit without a
    /// working path.
    LinkDead,
}

/// The action that a recovery took for a volume.
#[derive(Debug, serde::Serialize)]
#[serde(tag = "action", content = "error", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Action {
    /// Nothing: no action was needed or requested.
    Nothing,
    /// The unfinished operation was completed.
    Finished,
    /// Its attach had left nothing, which was proven, and its record is as before the attach. Or
    /// its resize has ended without the requested size: its NBD device serves the size that it
    /// has, and the record has that size.
    Undone,
    /// The device has its server again, or the size that the kernel had lost.
    Healed,
    /// The action failed, and the volume is as the error says. A later recovery retries.
    Failed(Error),
}

/// A device that belongs to no volume of the journal.
#[derive(Debug, Clone, serde::Serialize)]
#[non_exhaustive]
pub struct Foreign {
    /// Its address, `scsi:2:0:0:1`, or its name, `nbd3`.
    pub device: String,
    /// Its node; `None` where it has none.
    pub node: Option<PathBuf>,
    /// The names that the kernel has read.
    pub names: Vec<Wwid>,
    /// The backend id of an NBD device.
    pub backend: Option<String>,
}
