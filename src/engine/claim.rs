//! The proof that nobody uses a disk, and that nobody begins to.

use std::fs::File;

use super::in_use;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, worker};
use crate::uevent::{self, Mode, Watch};

/// What became of a claim.
pub(super) enum Claim {
    /// The disk is ours alone until the file is closed.
    Held(File),
    /// The device serves no opens any more (offline, path lost), and nobody
    /// mounts, stacks on, swaps on or has it open: there is nothing to flush.
    Unreachable(Error),
}

/// Claims the disk exclusively.
///
/// A claim that is refused while nobody is to be seen may be udevd's, which
/// rereads a partition table: then udev is waited for and the claim tried once
/// more.
///
/// # Errors
/// `InUse`, naming by whom; `TimedOut` at stage `claim` or `settle`;
/// `NotPermitted`.
pub(super) fn claim(
    disk: &BlockDevice,
    roots: &Roots,
    mode: Mode,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<Claim> {
    let refused = match try_claim(disk, roots, deadline) {
        Ok(file) => return Ok(Claim::Held(file)),
        Err(error) => error,
    };
    match refused.kind() {
        ErrorKind::InUse => {
            let holders = in_use::find_holders(roots, disk)?;
            if !holders.is_empty() || mode != Mode::Udev {
                return Err(in_use::refuse(disk, &holders).caused_by(refused));
            }
        }
        // The kernel's own refusal (ENXIO, ENODEV), not a node that is another's.
        ErrorKind::Vanished if refused.errno().is_some() => {
            let mut holders = in_use::find_holders(roots, disk)?;
            holders.extend(in_use::find_openers(roots, disk)?);
            if holders.is_empty() {
                return Ok(Claim::Unreachable(refused));
            }
            return Err(in_use::refuse(disk, &holders).caused_by(refused));
        }
        _ => return Err(refused),
    }
    uevent::settle_again(watch, mode, roots, disk.dir(), deadline)?;
    match try_claim(disk, roots, deadline) {
        Ok(file) => Ok(Claim::Held(file)),
        Err(error) if error.kind() == ErrorKind::InUse => {
            let mut holders = in_use::find_holders(roots, disk)?;
            holders.extend(in_use::find_openers(roots, disk)?);
            Err(in_use::refuse(disk, &holders).caused_by(error))
        }
        Err(error) => Err(error),
    }
}

fn try_claim(disk: &BlockDevice, roots: &Roots, deadline: Deadline) -> Result<File> {
    let what = format!("the kernel to open {}", disk.name());
    let (disk, roots) = (disk.clone(), roots.clone());
    worker::run(
        Stage::Claim,
        &what,
        deadline,
        || "not returned".to_owned(),
        move || disk.open(&roots, true),
    )
}
