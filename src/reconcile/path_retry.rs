//! Retries volumes after a new transport appeared that may lead to them.

use std::time::Instant;

use super::state::State;
use crate::engine::journal::VolumeSpec;
use crate::engine::{Condition, ScsiTransport, ScsiTransports};
use crate::id::{HostNo, Iqn, Source};

impl State {
    /// Retries the volumes to which a new transport may lead. A session that a running
    /// step may have made counts only after that step, which may end it: a login of one
    /// volume's attempt must not cause an attempt of another volume.
    pub(super) fn see_transports(&mut self, found: ScsiTransports) {
        let mut standing = found.up;
        standing.retain(|one| self.transports.known.contains(one) || !self.is_made_now(one));
        let new = self.transports.look(standing, found.is_changing);
        if new.is_empty() {
            return;
        }
        let is_led_to = |source: &Source| new.iter().any(|one| one.may_lead_to(source));
        self.try_again_where(|spec| spec.sources.iter().any(is_led_to));
    }

    /// Retries the volumes whose paths over this host may be back. Where the host is
    /// unknown, or nothing is known on it, retries all.
    pub(super) fn try_again_over(&mut self, host: Option<HostNo>) {
        let known = self.transports.known.iter();
        let over = known.filter(|one| host.is_some_and(|host| one.is_on(host)));
        let over: Vec<ScsiTransport> = over.cloned().collect();
        let is_led_to = |source: &Source| over.iter().any(|one| one.may_lead_to(source));
        self.try_again_where(|spec| over.is_empty() || spec.sources.iter().any(is_led_to));
    }

    /// Retries the volumes of a target whose session serves again: no uevent announces
    /// that its devices run.
    pub(super) fn see_target_back(&mut self, target: &Iqn) {
        let is_with_it =
            |source: &Source| matches!(source, Source::Iscsi(uri) if uri.target() == target);
        self.try_again_where(|spec| spec.sources.iter().any(is_with_it));
    }

    /// Retries the failed volumes with these specs now, since their paths may be back.
    pub(super) fn try_again_where(&mut self, is_concerned: impl Fn(&VolumeSpec) -> bool) {
        for (volume, tracked) in &mut self.tracked {
            let there = self.actual.get(volume);
            let spec = there.map(|there| &there.spec).or(self.desired.get(volume));
            // A step that only waits for a worker is planned again.
            let is_at_work = tracked.doing.is_some();
            if is_at_work || !spec.is_some_and(|spec| spec.nbd.is_none() && is_concerned(spec)) {
                continue;
            }
            if let Some(failure) = &mut tracked.failure {
                (failure.next, failure.is_unblocked) = (Some(Instant::now()), true);
                self.replan = true;
                self.publisher.change();
            }
            if tracked.path_retry.take().is_some() {
                self.refresh.some.insert(volume.clone());
                self.refresh.soon();
            }
        }
    }

    /// Looks at the SCSI volumes that lack a path.
    pub(super) fn look_for_lost_paths(&mut self) {
        for there in self.actual.volumes.values() {
            let lacks = there.condition != Condition::Complete || !there.missing.is_empty();
            if there.spec.nbd.is_none() && lacks && !self.is_busy(&there.volume) {
                self.refresh.some.insert(there.volume.clone());
                self.refresh.soon();
            }
        }
    }

    fn is_made_now(&self, transport: &ScsiTransport) -> bool {
        let logs_in = |spec: &VolumeSpec| {
            let leads = |source| transport.may_lead_to(source);
            spec.log_in.is_some() && spec.sources.iter().any(leads)
        };
        let at_work = self.tracked.iter();
        let mut at_work = at_work.filter(|(_, tracked)| tracked.doing.is_some());
        at_work.any(|(volume, _)| {
            let there = self.actual.get(volume).map(|there| &there.spec);
            there.is_some_and(logs_in) || self.desired.get(volume).is_some_and(logs_in)
        })
    }
}

#[cfg(test)]
mod tests;
