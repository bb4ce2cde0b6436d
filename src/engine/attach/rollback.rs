//! The rollback of a failed attach.

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::remove_device::remove_device;
use crate::engine::detach::remove_map::remove_pathless_map;
use crate::engine::usage::{Extent, Removal, Usage, Users, users_of};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::{Daemon, Map};
use crate::scsi::ScsiDevice;
use crate::uevent::Watch;

/// Removes the device and returns `error`; where the removal fails too, the error says
/// so.
pub(in crate::engine) fn device(
    engine: &Engine,
    error: Error,
    device: &ScsiDevice,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Error {
    tracing::info!(%error, "rolling back: removing the device");
    match remove(engine, device, watch, call) {
        Ok(()) => error,
        Err(failure) => {
            let state = format!(
                "the rollback could not remove the device {}: {failure}",
                device.hctl()
            );
            error.with_last_seen(state)
        }
    }
}

/// Removes the device. multipathd takes a new path into a map at once, so each turn tells
/// it to drop the path. A map without a path is removed too.
fn remove(
    engine: &Engine,
    device: &ScsiDevice,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Result<()> {
    let deadline = call.deadline;
    let daemon = Daemon::find(engine.roots())?;
    let mut pauses = Backoff::for_other_process();
    let mut above = None;
    let mut was_unseen = false;
    loop {
        let disk = device.disk()?;
        let map = disk.as_ref().map(Map::of_path).transpose()?.flatten();
        above = map.or(above);
        if let (Some(daemon), Some(disk)) = (&daemon, &disk)
            // A daemon that hangs gets half of the time; the kernel removes the path
            // without it.
            && let Err(error) = daemon.delete_path(disk.name(), deadline.half())
        {
            tracing::debug!(%error, disk = disk.name(), "multipathd does not drop the path");
        }
        let Err(error) = remove_device(engine, device, watch, call) else {
            break;
        };
        let is_temporary = !deadline.has_passed()
            && match error.kind() {
                ErrorKind::InUse => {
                    may_be_released(engine, disk.as_ref(), &mut was_unseen, deadline)?
                        && daemon.is_some()
                }
                // Another process removes the device: the next turn waits for that, or finds
                // it gone. A failed flush is never retried: the kernel has dropped the dirty
                // pages.
                ErrorKind::Vanished => error.stage() != Some(Stage::Flush),
                _ => false,
            };
        if !is_temporary {
            return Err(error);
        }
        watch.next(deadline.at_most(pauses.pause()));
    }
    match above {
        Some(map) => {
            remove_pathless_map(engine, &map, daemon.as_ref(), deadline).map_err(|error| {
                let message = format!("its map {} remains without paths", map.name());
                Error::new(error.kind(), message).caused_by(error)
            })
        }
        None => Ok(()),
    }
}

/// Whether the users of a device that is in use may release it by themselves. They may have
/// released it already, so the first turn without a visible user counts as a release. `was_unseen`
/// says that there was such a turn.
fn may_be_released(
    engine: &Engine,
    disk: Option<&BlockDevice>,
    was_unseen: &mut bool,
    deadline: Deadline,
) -> Result<bool> {
    let map = disk.map(Map::of_path).transpose()?.flatten();
    let users = match disk {
        Some(disk) => users_of(engine, disk, Extent::All, deadline)?,
        None => Users::default(),
    };
    Ok(
        match users.usage_for(engine.roots(), Removal::FlushedDisk) {
            _ if map.is_some() => true,
            Usage::Busy(_) => false,
            Usage::Transient if users.has_stacked() => true,
            _ => !std::mem::replace(was_unseen, true),
        },
    )
}
