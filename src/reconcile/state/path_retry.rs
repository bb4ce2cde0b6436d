//! Retries volumes after a new transport appeared that may lead to them.

use super::State;
use crate::engine::journal::VolumeSpec;
use crate::engine::{Condition, ScsiTransport, ScsiTransports};
use crate::id::{HostNo, Iqn, Source};

impl State {
    /// Retries the volumes to which a new transport may lead. A session that a running
    /// step may have made counts only after that step, which may end it: a login of one
    /// volume's attempt must not cause an attempt of another volume.
    pub(in crate::reconcile) fn merge_transports(&mut self, mut found: ScsiTransports) {
        let known = self.transports.known();
        let counts = |one: &ScsiTransport| known.contains(one) || !self.may_be_logging_in(one);
        found.up.retain(counts);
        let new = self.transports.merge(found);
        if !new.is_empty() {
            let leads_to = |source: &Source| new.iter().any(|one| one.may_lead_to(source));
            self.retry_where(|spec| spec.sources.iter().any(leads_to));
        }
    }

    /// Refreshes the transports later, after a refresh that failed.
    pub(in crate::reconcile) fn refresh_transports_later(&mut self) {
        self.transports.refresh_later();
    }

    /// Retries the volumes whose paths over this host may be back. Where the host is
    /// unknown, or nothing is known on it, retries all.
    pub(super) fn retry_over_host(&mut self, host: Option<HostNo>) {
        let known = self.transports.known().iter();
        let over = known.filter(|one| host.is_some_and(|host| one.is_on(host)));
        let over: Vec<ScsiTransport> = over.cloned().collect();
        let leads_to = |source: &Source| over.iter().any(|one| one.may_lead_to(source));
        self.retry_where(|spec| over.is_empty() || spec.sources.iter().any(leads_to));
    }

    /// Retries the volumes of a target whose session serves again: no uevent announces
    /// that its devices run.
    pub(in crate::reconcile) fn retry_target(&mut self, target: &Iqn) {
        let is_at_target =
            |source: &Source| matches!(source, Source::Iscsi(uri) if uri.target() == target);
        self.retry_where(|spec| spec.sources.iter().any(is_at_target));
    }

    /// Retries the failed volumes with these specs now, since their paths may be back.
    fn retry_where(&mut self, is_concerned: impl Fn(&VolumeSpec) -> bool) {
        for (volume, tracked) in &mut self.tracked {
            // A wanted path may lead elsewhere than those of the attached volume.
            let attached = self.actual.get(volume).map(|status| &status.spec);
            let mut specs = attached.into_iter().chain(self.desired.get(volume));
            let is_concerned = specs.any(|spec| spec.nbd.is_none() && is_concerned(spec));
            // A step that only waits for a worker is planned again.
            if tracked.running().is_some() || !is_concerned {
                continue;
            }
            if let Some(failure) = &mut tracked.failure {
                failure.unblock();
                self.schedule.require_plan();
                self.publisher.change();
            }
            if tracked.path_retry.take().is_some() {
                self.refresh.request(volume);
            }
        }
    }

    /// Refreshes the SCSI volumes that lack a path.
    pub(super) fn refresh_lost_paths(&mut self) {
        for status in self.actual.volumes.values() {
            let lacks_one = status.condition != Condition::Complete || !status.missing.is_empty();
            if status.spec.nbd.is_none() && lacks_one && !self.is_busy(&status.volume) {
                self.refresh.request(&status.volume);
            }
        }
    }

    /// Whether a running step may have made this session.
    fn may_be_logging_in(&self, transport: &ScsiTransport) -> bool {
        let logs_in = |spec: &VolumeSpec| {
            let leads_to = |source| transport.may_lead_to(source);
            spec.log_in.is_some() && spec.sources.iter().any(leads_to)
        };
        let tracked = self.tracked.iter();
        let mut running = tracked.filter(|(_, tracked)| tracked.running().is_some());
        running.any(|(volume, _)| {
            let attached = self.actual.get(volume).map(|status| &status.spec);
            attached.is_some_and(logs_in) || self.desired.get(volume).is_some_and(logs_in)
        })
    }
}

#[cfg(test)]
mod tests;
