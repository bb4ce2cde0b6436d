//! Scans one LUN, and nothing else.

use std::time::{Duration, Instant};

use super::call_scheduler::CallScheduler;
use super::device::ScsiDevice;
use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Addressing, Hctl};
use crate::kernel::{Roots, sysfs};

/// Makes the host scan one LUN, and returns the device that it found.
///
/// The kernel's write also succeeds if there is no unit, so this looks for the device
/// afterwards: the scan itself puts it into sysfs before the write returns (`scsi_scan.c`,
/// `scsi_add_lun`). A scan does not examine an existing device again. The disk driver comes
/// later: see `probe`.
///
/// After a timeout the kernel may still scan, and the device may appear. The value of
/// `held` is dropped when the scan has ended, even if the process was killed meanwhile. A
/// file lock in it shows for how long a device may still appear.
///
/// # Errors
/// `NotFound` if the target does not present the LUN; `NotReady` if the kernel may have
/// timed out on the target's answer; `Refused` if the host cannot address it;
/// `NotSupported` if the kernel's interface cannot carry it; `NotPermitted`; `Quarantined`;
/// `TimedOut` at stage `queue`, without a scan, or at stage `scan`.
pub(crate) fn scan<H>(
    roots: &Roots,
    scheduler: &CallScheduler,
    hctl: Hctl,
    held: impl FnOnce() -> Result<H> + Send + 'static,
    deadline: Deadline,
) -> Result<ScsiDevice> {
    let Hctl {
        host,
        channel,
        target,
        lun,
    } = hctl;
    let Some(token) = lun.scan_token() else {
        let message =
            format!("LUN {lun} has over 16 digits, and the kernel's scan file takes no more");
        return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Scan));
    };
    let path = roots.sysfs.join(format!("class/scsi_host/host{host}/scan"));
    let line = format!("{channel} {target} {token}");
    tracing::debug!(%line, path = %path.display(), "scan");
    let (state, devices) = (path.with_file_name("state"), roots.devices.clone());
    crash_point!(ScanToWrite);
    let what = format!("host {host} to scan {hctl}");
    let slot = scheduler.on_host(hctl, Stage::Scan, &what, deadline)?;
    let seen = || {
        let state = sysfs::read_if_there(&state).ok().flatten();
        format!("host state={}", state.as_deref().unwrap_or("unreadable"))
    };
    let write = move || {
        let _until_it_has_ended = held()?;
        let begun = Instant::now();
        sysfs::write(&devices, &path, &line)?;
        Ok(begun.elapsed())
    };
    let took = slot.run(deadline, seen, write);
    let took = took.map_err(|error| explain(error, hctl))?;
    crash_point!(ScanWritten);
    ScsiDevice::find(roots, hctl)?.ok_or_else(|| {
        let timeout = inquiry_timeout(roots);
        if took < timeout {
            not_found(hctl)
        } else {
            not_answered(hctl, took, timeout)
        }
    })
}

/// How long the kernel waits for the answer to the INQUIRY of a scan (`scsi_scan.c`,
/// `scsi_inq_timeout`). After that time its scan ends as if there were no unit.
fn inquiry_timeout(roots: &Roots) -> Duration {
    const DEFAULT: u64 = 20;
    let parameter = roots.sysfs.join("module/scsi_mod/parameters/inq_timeout");
    Duration::from_secs(sysfs::parse(&parameter).unwrap_or(DEFAULT))
}

fn not_answered(hctl: Hctl, took: Duration, timeout: Duration) -> Error {
    let message = format!(
        "the host scanned {hctl} for {:.1} s and no device came: the kernel waits {} s for an \
         answer (scsi_mod.inq_timeout), so the target may have LUN {} and be too slow; see \
         whether it is overloaded, and try again",
        took.as_secs_f64(),
        timeout.as_secs(),
        hctl.lun
    );
    Error::new(ErrorKind::NotReady, message).at(Stage::Scan)
}

fn explain(error: Error, hctl: Hctl) -> Error {
    match error.kind() {
        ErrorKind::Refused => {
            let message = format!(
                "host {} cannot address {hctl}: its channel, target or LUN is beyond the host's limits",
                hctl.host
            );
            Error::new(ErrorKind::Refused, message)
                .at(Stage::Scan)
                .caused_by(error)
        }
        ErrorKind::Vanished => error.with_kind(ErrorKind::NoSuchHost),
        _ => error,
    }
}

fn not_found(hctl: Hctl) -> Error {
    let lun = hctl.lun;
    let mut message = format!(
        "the host scanned {hctl} and no device came: the target does not present LUN {lun} to this host"
    );
    // As peripheral addresses, 256 to 16383 name a bus behind the unit. Mostly the caller
    // means a flat address.
    if let Addressing::Peripheral { bus: 1.., .. } = lun.addressing() {
        let advice = format!(
            "; where the array counts it as {lun} in flat addressing, write the LUN as flat-{lun}"
        );
        message.push_str(&advice);
    }
    Error::new(ErrorKind::NotFound, message).at(Stage::Scan)
}
