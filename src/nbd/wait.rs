//! Waits until a device is free. The kernel sends no event for the last close of a node, and
//! the `change` of a disconnect comes before `pid` goes, so each wait also looks in pauses.

use super::device::{Hints, NbdDevice, State};
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::NbdIndex;
use crate::kernel::Roots;
use crate::uevent::Watch;

/// Waits until no process has the node of an unconnected device open.
///
/// # Errors
/// `refused`, the kernel's own refusal, as `InUse` when the deadline passes.
pub(crate) fn wait_until_closed(
    roots: &Roots,
    index: NbdIndex,
    watch: &mut Watch,
    deadline: Deadline,
    refused: Error,
) -> Result<()> {
    let mut pauses = Backoff::for_kernel_state();
    loop {
        // Pause first: /proc may not show the process that has it open.
        let turn = deadline.at_most(pauses.pause());
        while watch.next(turn).is_some() {}
        match NbdDevice::state(roots, index, &Hints::default(), deadline) {
            Ok(State::OpenedByOther | State::Draining) => {}
            // The look at the processes has not ended.
            Err(error) if error.kind().is_timeout_or_cancel() => {}
            state => return state.map(drop),
        }
        if deadline.has_passed() {
            return Err(refused.with_kind(ErrorKind::InUse));
        }
    }
}

/// Waits until a device that was told to disconnect is free: no `pid`, no size,
/// nothing in flight, no holder. The events `add` and `change` are not enough,
/// because the kernel sends them before it is done. A device that another thread than
/// `connected_by` has connected was free before that.
///
/// # Errors
/// `TimedOut` at stage `confirm`. The device was told to disconnect, and the
/// error names what is left.
pub(crate) fn wait_until_free(
    device: &NbdDevice,
    connected_by: Option<u32>,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<()> {
    let mut pauses = Backoff::for_kernel_state();
    loop {
        // A device that was created for one connection goes away with it.
        let facts = device.facts_if_present()?;
        let state = facts
            .as_ref()
            .map_or(State::Absent, |facts| facts.state(&Hints::default()));
        let now = facts.as_ref().and_then(|facts| facts.pid);
        let is_connected_anew = connected_by.zip(now).is_some_and(|(then, now)| then != now);
        // An opener of a free device concerns only the next connect.
        if is_connected_anew || matches!(state, State::Free | State::Absent | State::OpenedByOther)
        {
            return Ok(());
        }
        let turn = deadline.at_most(pauses.pause());
        if watch.next(turn).is_none() && deadline.has_passed() {
            let what = format!("nbd{} to be free", device.index());
            let error = Error::timed_out(Stage::Confirm, deadline, &what);
            let seen = facts.map_or_else(String::new, |facts| facts.to_string());
            return Err(error.with_last_seen(format!("disconnected, and {seen}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::id::DevNo;
    use crate::kernel::Devices;
    use crate::kernel::devices::tests::Named;
    use crate::nbd::device::Facts;
    use crate::nbd::refusal::{self, DeviceSnapshot};
    use crate::uevent::{Hub, HubOptions, Mode};

    #[test]
    fn a_device_that_another_client_connects_as_soon_as_it_is_free_was_free() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let dir = roots.sysfs.join("block/nbd3");
        fs::create_dir_all(dir.join("holders")).unwrap();
        let show = |attribute: &str, text: &str| fs::write(dir.join(attribute), text).unwrap();
        let connect = |pid, backend| {
            for (attribute, text) in [("size", "8\n"), ("backend", backend), ("pid", pid)] {
                show(attribute, text);
            }
        };
        show("dev", "43:3\n");
        show("inflight", "       0        0\n");
        connect("1\n", "ours\n");
        let index = NbdIndex::new(3).unwrap();
        let device = NbdDevice::find(&roots, index).unwrap().unwrap();
        let hub = Hub::start(&roots, &HubOptions::default().fed(Mode::Udev)).unwrap();
        let mut watch = hub.watch("nbd3");
        let mut wait = |connected_by, limit| {
            let deadline = Deadline::after(Duration::from_millis(limit));
            wait_until_free(&device, connected_by, &mut watch, deadline)
        };
        let error = wait(Some(1), 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        // The wait sees only that the device is connected again.
        connect("2\n", "another\n");
        wait(Some(1), 10_000).unwrap();
        let error = wait(None, 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }

    #[test]
    fn a_look_at_the_processes_that_does_not_end_leaves_the_refusal() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named("/dev/none", DevNo { major: 8, minor: 0 }))),
            ..Roots::below(root.path())
        };
        let dir = roots.sysfs.join("block/nbd3");
        fs::create_dir_all(&dir).unwrap();
        for (attribute, text) in [
            ("dev", "43:3\n"),
            ("size", "0\n"),
            ("inflight", "       0        0\n"),
        ] {
            fs::write(dir.join(attribute), text).unwrap();
        }
        let descriptors = roots.proc.join("7/fd");
        fs::create_dir_all(&descriptors).unwrap();
        symlink("/dev/null", descriptors.join("hangs")).unwrap();
        let index = NbdIndex::new(3).unwrap();
        let begun = Deadline::after(Duration::from_secs(1));
        let seen = refusal::read_facts_and_openers(&roots, Some(index), begun);
        assert_eq!(seen, DeviceSnapshot::There(index, Facts::default()));
        let hub = Hub::start(&roots, &HubOptions::default().fed(Mode::Udev)).unwrap();
        let mut watch = hub.watch("nbd3");
        let refused = Error::new(ErrorKind::Refused, "EBUSY").at(Stage::Connect);
        let soon = Deadline::after(Duration::from_secs(1));
        let error = wait_until_closed(&roots, index, &mut watch, soon, refused).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert_eq!(error.stage(), Some(Stage::Connect), "{error}");
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "a look has a limit of its own"
        );
    }
}
