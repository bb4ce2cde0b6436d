//! Recovers the sessions that the volumes log in to, while the loop runs.

use std::sync::Arc;
use std::time::Duration;

use super::event::Event;
use super::reconciler::Reconciler;
use super::state::State;
use crate::deadline::Deadline;
use crate::engine::SessionRecoveryOptions;
use crate::engine::journal::VolumeSpec;
use crate::error::Result;
use crate::id::Iqn;
use crate::iscsi::{Digests, SessionName};

/// The pause after the kernel's notices became unavailable.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

impl Reconciler {
    /// Runs from when a volume with a login is wanted, or at once if an earlier process left
    /// one in the journal, until the run ends.
    pub(super) fn recover_sessions(&self) {
        let records = self.journal.records();
        let has_record = records.iter().any(|record| record.spec.log_in.is_some());
        while self.wait_for_login(has_record) {
            let Err(error) = self.recover_until_run_ends() else {
                return;
            };
            tracing::warn!(%error, "lost sessions are not recovered");
            let goes_on = |state: &mut State| !state.run.must_threads_end();
            let changed = &self.shared.changed;
            changed.wait_while_for(&mut self.shared.state(), goes_on, RETRY_PAUSE);
        }
    }

    /// Waits until a volume with a login is wanted, unless the journal has one. Returns `false`
    /// where the run ends first.
    fn wait_for_login(&self, has_record: bool) -> bool {
        let none_yet = |state: &mut State| {
            let mut wanted = state.desired().iter();
            let has_one = has_record || wanted.any(|(_, spec)| spec.log_in.is_some());
            !state.run.must_threads_end() && !has_one
        };
        let mut state = self.shared.state();
        self.shared.changed.wait_while(&mut state, none_yet);
        !state.run.must_threads_end()
    }

    fn recover_until_run_ends(&self) -> Result<()> {
        let mut recovery = self.engine.recover_sessions(self.recovery_options())?;
        let mut state = self.shared.state();
        if state.run.must_threads_end() {
            return Ok(());
        }
        state.run.stop_session_recovery_by(recovery.stopper());
        drop(state);
        loop {
            let reports = recovery.next(Deadline::after(Duration::MAX))?;
            let served = reports.iter().filter(|report| report.outcome.serves());
            let targets: Vec<Option<Iqn>> = served.map(|report| report.target.clone()).collect();
            let events = reports.into_iter();
            let events = events.map(|report| Event::Session(Arc::new(report)));
            let mut state = self.shared.state();
            let is_over = state.run.must_threads_end();
            if !targets.is_empty() {
                // No uevent announces that the session's devices run again.
                state.refresh.request_all_now();
                for target in targets.iter().flatten() {
                    state.retry_target(target);
                }
            }
            self.shared.send(state, events);
            if is_over {
                return Ok(());
            }
            if !targets.is_empty() {
                self.shared.wake.notify_all();
            }
        }
    }

    fn recovery_options(&self) -> SessionRecoveryOptions {
        let shared = Arc::clone(&self.shared);
        let recorded = self.journal.credentials_of_sessions();
        let options = SessionRecoveryOptions::new().credentials_within(move |session, deadline| {
            // The wanted volumes take precedence over what the journal recorded.
            let wanted = shared.state().desired().credentials_of(session);
            let source = wanted.or_else(|| recorded(session));
            let (target, portal) = (&session.target, &session.portal);
            let secrets = source.map(|source| source.read(Some(target), portal, deadline));
            secrets.transpose()
        });
        let shared = Arc::clone(&self.shared);
        let records = self.journal.records().into_iter();
        let recorded: Vec<VolumeSpec> = records.map(|record| record.spec).collect();
        options.digests_of(move |session| {
            let state = shared.state();
            let wanted = state.desired().iter().map(|(_, spec)| spec);
            digests_of(wanted.chain(&recorded), session)
        })
    }
}

/// The digests that any of the volumes of this session asks for. The recovery offers them for a
/// session whose digests are unknown, and the target chooses.
fn digests_of<'a>(volumes: impl Iterator<Item = &'a VolumeSpec>, session: &SessionName) -> Digests {
    let logins = volumes.filter_map(|spec| spec.log_in_of(session));
    logins.fold(Digests::default(), |digests, how| Digests {
        header: digests.header || how.header_digest,
        data: digests.data || how.data_digest,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AttachRequest;
    use crate::id::Source;
    use crate::iscsi::SessionOptions;

    #[test]
    fn a_session_is_offered_the_digests_of_its_own_volumes_alone() {
        let initiator: Iqn = "iqn.2026-01.example:host".parse().unwrap();
        let volume = |target: &str, header, data| {
            let source = format!("iscsi://10.0.0.1/iqn.2026-01.example:{target}/1");
            let options = SessionOptions::new(initiator.clone()).digests(header, data);
            VolumeSpec::of(&AttachRequest::new(source.parse::<Source>().unwrap()).log_in(options))
        };
        let volumes = [
            volume("one", true, false),
            volume("one", false, false),
            volume("other", true, true),
        ];
        let offered = |target: &str| {
            let session = SessionName {
                initiator: initiator.clone(),
                target: format!("iqn.2026-01.example:{target}").parse().unwrap(),
                portal: "10.0.0.1".parse().unwrap(),
            };
            let Digests { header, data } = digests_of(volumes.iter(), &session);
            (header, data)
        };
        assert_eq!(offered("one"), (true, false));
        assert_eq!(offered("other"), (true, true));
        assert_eq!(offered("third"), (false, false));
    }
}
