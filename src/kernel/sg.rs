//! SCSI commands, sent to the device itself: sysfs shows only what the kernel cached at
//! the last scan.

mod capacity;
#[cfg(any(test, fuzzing, clippy))]
#[allow(unreachable_pub, reason = "it is public where it is fuzzed")]
pub mod fuzz;
mod inquiry;
mod port_groups;
mod presence;
mod report_luns;
mod sense;

use std::fs::File;
use std::time::Duration;

use lunbd_sys::sg::{self, Completion};
use memmap2::MmapMut;

pub(crate) use capacity::read_capacity;
pub(crate) use inquiry::{read_product, read_vpd};
pub(crate) use port_groups::{PortGroup, report_port_groups};
pub(crate) use presence::{Presence, ask_presence};
pub(crate) use report_luns::report_luns;
use sense::{
    CHECK_CONDITION, ILLEGAL_REQUEST, UNIT_ATTENTION, describe_sense, is_refused, sense_key,
};

use super::Devices;
use crate::error::{Error, ErrorKind, Result};

/// An open disk, and how to send it commands.
#[derive(Clone, Copy)]
pub(crate) struct Opened<'a> {
    pub(crate) devices: &'a Devices,
    pub(crate) file: &'a File,
}

/// One page of memory. No command here asks for a longer answer.
const LONGEST: u16 = 4096;

/// A buffer for an answer, aligned to a page so that the kernel can transfer to it
/// directly.
fn page() -> Result<MmapMut> {
    MmapMut::map_anon(usize::from(LONGEST))
        .map_err(|error| Error::new(ErrorKind::Io, format!("no memory for a page: {error}")))
}

/// Sends a command that reads and returns the answer; `None` if the device does not know
/// the command. **Blocks** for up to `timeout` per try and the kernel's error
/// recovery: call it on a worker. `name` is for errors.
///
/// # Errors
/// `Io` if the command failed, with the statuses in words; `NotReady` if the path to the
/// device is down; `NotFound` if the target refuses it with LOGICAL UNIT NOT SUPPORTED.
fn command<'a>(
    device: Opened<'_>,
    name: &str,
    cdb: &[u8],
    buffer: &'a mut [u8],
    timeout: Duration,
) -> Result<Option<&'a [u8]>> {
    let done = send(device, name, cdb, buffer, timeout)?;
    if is_refused(&done) {
        let message = format!("the target answers {name}: it has no unit at this LUN");
        return Err(Error::new(ErrorKind::NotFound, message));
    }
    match outcome(&done) {
        CommandOutcome::Good => Ok(buffer.get(..done.transferred)),
        CommandOutcome::Unsupported => Ok(None),
        CommandOutcome::UnitAttention | CommandOutcome::Failed => Err(failed(name, &done)),
    }
}

/// Sends a command that reads, and returns its completion. It repeats the command if the
/// device reported a unit attention. **Blocks** like [`command`].
///
/// # Errors
/// `Io` if the command could not be sent.
fn send(
    device: Opened<'_>,
    name: &str,
    cdb: &[u8],
    buffer: &mut [u8],
    timeout: Duration,
) -> Result<Completion> {
    // A device reports a unit attention once.
    let mut tries = 3;
    loop {
        let done = device.devices.scsi_read(device.file, cdb, buffer, timeout);
        let done = done
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot send {name}: {error}")))?;
        tries -= 1;
        if tries == 0 || !matches!(outcome(&done), CommandOutcome::UnitAttention) {
            return Ok(done);
        }
    }
}

enum CommandOutcome {
    Good,
    Unsupported,
    UnitAttention,
    Failed,
}

fn outcome(done: &Completion) -> CommandOutcome {
    if !done.info.contains(sg::Info::CHECK) {
        return CommandOutcome::Good;
    }
    if done.status != CHECK_CONDITION || done.host_status != 0 {
        return CommandOutcome::Failed;
    }
    match sense_key(&done.sense) {
        Some(ILLEGAL_REQUEST) => CommandOutcome::Unsupported,
        Some(UNIT_ATTENTION) => CommandOutcome::UnitAttention,
        _ => CommandOutcome::Failed,
    }
}

fn failed(name: &str, done: &Completion) -> Error {
    // include/scsi/scsi_status.h
    let (kind, host) = match done.host_status {
        0x00 => (ErrorKind::Io, "reached"),
        0x01 => (ErrorKind::NotReady, "no connection"),
        0x03 => (ErrorKind::NotReady, "timed out"),
        0x0e | 0x0f => (ErrorKind::NotReady, "path down"),
        _ => (ErrorKind::Io, "failed"),
    };
    let Completion {
        status,
        host_status,
        driver_status,
        ..
    } = done;
    Error::new(
        kind,
        format!(
            "{name} failed: device {host} \
             (status {status:#04x}, host {host_status:#04x}, driver {driver_status:#04x}, {})",
            describe_sense(&done.sense)
        ),
    )
}
