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
        let state = NbdDevice::state(roots, index, &Hints::default())?;
        if !matches!(state, State::OpenedByOther | State::Draining) {
            return Ok(());
        }
        if deadline.has_passed() {
            return Err(refused.with_kind(ErrorKind::InUse));
        }
    }
}

/// Waits until a device that was told to disconnect is free: no `pid`, no size,
/// nothing in flight, no holder. The events `add` and `change` are not enough,
/// because the kernel sends them before it is done.
///
/// # Errors
/// `TimedOut` at stage `confirm`. The device was told to disconnect, and the
/// error names what is left.
pub(crate) fn wait_until_free(
    roots: &Roots,
    index: NbdIndex,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<()> {
    let mut pauses = Backoff::for_kernel_state();
    loop {
        let device = NbdDevice::find(roots, index)?;
        // A device that was created for one connection goes away with it.
        let facts = device.map(|device| device.facts_if_present()).transpose()?;
        let facts = facts.flatten();
        let state = facts
            .as_ref()
            .map_or(State::Absent, |facts| facts.state(&Hints::default()));
        // An opener of a free device concerns only the next connect.
        if matches!(state, State::Free | State::Absent | State::OpenedByOther) {
            return Ok(());
        }
        let turn = deadline.at_most(pauses.pause());
        if watch.next(turn).is_none() && deadline.has_passed() {
            let what = format!("nbd{index} to be free");
            let error = Error::timed_out(Stage::Confirm, deadline, &what);
            let seen = facts.map_or_else(String::new, |facts| facts.to_string());
            return Err(error.with_last_seen(format!("disconnected, and {seen}")));
        }
    }
}
