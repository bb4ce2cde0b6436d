//! Recovers the sessions that the volumes log in to, while the loop runs.

use std::sync::Arc;
use std::time::Duration;

use super::event::Event;
use super::reconciler::Reconciler;
use super::state::{RunState, State};
use crate::deadline::Deadline;
use crate::engine::SessionRecoveryOptions;
use crate::error::Result;
use crate::id::Iqn;
use crate::iscsi::SessionName;

/// The pause after the kernel's notices became unavailable.
const AGAIN: Duration = Duration::from_secs(30);
/// How long reading a file of secrets may take.
const TO_READ: Duration = Duration::from_secs(10);

impl Reconciler {
    /// Runs from when a volume with a login is wanted, or at once if an earlier process left
    /// one in the journal, until the loop ends.
    pub(super) fn recover_sessions(&self) {
        let left = self.journal.records();
        let is_left = left.iter().any(|record| record.spec.log_in.is_some());
        while self.wait_for_a_login(is_left) {
            let Err(error) = self.recover_until_ended() else {
                return;
            };
            tracing::warn!(%error, "lost sessions are not recovered");
            let goes_on = |state: &mut State| state.driver != RunState::Ended;
            let changed = &self.shared.changed;
            changed.wait_while_for(&mut self.shared.state(), goes_on, AGAIN);
        }
    }

    /// Returns `false` where the loop ends first.
    fn wait_for_a_login(&self, is_left: bool) -> bool {
        let none_yet = |state: &mut State| {
            let mut wanted = state.desired.iter();
            let has_one = is_left || wanted.any(|(_, spec)| spec.log_in.is_some());
            state.driver != RunState::Ended && !has_one
        };
        let mut state = self.shared.state();
        self.shared.changed.wait_while(&mut state, none_yet);
        state.driver != RunState::Ended
    }

    fn recover_until_ended(&self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let known = self.journal.credentials_of_sessions();
        // The wanted volumes take precedence over what the journal recorded.
        let proof = move |session: &SessionName| {
            let said = shared.state().desired.credentials_of(session);
            said.or_else(|| known(session))
        };
        let options = SessionRecoveryOptions::new().credentials(move |session| {
            let (target, portal) = (&session.target, &session.portal);
            let limit = Deadline::after(TO_READ);
            let known = proof(session).map(|at| at.read(Some(target), portal, limit));
            known.transpose()
        });
        let (header, data) = self.digests();
        let mut recovery = self
            .engine
            .recover_sessions(options.digests(header, data))?;
        let mut state = self.shared.state();
        if state.driver == RunState::Ended {
            return Ok(());
        }
        state.session_recovery = Some(recovery.stopper());
        drop(state);
        loop {
            let news = recovery.next(Deadline::after(Duration::MAX))?;
            let back = news.iter().filter(|kept| kept.outcome.serves());
            let back: Vec<Option<Iqn>> = back.map(|kept| kept.target.clone()).collect();
            let events = news.into_iter().map(|kept| Event::Session(Arc::new(kept)));
            let mut state = self.shared.state();
            let is_over = state.driver == RunState::Ended;
            if !back.is_empty() {
                // No uevent announces that the session's devices run again.
                state.refresh.now();
                for target in back.iter().flatten() {
                    state.see_target_back(target);
                }
            }
            self.shared.tell(state, events);
            if is_over {
                return Ok(());
            }
            if !back.is_empty() {
                self.shared.wake.notify_all();
            }
        }
    }

    /// The digests that any wanted or recorded volume asks for. The recovery offers them
    /// for a session whose digests are unknown, and the target chooses.
    fn digests(&self) -> (bool, bool) {
        let left = self.journal.records();
        let state = self.shared.state();
        let wanted = state.desired.iter().map(|(_, spec)| spec);
        let specs = wanted.chain(left.iter().map(|record| &record.spec));
        let logins = specs.filter_map(|spec| spec.log_in.as_ref());
        logins.fold((false, false), |(header, data), how| {
            (header || how.header_digest, data || how.data_digest)
        })
    }
}
