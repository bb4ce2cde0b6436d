//! The devices of a recovered session that the kernel set offline, or whose size it lost,
//! during the loss.

use std::convert::Infallible;
use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};

use crate::crash::crash_point;
use crate::deadline::{Backoff, Deadline};
use crate::engine::iscsi::recovery::options::ATTEMPT_LIMIT;
use crate::engine::iscsi::recovery::spawn::spawn;
use crate::error::Result;
use crate::iscsi::{ConnectionStatus, IscsiSession};
use crate::kernel::{Roots, sysfs};
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
fn make_devices_usable(
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

/// Does the same while the session is logged in, and returns early if it is lost: the writes then
/// wait for I/O on the session, and so for its next login.
pub(super) fn make_devices_usable_unless_lost(
    roots: &Roots,
    scheduler: &CallScheduler,
    session: &IscsiSession,
    deadline: Deadline,
) {
    let (ends, ended) = mpsc::channel::<Infallible>();
    let begun = begin(roots, scheduler, session, deadline, ends);
    if let Err(error) = begun {
        tracing::warn!(session = %session.id(), %error, "its devices are checked on this thread");
        return make_devices_usable(roots, scheduler, session, deadline);
    }
    let mut pauses = Backoff::for_kernel_state();
    let is_lost = || {
        session
            .connection_status()
            .is_ok_and(|status| status.is_none_or(ConnectionStatus::is_lost))
    };
    while !deadline.has_passed() && !is_lost() {
        let pause = deadline.max_sleep().min(pauses.pause());
        if ended.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
            break;
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
    begin(
        roots,
        scheduler,
        session,
        Deadline::after(ATTEMPT_LIMIT),
        (),
    )
}

/// Starts the work on a thread if a device needs it. The work drops `at_end` when it ends.
fn begin(
    roots: &Roots,
    scheduler: &CallScheduler,
    session: &IscsiSession,
    deadline: Deadline,
    at_end: impl Send + 'static,
) -> Result<()> {
    if unusable(roots, session).is_ok_and(|devices| devices.is_empty()) {
        return Ok(());
    }
    let (roots, scheduler, session) = (roots.clone(), scheduler.clone(), session.clone());
    spawn(move || {
        make_devices_usable(&roots, &scheduler, &session, deadline);
        drop(at_end);
    })
}

/// Whether each disk of the session keeps its pages unchanged while they are written. A device
/// without a disk may get one, so it counts as one that does not.
pub(super) fn keep_pages_stable(roots: &Roots, session: &IscsiSession) -> Result<bool> {
    for hctl in session.devices()? {
        let Some(device) = ScsiDevice::find(roots, hctl)? else {
            continue;
        };
        let Some(disk) = device.disk()? else {
            return Ok(false);
        };
        let stable = sysfs::read_if_there(&disk.dir().join("queue/stable_writes"))?;
        if stable.as_deref() != Some("1") {
            return Ok(false);
        }
    }
    Ok(true)
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::time::Duration;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;
    use crate::engine::Engine;
    use crate::iscsi::{FakeSession, SessionName};

    fn name() -> SessionName {
        SessionName {
            initiator: "iqn.2026-01.example:host".parse().unwrap(),
            target: "iqn.2026-01.example:array".parse().unwrap(),
            portal: "127.0.0.1".parse().unwrap(),
        }
    }

    #[test]
    fn a_device_that_waits_for_a_session_that_is_lost_again_holds_up_no_login() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let engine = Engine::start(roots.clone()).unwrap();
        let session = FakeSession::add(&roots, 3, &name());
        // A write to this file waits, as one does for I/O on a blocked session.
        let rescan = session.add_unit(1).join("rescan");
        mkfifo(&rescan, Mode::S_IRWXU).unwrap();
        let deadline = Deadline::after(Duration::from_secs(60));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                deadline.pause(Duration::from_millis(200));
                session.lose();
            });
            let (scheduler, session) = (&engine.scheduler, &session.session);
            make_devices_usable_unless_lost(&roots, scheduler, session, deadline);
        });
        assert!(
            deadline.elapsed() < Duration::from_secs(20),
            "{:?}",
            deadline.elapsed()
        );
        let _ends_the_write = fs::File::options()
            .read(true)
            .write(true)
            .open(&rescan)
            .unwrap();
    }

    #[test]
    fn pages_are_stable_only_where_each_disk_of_the_session_says_so() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let session = FakeSession::add(&roots, 3, &name());
        let disks = [1, 2].map(|lun| session.add_unit(lun).join(format!("block/sd{lun}")));
        let set = |disk: &PathBuf, value| fs::write(disk.join("queue/stable_writes"), value);
        let is_stable = || keep_pages_stable(&roots, &session.session).unwrap();
        set(&disks[0], "1\n").unwrap();
        assert!(
            !is_stable(),
            "the kernel does not say it of the second disk"
        );
        set(&disks[1], "0\n").unwrap();
        assert!(!is_stable());
        set(&disks[1], "1\n").unwrap();
        assert!(is_stable());
        fs::remove_dir_all(&disks[1]).unwrap();
        assert!(!is_stable(), "the second unit may still get its disk");
    }
}
