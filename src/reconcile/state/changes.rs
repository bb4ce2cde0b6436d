//! What the kernel's events change.

use std::time::{Duration, Instant};

use super::State;
use crate::engine::{ChangeEvent, Condition, VolumeStatus};
use crate::id::VolumeId;
use crate::reconcile::event::Event;
use crate::reconcile::step::StepKind;

/// The reason to ask a device whose link may be dead.
pub(super) const MAY_HAVE_DIED: &str = "the death of its link may have been missed";

impl State {
    /// Handles a change event, and returns the event to report, if there is one.
    pub(in crate::reconcile) fn handle_change(&mut self, change: &ChangeEvent) -> Option<Event> {
        match change {
            ChangeEvent::Device { devpath, removed } => self.handle_device(devpath, *removed),
            ChangeEvent::Transport { host } => {
                self.retry_over_host(*host);
                self.refresh_lost_paths();
            }
            ChangeEvent::HostOrSession => {
                self.transports.change();
                self.refresh_lost_paths();
            }
            ChangeEvent::Resync => self.refresh.request_all(),
            ChangeEvent::LinkNoticesLost => {
                for status in self.actual.volumes.values_mut() {
                    if status.spec.nbd.is_some() && status.condition == Condition::Complete {
                        status.verify_reason = Some(MAY_HAVE_DIED.to_owned());
                    }
                }
                self.schedule.require_plan();
            }
            ChangeEvent::LinkDead(index) => {
                let volume = self.components.volume_at(&index.name())?.clone();
                let tracked = self.tracked.entry(volume.clone()).or_default();
                tracked.link_died_at = Some(Instant::now());
                if !tracked.is_busy() {
                    return self.mark_link_dead(&volume);
                }
            }
        }
        None
    }

    fn handle_device(&mut self, devpath: &str, is_removed: bool) {
        let Some(volume) = self.components.volume_at(devpath) else {
            return;
        };
        match self.tracked.get_mut(volume) {
            // A running step causes device events itself, so only a removal counts; a step
            // that only asks causes none.
            Some(tracked) if tracked.is_busy() => {
                let asks = matches!(tracked.running(), Some(StepKind::Heal | StepKind::Verify));
                tracked.needs_refresh |= is_removed || asks;
            }
            _ => self.refresh.request(volume),
        }
    }

    /// Records the death of the volume's NBD link.
    pub(super) fn mark_link_dead(&mut self, volume: &VolumeId) -> Option<Event> {
        let status = self.actual.volumes.get_mut(volume)?;
        let tracked = self.tracked.entry(volume.clone()).or_default();
        if status.condition == Condition::LinkDead
            && let Some(failure) = &mut tracked.failure
        {
            // Before, one of several connections was dead. Now requests may wait.
            failure.unblock();
            self.schedule.require_plan();
        }
        if status.condition != Condition::Complete {
            return None;
        }
        status.condition = Condition::LinkDead;
        "its link has died".clone_into(&mut status.seen);
        self.schedule.require_plan();
        tracked.mark_lost().then(|| Event::Lost {
            volume: volume.clone(),
            why: status.seen.clone(),
            budget_left: budget(status),
        })
    }
}

/// How long requests to an NBD device wait from the death of its link.
pub(super) fn budget(status: &VolumeStatus) -> Option<Duration> {
    let nbd = status.spec.nbd.as_ref()?;
    Some(Duration::from_millis(nbd.dead_connection_timeout_ms))
}

#[cfg(test)]
mod tests;
