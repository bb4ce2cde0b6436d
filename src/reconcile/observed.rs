//! What looks and events say of the volumes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use super::event::Event;
use super::plan::StepKind;
use super::refresh::Scope;
use super::state::{MAY_HAVE_DIED, State};
use crate::engine::{ChangeEvent, Condition, VolumeStatus};
use crate::id::{Hctl, NbdIndex, Source, VolumeId};

/// The reason to verify a SCSI unit after it was away.
const WAS_AWAY: &str = "a path of it was lost, and its unit has not been verified since";

impl State {
    /// Takes in a change event, and returns the event to report, if there is one.
    pub(super) fn take_in(&mut self, cause: &ChangeEvent) -> Option<Event> {
        match cause {
            ChangeEvent::Device { devpath, removed } => {
                let mut parts = devpath.split('/');
                let volume = parts.find_map(|part| self.by_component.get(part))?;
                match self.tracked.get_mut(volume) {
                    // A running step causes device events itself, so only a removal
                    // counts; a step that only asks causes none.
                    Some(tracked) if tracked.busy => {
                        let asked = matches!(tracked.doing, Some(StepKind::Heal | StepKind::Prove));
                        tracked.dirty |= *removed || asked;
                    }
                    _ => {
                        self.refresh.some.insert(volume.clone());
                        self.refresh.soon();
                    }
                }
            }
            ChangeEvent::Transport { host } => {
                self.try_again_over(*host);
                self.look_for_lost_paths();
            }
            ChangeEvent::HostOrSession => {
                self.transports.change();
                self.look_for_lost_paths();
            }
            ChangeEvent::Resync => {
                self.refresh.all = true;
                self.refresh.soon();
            }
            ChangeEvent::AskAgain => {
                for there in self.actual.volumes.values_mut() {
                    if there.spec.nbd.is_some() && there.condition == Condition::Complete {
                        there.verify_reason = Some(MAY_HAVE_DIED.to_owned());
                    }
                }
                self.replan = true;
            }
            ChangeEvent::LinkDead(index) => {
                let volume = self.by_component.get(&index.name())?.clone();
                let tracked = self.tracked.entry(volume.clone()).or_default();
                tracked.died = Some(Instant::now());
                if !tracked.busy {
                    return self.mark_dead(&volume);
                }
            }
        }
        None
    }

    /// Records the death of the volume's NBD link.
    pub(super) fn mark_dead(&mut self, volume: &VolumeId) -> Option<Event> {
        let there = self.actual.volumes.get_mut(volume)?;
        if there.condition == Condition::LinkDead
            && let Some(tracked) = self.tracked.get_mut(volume)
            && let Some(failure) = &mut tracked.failure
        {
            // Before, one of several connections was dead. Now requests may wait.
            (failure.next, failure.is_unblocked) = (Some(Instant::now()), true);
            self.replan = true;
        }
        if there.condition != Condition::Complete {
            return None;
        }
        there.condition = Condition::LinkDead;
        "its link has died".clone_into(&mut there.seen);
        self.replan = true;
        let budget_left = budget(there);
        let tracked = self.tracked.entry(volume.clone()).or_default();
        let told = std::mem::replace(&mut tracked.lost, true);
        (!told).then(|| Event::Lost {
            volume: volume.clone(),
            why: there.seen.clone(),
            budget_left,
        })
    }

    /// Takes in the result of a look that began when `ended_steps` steps had ended. With
    /// `verify_new`, a volume that is seen for the first time must be verified.
    pub(super) fn merge(
        &mut self,
        found: Vec<VolumeStatus>,
        scope: &Scope,
        ended_steps: u64,
        verify_new: bool,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        let mut gone: BTreeSet<VolumeId> = match scope {
            Scope::All => self.actual.volumes.keys().cloned().collect(),
            Scope::Some(volumes) => volumes.clone(),
        };
        for there in found {
            gone.remove(&there.volume);
            if self.is_newer(&there.volume, ended_steps) {
                continue;
            }
            let volume = there.volume.clone();
            events.extend(self.merge_one(there, verify_new));
            events.extend(self.certificate_event(&volume));
        }
        for volume in gone {
            if !self.is_newer(&volume, ended_steps) {
                self.forget(&volume);
            }
        }
        self.replan = true;
        events
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
        let told = tracked
            .told_certificate_end
            .replace(certificate.valid_until);
        (told != Some(certificate.valid_until)).then(|| Event::CertificateEnds {
            volume: volume.clone(),
            certificate,
        })
    }

    /// Whether the known state is newer than a look that began when `ended_steps` steps had
    /// ended.
    fn is_newer(&self, volume: &VolumeId, ended_steps: u64) -> bool {
        let tracked = self.tracked.get(volume);
        tracked.is_some_and(|tracked| tracked.busy || tracked.ended > ended_steps)
    }

    fn merge_one(&mut self, mut there: VolumeStatus, verify_new: bool) -> Option<Event> {
        let tracked = self.tracked.entry(there.volume.clone()).or_default();
        let known = self.actual.volumes.get(&there.volume);
        match &tracked.path_retry {
            Some(path_retry) if path_retry.at > Instant::now() => {
                there.unscanned.clear();
                there.without_session.clear();
            }
            // The paths are there now, or can no longer be expected.
            Some(_) if !there.lacks_a_path() => tracked.path_retry = None,
            _ => {}
        }
        let stands = matches!(there.condition, Condition::Complete | Condition::LinkDead);
        if !stands {
            tracked.differs = None;
        }
        let seen = there.verify_reason.take().filter(|_| stands);
        there.verify_reason = seen.or_else(|| match known {
            Some(known) if is_back(known, &there) => Some(WAS_AWAY.to_owned()),
            Some(known) => known.verify_reason.clone().filter(|_| stands),
            None if verify_new && stands => Some("this process has not verified it yet".to_owned()),
            None => None,
        });
        let was_complete = known.is_some_and(|known| known.condition == Condition::Complete);
        if was_complete && there.spec.nbd.is_some() && there.condition == Condition::LinkDead {
            // Sysfs, or this process's end of the link, may show the death first.
            tracked.died.get_or_insert_with(Instant::now);
        }
        if tracked.died.is_some() && there.condition == Condition::Complete {
            there.condition = Condition::LinkDead;
            "its link has died".clone_into(&mut there.seen);
        }
        if let Some((condition, seen)) = &tracked.differs {
            there.condition = *condition;
            there.seen.clone_from(seen);
        }
        let before = was_complete;
        let now = there.condition == Condition::Complete;
        let volume = there.volume.clone();
        let event = if before && !now && !tracked.lost {
            tracked.lost = true;
            Some(Event::Lost {
                volume,
                why: there.seen.clone(),
                budget_left: tracked.died.and_then(|_| budget(&there)),
            })
        } else if now && there.verify_reason.is_none() && tracked.lost {
            tracked.lost = false;
            Some(Event::Healed { volume })
        } else {
            None
        };
        self.know(there);
        event
    }

    pub(super) fn know(&mut self, there: VolumeStatus) {
        let volume = &there.volume;
        let mut parts = components(&there);
        let before = self.disown(volume);
        if there.condition == Condition::LinkDead {
            // Sysfs does not show the paths that are lost, so they are kept: their events
            // announce that they are back.
            let lost = before.into_iter().filter(|part| !parts.contains(part));
            parts.extend(lost.collect::<Vec<_>>());
        }
        for part in &parts {
            self.by_component.insert(part.clone(), volume.clone());
        }
        self.parts.insert(volume.clone(), parts);
        self.actual.volumes.insert(volume.clone(), there);
    }

    /// Removes and returns the volume's components: their events no longer concern it.
    fn disown(&mut self, volume: &VolumeId) -> Vec<String> {
        let mut parts = self.parts.remove(volume).unwrap_or_default();
        parts.retain(|part| {
            let own = self.by_component.get(part) == Some(volume);
            if own {
                self.by_component.remove(part);
            }
            own
        });
        parts
    }

    /// Records that nothing of the volume is left.
    pub(super) fn forget(&mut self, volume: &VolumeId) {
        self.actual.volumes.remove(volume);
        self.disown(volume);
        if let Some(tracked) = self.tracked.get_mut(volume) {
            (tracked.died, tracked.reconnect_handle, tracked.lost) = (None, None, false);
            (tracked.path_retry, tracked.differs) = (None, None);
        }
        let wanted = self.desired.get(volume).is_some();
        if !wanted && !self.is_busy(volume) {
            let gone = self.tracked.remove(volume);
            if gone.is_some_and(|gone| gone.failure.is_some()) {
                self.publisher.change();
            }
        }
    }
}

/// Whether a path of a SCSI unit runs again: the array may have given its address to
/// another unit meanwhile.
fn is_back(known: &VolumeStatus, there: &VolumeStatus) -> bool {
    if there.spec.nbd.is_some() || there.condition != Condition::Complete {
        return false;
    }
    let runs = |path: &&Hctl| there.paths.contains(path) && !there.silent.contains(path);
    let was_away = matches!(known.condition, Condition::LinkDead | Condition::Gone);
    was_away || known.silent.iter().any(|path| runs(&path))
}

fn budget(there: &VolumeStatus) -> Option<Duration> {
    let nbd = there.spec.nbd.as_ref()?;
    Some(Duration::from_millis(nbd.dead_connection_timeout_ms))
}

/// The device path components by which a volume's events are recognised.
fn components(there: &VolumeStatus) -> Vec<String> {
    let mut components: Vec<String> = there.paths.iter().map(ToString::to_string).collect();
    components.extend(there.nbd_index.map(NbdIndex::name));
    let node = there.node.as_ref().and_then(|node| node.file_name());
    components.extend(node.map(|name| name.to_string_lossy().into_owned()));
    for source in &there.spec.sources {
        if let Source::Scsi(hctl) = source {
            components.push(hctl.to_string());
        }
    }
    components
}

#[cfg(test)]
mod tests;
