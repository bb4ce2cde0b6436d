//! Devices of a session that the kernel has given up while it was lost.

use super::attempt::ONE_TRY;
use super::spawn;
use crate::crash::point;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::iscsi::IscsiSession;
use crate::kernel::Roots;
use crate::scsi::{self, CallScheduler, ScsiDevice, State};

/// Has those run again that are offline.
///
/// A command that could not be sent for too long may have had the kernel give its
/// device up, and then nobody but us takes that back (`scsi_eh_offline_sdevs`; it is
/// given up where the command's own end comes before that of the recovery timeout);
/// devices whose transport alone was given up run already. Nobody else's will is
/// overruled: what was offline before, the kernel itself has run again.
pub(super) fn set_offline_running(
    roots: &Roots,
    scheduler: &CallScheduler,
    session: &IscsiSession,
    deadline: Deadline,
) {
    let bring = |device: ScsiDevice| -> Result<()> {
        point!(DeviceToRun);
        scsi::set_running(&device, scheduler, deadline)?;
        point!(DeviceRuns);
        tracing::info!(hctl = %device.hctl(), "runs again");
        Ok(())
    };
    let id = session.id();
    let devices = offline(roots, session).unwrap_or_else(|error| {
        tracing::warn!(session = %id, %error, "its devices are not looked at");
        Vec::new()
    });
    for device in devices {
        let hctl = device.hctl();
        // One that cannot be does not hold up the others.
        if let Err(error) = bring(device) {
            tracing::warn!(session = %id, %hctl, %error, "a device is left offline");
        }
    }
}

/// The same of one that stands already, on a thread of its own: who has had it back
/// may have been killed before it came to the devices.
pub(super) fn set_running_in_background(
    roots: &Roots,
    scheduler: &CallScheduler,
    session: &IscsiSession,
) -> Result<()> {
    if offline(roots, session).is_ok_and(|devices| devices.is_empty()) {
        return Ok(());
    }
    let (roots, scheduler, session) = (roots.clone(), scheduler.clone(), session.clone());
    spawn(move || set_offline_running(&roots, &scheduler, &session, Deadline::after(ONE_TRY)))
}

fn offline(roots: &Roots, session: &IscsiSession) -> Result<Vec<ScsiDevice>> {
    let mut found = Vec::new();
    for hctl in session.devices()? {
        if let Some(device) = ScsiDevice::find(roots, hctl)?
            && device.state()? == Some(State::Offline)
        {
            found.push(device);
        }
    }
    Ok(found)
}
