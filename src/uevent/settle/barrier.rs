//! A barrier: a marked event that udevd handles after all earlier events of its device.

use std::path::Path;
use std::time::Duration;

use crate::crash::crash_point;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::{Roots, sysfs, worker};
use crate::uevent::event::{Event, Origin};
use crate::uevent::mark;

/// How long udev may take for one event before we send another barrier. A udevd
/// that was killed while it handled the event starts anew without it.
const RESEND_AFTER: Duration = Duration::from_secs(10);

/// The barriers of one device: events that we request from the kernel
/// (`Documentation/ABI/testing/sysfs-uevent`, Linux 4.13).
pub(super) struct Barriers<'a> {
    roots: &'a Roots,
    dir: &'a Path,
    deadline: Deadline,
    /// All marks that prove it. A slow udevd may answer an earlier one.
    marks: Vec<String>,
    last: Last,
    pauses: Backoff,
    resend_due: Deadline,
    resend_pauses: Backoff,
}

/// The last barrier.
enum Last {
    None,
    /// When to consider the event lost: the kernel drops the events of a disk while
    /// it still reads the disk's partitions.
    Requested(Deadline),
    /// The kernel has sent the event, and only udev's answer is missing.
    Echoed,
}

impl<'a> Barriers<'a> {
    pub(super) fn new(roots: &'a Roots, dir: &'a Path, deadline: Deadline) -> Self {
        let mut resend_pauses = Backoff::new(RESEND_AFTER, 8 * RESEND_AFTER);
        Self {
            roots,
            dir,
            deadline,
            marks: Vec::new(),
            last: Last::None,
            pauses: Backoff::new(Duration::from_millis(20), Duration::from_secs(1)),
            resend_due: Deadline::after(resend_pauses.pause()),
            resend_pauses,
        }
    }

    /// Sends a barrier where events were `missed`, where the last one is lost or udev takes
    /// long to answer it, and at first where no other event will do.
    pub(super) fn send_if_due(&mut self, missed: bool, another_event_will_do: bool) -> Result<()> {
        let mut is_due = match self.last {
            Last::None => !another_event_will_do,
            Last::Requested(due) => due.has_passed(),
            Last::Echoed => false,
        };
        if self.resend_due.has_passed() {
            is_due = true;
            self.resend_due = Deadline::after(self.resend_pauses.pause());
        }
        if missed {
            // The marks lie before the missed events.
            self.marks.clear();
        }
        if is_due || missed {
            self.send()?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let uuid = mark::new()?;
        let (attribute, text) = (self.dir.join("uevent"), format!("change {uuid}"));
        let devices = self.roots.devices.clone();
        tracing::debug!(%uuid, dir = %self.dir.display(), "barrier");
        crash_point!(BarrierToSend);
        worker::run(
            Stage::Settle,
            "the kernel to send a marked event",
            self.deadline,
            || "not returned".to_owned(),
            move || sysfs::write(&devices, &attribute, &text),
        )
        .map_err(|error| match error.kind() {
            ErrorKind::Vanished => gone(self.dir).caused_by(error),
            _ => error,
        })?;
        crash_point!(BarrierSent);
        self.marks.push(uuid);
        self.last = Last::Requested(Deadline::after(self.pauses.pause()));
        Ok(())
    }

    pub(super) fn are_answered(&mut self, event: &Event, by: Origin) -> bool {
        let mark = event.synth_uuid.as_ref();
        let marked = mark.is_some_and(|mark| self.marks.contains(mark));
        if marked {
            self.last = Last::Echoed;
        }
        marked && event.origin == by
    }

    /// How long to wait now: first for the kernel's event, then for udev's.
    pub(super) fn wait_limit(&self) -> Deadline {
        let limit = match self.last {
            Last::Requested(due) if due.remaining() <= self.deadline.remaining() => due,
            _ => self.deadline,
        };
        limit.at_most(self.resend_due.remaining())
    }
}

/// The error for a device that went away before it had settled.
pub(super) fn gone(dir: &Path) -> Error {
    Error::new(ErrorKind::Vanished, "the device went away")
        .with_path(dir)
        .at(Stage::Settle)
}
