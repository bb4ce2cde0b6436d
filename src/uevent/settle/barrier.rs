//! A barrier: a marked event that udevd handles after all earlier events of its device.

use std::path::Path;
use std::time::Duration;

use crate::crash::point;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::{Roots, sysfs, worker};
use crate::uevent::event::{Event, Origin};
use crate::uevent::mark;

/// An event that we request from the kernel
/// (`Documentation/ABI/testing/sysfs-uevent`, Linux 4.13).
pub(super) struct Barrier {
    /// All marks that prove it. A slow udevd may answer an earlier one.
    marks: Vec<String>,
    /// The kernel has sent the event, and only udev's answer is missing.
    echoed: bool,
    /// When to consider the event lost: the kernel drops the events of a disk while
    /// it still reads the disk's partitions.
    echo_due: Deadline,
    pauses: Backoff,
}

impl Barrier {
    pub(super) fn send(
        earlier: Option<Self>,
        roots: &Roots,
        dir: &Path,
        deadline: Deadline,
    ) -> Result<Self> {
        let uuid = mark::new()?;
        let (attribute, text) = (dir.join("uevent"), format!("change {uuid}"));
        let devices = roots.devices.clone();
        tracing::debug!(%uuid, dir = %dir.display(), "barrier");
        point!(BarrierToSend);
        worker::run(
            Stage::Settle,
            "the kernel to send a marked event",
            deadline,
            || "not returned".to_owned(),
            move || sysfs::write(&devices, &attribute, &text),
        )
        .map_err(|error| match error.kind() {
            ErrorKind::Vanished => gone(dir).caused_by(error),
            _ => error,
        })?;
        point!(BarrierSent);
        let (mut marks, mut pauses) = earlier.map_or_else(
            || {
                let pauses = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
                (Vec::new(), pauses)
            },
            |earlier| (earlier.marks, earlier.pauses),
        );
        marks.push(uuid);
        Ok(Self {
            marks,
            echoed: false,
            echo_due: Deadline::after(pauses.pause()),
            pauses,
        })
    }

    /// Forgets the marks, which lie before the missed events.
    pub(super) fn forget_marks(&mut self) {
        self.marks.clear();
    }

    pub(super) fn is_answered(&mut self, event: &Event, by: Origin) -> bool {
        let mark = event.synth_uuid.as_ref();
        let marked = mark.is_some_and(|mark| self.marks.contains(mark));
        self.echoed |= marked;
        marked && event.origin == by
    }

    pub(super) fn is_lost(&self) -> bool {
        !self.echoed && self.echo_due.has_passed()
    }

    /// How long to wait now: first for the kernel's event, then for udev's.
    pub(super) fn wait_limit(&self, deadline: Deadline) -> Deadline {
        if self.echoed || deadline.remaining() < self.echo_due.remaining() {
            deadline
        } else {
            self.echo_due
        }
    }
}

/// The error for a device that went away before it had settled.
pub(super) fn gone(dir: &Path) -> Error {
    Error::new(ErrorKind::Vanished, "the device went away")
        .with_path(dir)
        .at(Stage::Settle)
}
