//! Proves that udev is done with a device.
//!
//! A database record or a link is no proof: both may be left from an earlier device. The
//! proof is udev's own event for the device, with a number not below that of the kernel's
//! event. If the waiter missed that event, or its watch began later, the proof is a
//! barrier: an event that we request from the kernel, marked with a UUID. udevd handles it
//! after all earlier events of the same device.

mod barrier;

use std::path::Path;
use std::sync::Arc;

use super::event::Notice;
use super::event::{Event, Origin};
use super::mode::Mode;
use super::watch::Watch;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::{Roots, sysfs};
use barrier::{Barriers, gone};

/// How lunbd proved that a device had settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Settled {
    /// udev's own event for the kernel's event.
    UdevEvent,
    /// udev's answer to a barrier.
    Barrier,
    /// No event of udev reaches this process, so nothing waits for links. Only the kernel's event,
    /// or sysfs alone, has shown the device.
    KernelOnly,
}

impl Settled {
    /// The name used in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A settled device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SettledDevice {
    pub(crate) how: Settled,
    /// The links that udev made to it.
    pub(crate) links: Vec<String>,
}

impl SettledDevice {
    fn of(how: Settled, event: &Arc<Event>) -> Self {
        tracing::debug!(how = how.as_str(), seqnum = event.seqnum, "settled");
        let links = event.links.clone();
        Self { how, links }
    }

    fn without_udev() -> Self {
        let (how, links) = (Settled::KernelOnly, Vec::new());
        Self { how, links }
    }
}

/// Waits until udev is done with the device whose sysfs directory is `dir`. Without
/// udev, it waits until the kernel has announced the device.
///
/// # Errors
/// `TimedOut` at stage `settle`: the device exists and udev has not answered for
/// it. `Vanished` if the device went away.
pub(crate) fn settle(
    watch: &mut Watch,
    mode: Mode,
    roots: &Roots,
    dir: &Path,
    deadline: Deadline,
) -> Result<SettledDevice> {
    let by = match mode {
        Mode::Udev => Origin::Udev,
        Mode::KernelOnly => Origin::Kernel,
        Mode::SysfsPoll => return Ok(SettledDevice::without_udev()),
    };
    let devpath = devpath(roots, dir)?;
    watch.drain();
    let needed = watch
        .seen_events()
        .of(&devpath)
        .map_or(0, |seen| seen.kernel);
    let mut barriers = Barriers::new(roots, dir, deadline);
    // Without a seen event, or after a missed one, only a barrier proves it.
    let mut by_event = needed != 0;
    loop {
        let missed = watch.take_missed();
        by_event &= !missed;
        barriers.send_if_due(missed, by_event)?;
        if by_event && let Some(settled) = settled_by_event(watch, &devpath, by, needed) {
            return Ok(settled);
        }
        match watch.next(barriers.wait_limit()) {
            Some(Notice::Event(event)) if event.devpath == devpath => {
                // udev's event for the removal of the previous device may come
                // late.
                let seen = watch.seen_events().of(&devpath);
                if event.action == "remove" && seen.is_some_and(|seen| seen.gone) {
                    return Err(gone(dir));
                }
                if barriers.are_answered(&event, by) {
                    return Ok(match by {
                        Origin::Udev => SettledDevice::of(Settled::Barrier, &event),
                        Origin::Kernel => SettledDevice::without_udev(),
                    });
                }
            }
            None if deadline.has_passed() => {
                let what = format!("udev to be done with {devpath}");
                let error = Error::timed_out(Stage::Settle, deadline, &what);
                return Err(error.with_last_seen(last_seen(watch, &devpath)));
            }
            Some(_) | None => {}
        }
    }
}

/// The settled device, if an event that the watch has seen proves it.
fn settled_by_event(
    watch: &Watch,
    devpath: &str,
    by: Origin,
    needed: u64,
) -> Option<SettledDevice> {
    if by == Origin::Kernel {
        return Some(SettledDevice::without_udev());
    }
    let event = watch.seen_events().of(devpath)?.udev.as_ref()?;
    (event.seqnum >= needed).then(|| SettledDevice::of(Settled::UdevEvent, event))
}

/// Like [`settle`], always by a barrier: for what udev may be doing with the device
/// now.
pub(crate) fn settle_again(
    watch: &mut Watch,
    mode: Mode,
    roots: &Roots,
    dir: &Path,
    deadline: Deadline,
) -> Result<SettledDevice> {
    watch.require_barrier();
    settle(watch, mode, roots, dir, deadline)
}

/// The path of a sysfs directory in uevents.
pub(crate) fn devpath(roots: &Roots, dir: &Path) -> Result<String> {
    let mut below = dir.strip_prefix(&roots.sysfs).ok();
    if below.is_none() {
        // `roots.sysfs` may be a link.
        let sysfs = sysfs::resolve(&roots.sysfs)?;
        below = sysfs.and_then(|sysfs| dir.strip_prefix(sysfs).ok());
    }
    let below = below.and_then(Path::to_str);
    below
        .map(|below| format!("/{below}"))
        .ok_or_else(|| Error::new(ErrorKind::Io, "a device that is not below sysfs").with_path(dir))
}

pub(super) fn last_seen(watch: &Watch, devpath: &str) -> String {
    let seen = watch.seen_events().of(devpath);
    let kernel = match seen.map_or(0, |seen| seen.kernel) {
        0 => "no event of the kernel".to_owned(),
        seqnum => format!("the kernel's event {seqnum}"),
    };
    match seen.and_then(|seen| seen.udev.as_ref()) {
        Some(event) => format!("{kernel}, and udev's event {}", event.seqnum),
        None => format!(
            "{kernel}, and none of udev for this device (is udevd running and not stopped?)"
        ),
    }
}

#[cfg(test)]
mod tests;
