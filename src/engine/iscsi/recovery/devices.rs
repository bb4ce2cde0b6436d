//! The devices of a recovered session that the kernel set offline, or whose size it lost,
//! during the loss.

use std::fmt;

use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::engine::iscsi::recovery::options::ATTEMPT_LIMIT;
use crate::engine::iscsi::recovery::spawn::spawn;
use crate::error::Result;
use crate::iscsi::IscsiSession;
use crate::kernel::Roots;
use crate::scsi::{self, CallScheduler, ScsiDevice, State};

/// Sets offline devices to running, and makes the kernel read the size again of disks that
/// it takes for empty.
///
/// The kernel may set a device offline after a command that could not be sent for too
/// long, and does not undo that (`scsi_eh_offline_sdevs`; it happens where the command's
/// own timeout ends before the recovery timeout). A device that was only
/// `transport-offline` runs again by itself. This overrules no other program: the kernel
/// itself has set devices to running that were offline before the loss. A rescan during
/// the loss leaves a disk without a size.
pub(super) fn make_devices_usable(
    roots: &Roots,
    scheduler: &CallScheduler,
    session: &IscsiSession,
    deadline: Deadline,
) {
    let run = |device: &ScsiDevice| -> Result<()> {
        crash_point!(DeviceToRun);
        scsi::set_running(device, scheduler, deadline)?;
        crash_point!(DeviceRuns);
        tracing::info!(hctl = %device.hctl(), "runs again");
        Ok(())
    };
    let id = session.id();
    let devices = unusable(roots, session).unwrap_or_else(|error| {
        tracing::warn!(session = %id, %error, "cannot check its devices");
        Vec::new()
    });
    for (device, fault) in devices {
        let hctl = device.hctl();
        let ran = match fault {
            DeviceFault::Offline => run(&device),
            DeviceFault::NoSize => Ok(()),
        };
        // A device that fails does not hold up the others.
        match ran.and_then(|()| scsi::reread_size(&device, scheduler, deadline)) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(session = %id, %hctl, "the unit reports no size"),
            Err(error) => {
                tracing::warn!(session = %id, %hctl, %error, "a device is still {fault}");
            }
        }
    }
}

/// Does the same for a session that is logged in, on a thread of its own. The process that
/// recovered the session may have been killed before it came to the devices, and a rescan
/// may have failed after that process looked at them.
pub(super) fn make_devices_usable_in_background(
    roots: &Roots,
    scheduler: &CallScheduler,
    session: &IscsiSession,
) -> Result<()> {
    if unusable(roots, session).is_ok_and(|devices| devices.is_empty()) {
        return Ok(());
    }
    let (roots, scheduler, session) = (roots.clone(), scheduler.clone(), session.clone());
    spawn(move || make_devices_usable(&roots, &scheduler, &session, Deadline::after(ATTEMPT_LIMIT)))
}

/// Why a device serves no I/O though its session is logged in.
#[derive(Clone, Copy)]
enum DeviceFault {
    Offline,
    NoSize,
}

impl fmt::Display for DeviceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Offline => "offline",
            Self::NoSize => "without a size",
        })
    }
}

fn unusable(roots: &Roots, session: &IscsiSession) -> Result<Vec<(ScsiDevice, DeviceFault)>> {
    let mut found = Vec::new();
    for hctl in session.devices()? {
        let Some(device) = ScsiDevice::find(roots, hctl)? else {
            continue;
        };
        if device.state()? == Some(State::Offline) {
            found.push((device, DeviceFault::Offline));
        } else if scsi::shows_no_size(&device)? {
            found.push((device, DeviceFault::NoSize));
        }
    }
    Ok(found)
}
