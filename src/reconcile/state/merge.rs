//! Merges the statuses that a refresh has found into the state.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use super::State;
use super::changes::budget;
use crate::engine::{Condition, VolumeStatus};
use crate::id::{Hctl, VolumeId};
use crate::reconcile::event::Event;
use crate::reconcile::refresh::Scope;
use crate::reconcile::tracked::Tracked;

/// The reason to verify a SCSI unit after it was away.
const WAS_AWAY: &str = "a path of it was lost, and its unit has not been verified since";

impl State {
    /// Merges the result of a refresh that began when `ended_steps` steps had ended. With
    /// `verify_new`, a volume that is seen for the first time must be verified.
    pub(in crate::reconcile) fn merge(
        &mut self,
        found: Vec<VolumeStatus>,
        scope: &Scope,
        ended_steps: u64,
        verify_new: bool,
    ) -> Vec<Event> {
        let mut gone: BTreeSet<VolumeId> = match scope {
            Scope::All => {
                self.counters.full_refreshes += 1;
                self.actual.volumes.keys().cloned().collect()
            }
            Scope::Some(volumes) => {
                self.counters.partial_refreshes += 1;
                volumes.clone()
            }
        };
        let mut events = Vec::new();
        for status in found {
            gone.remove(&status.volume);
            if self.is_newer(&status.volume, ended_steps) {
                continue;
            }
            let volume = status.volume.clone();
            events.extend(self.merge_status(status, verify_new));
            events.extend(self.certificate_event(&volume));
        }
        for volume in gone {
            if !self.is_newer(&volume, ended_steps) {
                self.remove_status(&volume);
            }
        }
        self.schedule.require_plan();
        events
    }

    /// Whether the known status is newer than a refresh that began when `ended_steps` steps had
    /// ended.
    fn is_newer(&self, volume: &VolumeId, ended_steps: u64) -> bool {
        let tracked = self.tracked.get(volume);
        tracked.is_some_and(|tracked| tracked.is_busy() || tracked.last_ended_step > ended_steps)
    }

    fn merge_status(&mut self, mut status: VolumeStatus, verify_new: bool) -> Option<Event> {
        let tracked = self.tracked.entry(status.volume.clone()).or_default();
        let known = self.actual.volumes.get(&status.volume);
        match &tracked.path_retry {
            Some(path_retry) if path_retry.at > Instant::now() => {
                status.unscanned.clear();
                status.without_session.clear();
            }
            // The paths are there now, or can no longer be expected.
            Some(_) if !status.lacks_a_path() => tracked.path_retry = None,
            _ => {}
        }
        status.verify_reason = verify_reason(known, &status, verify_new);
        let was_complete = known.is_some_and(|known| known.condition == Condition::Complete);
        let is_nbd = status.spec.nbd.is_some();
        if was_complete && is_nbd && status.condition == Condition::LinkDead {
            // Sysfs, or this process's end of the link, may show the death first.
            tracked.link_died_at.get_or_insert_with(Instant::now);
        }
        override_sysfs(&mut status, tracked);
        let is_complete = status.condition == Condition::Complete;
        let volume = status.volume.clone();
        let event = if was_complete && !is_complete {
            tracked.mark_lost().then(|| Event::Lost {
                volume,
                why: status.seen.clone(),
                budget_left: tracked.link_died_at.and_then(|_| budget(&status)),
            })
        } else if is_complete && status.verify_reason.is_none() && tracked.loss_was_reported {
            tracked.loss_was_reported = false;
            Some(Event::Healed { volume })
        } else {
            None
        };
        self.set_status(status);
        event
    }

    /// The event for a certificate that ends soon, once for each certificate.
    pub(super) fn certificate_event(&mut self, volume: &VolumeId) -> Option<Event> {
        const SOON: Duration = Duration::from_secs(30 * 24 * 60 * 60);
        let tls = self.actual.volumes.get(volume)?.tls.as_ref()?;
        let certificate = tls.certificate.clone();
        if certificate.time_left(SystemTime::now()) >= SOON {
            return None;
        }
        let tracked = self.tracked.entry(volume.clone()).or_default();
        let end = certificate.valid_until;
        let reported = tracked.reported_certificate_end.replace(end);
        (reported != Some(end)).then(|| Event::CertificateEnds {
            volume: volume.clone(),
            certificate,
        })
    }
}

/// Whether the device is there, so that it can be asked.
fn is_there(status: &VolumeStatus) -> bool {
    matches!(status.condition, Condition::Complete | Condition::LinkDead)
}

/// Why the device must be asked whether it is the expected one.
fn verify_reason(
    known: Option<&VolumeStatus>,
    found: &VolumeStatus,
    verify_new: bool,
) -> Option<String> {
    if !is_there(found) {
        return None;
    }
    found.verify_reason.clone().or_else(|| match known {
        Some(known) if is_back(known, found) => Some(WAS_AWAY.to_owned()),
        Some(known) => known.verify_reason.clone(),
        None => verify_new.then(|| "this process has not verified it yet".to_owned()),
    })
}

/// Whether a path of a SCSI unit runs again: the array may have given its address to
/// another unit meanwhile.
fn is_back(known: &VolumeStatus, found: &VolumeStatus) -> bool {
    if found.spec.nbd.is_some() || found.condition != Condition::Complete {
        return false;
    }
    let runs = |path: &&Hctl| found.paths.contains(path) && !found.silent.contains(path);
    let was_away = matches!(known.condition, Condition::LinkDead | Condition::Gone);
    was_away || known.silent.iter().any(|path| runs(&path))
}

/// Overrides the status from sysfs with the kernel's events and with the answer of the
/// device itself.
fn override_sysfs(status: &mut VolumeStatus, tracked: &mut Tracked) {
    if !is_there(status) {
        tracked.verified_condition = None;
    }
    if tracked.link_died_at.is_some() && status.condition == Condition::Complete {
        status.condition = Condition::LinkDead;
        "its link has died".clone_into(&mut status.seen);
    }
    if let Some((condition, seen)) = &tracked.verified_condition {
        status.condition = *condition;
        status.seen.clone_from(seen);
    }
}

#[cfg(test)]
mod tests;
