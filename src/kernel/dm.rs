//! Device-mapper: each call does one operation on one device, which its uuid
//! names. **Each may block** while I/O or another operation on the device runs:
//! call it on a worker.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

pub(crate) use lunbd_sys::dm::Target;
use lunbd_sys::dm::{self, Flags};

use super::{Roots, devices};
use crate::crash::crash_point;
use crate::error::{Error, ErrorKind, Result};
use crate::id::DevNo;

/// A device's state in device-mapper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DmStatus {
    pub(crate) devno: DevNo,
    /// How many times the device is open, mounts included.
    pub(crate) open_count: i32,
    pub(crate) read_only: bool,
}

/// The device's status from device-mapper.
///
/// # Errors
/// `Vanished` if no device has this uuid; `NotSupported` if the machine has no
/// device-mapper; `NotPermitted`. All functions here return these errors.
pub(crate) fn status(roots: &Roots, uuid: &str) -> Result<DmStatus> {
    let status = with_control(roots, uuid, "cannot examine", |control| {
        dm::status(control, uuid)
    })?;
    Ok(DmStatus {
        devno: devices::devno_of(status.dev),
        open_count: status.open_count,
        read_only: status.flags.contains(Flags::READ_ONLY),
    })
}

/// The targets with their parameters.
pub(crate) fn table(roots: &Roots, uuid: &str) -> Result<Vec<Target>> {
    with_control(roots, uuid, "cannot read the table of", |control| {
        dm::table_status(control, uuid, Flags::TABLE)
    })
}

/// The targets with their status.
pub(crate) fn table_status(roots: &Roots, uuid: &str) -> Result<Vec<Target>> {
    with_control(roots, uuid, "cannot read the status of", |control| {
        dm::table_status(control, uuid, Flags::empty())
    })
}

/// Sends a message to the target that holds sector 0.
///
/// # Errors
/// The target's answer, by its errno. `multipath` answers `EBUSY` while the
/// device is suspended.
pub(crate) fn send_message(roots: &Roots, uuid: &str, text: &str) -> Result<()> {
    crash_point!(DmToSend);
    with_control(roots, uuid, "cannot send a message to", |control| {
        dm::send_message(control, uuid, 0, text)
    })?;
    crash_point!(DmSent);
    Ok(())
}

/// Removes the device. It is gone from sysfs when this returns.
///
/// # Errors
/// `InUse` if it is open.
pub(crate) fn remove(roots: &Roots, uuid: &str) -> Result<()> {
    crash_point!(DmToRemove);
    with_control(roots, uuid, "cannot remove", |control| {
        dm::remove(control, uuid)
    })?;
    crash_point!(DmRemoved);
    Ok(())
}

/// Loads a table into the inactive slot, beside the table in use.
///
/// # Errors
/// `Refused` if a target does not take its parameters, or a device below is too
/// small. The kernel's log says which.
pub(crate) fn load(roots: &Roots, uuid: &str, read_only: bool, table: &[Target]) -> Result<()> {
    let mut flags = Flags::empty();
    flags.set(Flags::READ_ONLY, read_only);
    crash_point!(DmToLoad);
    with_control(roots, uuid, "cannot load a table into", |control| {
        dm::load(control, uuid, flags, table)
    })?;
    crash_point!(DmLoaded);
    Ok(())
}

/// Replaces the table in use with the loaded one. The kernel holds I/O back
/// meanwhile, in one ioctl, so this process cannot die and leave the device
/// suspended. The kernel keeps I/O that is queued for want of a path and does
/// not wait for it. It freezes no filesystem.
pub(crate) fn swap_table(roots: &Roots, uuid: &str) -> Result<()> {
    crash_point!(DmToSwap);
    with_control(roots, uuid, "cannot put a table in place in", |control| {
        dm::resume(control, uuid, Flags::NO_FLUSH | Flags::SKIP_LOCKFS)
    })?;
    crash_point!(DmSwapped);
    Ok(())
}

fn with_control<T>(
    roots: &Roots,
    uuid: &str,
    action: &str,
    call: impl FnOnce(&File) -> nix::Result<T>,
) -> Result<T> {
    let path = control_path(roots);
    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|error| explain_open(Error::io("cannot open", &path, &error), &path))?;
    call(&control).map_err(|errno| Error::io(&format!("{action} {uuid}"), &path, &errno.into()))
}

fn control_path(roots: &Roots) -> PathBuf {
    roots.dev.join("mapper/control")
}

fn explain_open(error: Error, path: &Path) -> Error {
    if error.kind() != ErrorKind::Vanished {
        return error;
    }
    let message = "this machine has no device-mapper: the module dm_mod is not loaded, or this /dev is not the machine's";
    Error::new(ErrorKind::NotSupported, message)
        .with_path(path)
        .caused_by(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_without_device_mapper_is_not_supported_and_names_the_control_file() {
        let error = remove(&Roots::below("/no-such-machine"), "mpath-x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
        let message = error.to_string();
        assert!(message.contains("no device-mapper"), "{message}");
        assert!(message.contains("dev/mapper/control"), "{message}");
    }
}
