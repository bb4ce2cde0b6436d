//! Finds the sessions to recover: by scans of sysfs, and by the kernel's notices.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use crate::engine::iscsi::recovery::state::RecoveryState;
use crate::engine::iscsi::recovery::{KnownSession, SCAN_INTERVAL, SessionRecovery, devices};
use crate::error::Result;
use crate::id::SessionId;
use crate::iscsi::pdu::AsyncMessage;
use crate::iscsi::{ConnectionStatus, IscsiSession, SessionNotice};

/// After this time the parameters of a new session are readable.
const NEW_SESSION_DELAY: Duration = Duration::from_secs(1);
/// A session that is lost again sooner than this is not logged in again at once.
const MIN_RELOGIN_INTERVAL: Duration = Duration::from_millis(500);
/// The longest pause that a target may request: it could ask for 18 hours, and I/O waits.
const MAX_REQUESTED_PAUSE: Duration = Duration::from_secs(60);
impl SessionRecovery {
    /// Reads the state of all sessions of lunbd.
    pub(super) fn scan_sessions(&mut self) -> Result<()> {
        self.next_scan = Instant::now() + SCAN_INTERVAL;
        let mut there = BTreeMap::new();
        let mut devices_are_left = false;
        for session in IscsiSession::all(&self.roots)? {
            let id = session.id();
            if !session.is_lunbd_owned()? {
                continue;
            }
            let mut known = self.known.remove(&id).unwrap_or_default();
            match session.connection_status()? {
                Some(ConnectionStatus::LoggedIn) => {
                    let digests = session.digests()?;
                    // If the session was lost in between, the kernel may have forgotten the
                    // digests.
                    if session.connection_status()? == Some(ConnectionStatus::LoggedIn) {
                        known.digests = Some(digests);
                    }
                    // A rescan that failed during the loss may end only after the recovery.
                    let recovered = known.recovered;
                    let is_fresh = recovered.is_some_and(|at| at.elapsed() < SCAN_INTERVAL * 2);
                    if self.makes_devices_usable || is_fresh {
                        devices_are_left |= !self.start_making_devices_usable(&session);
                    }
                }
                Some(connection_status) if connection_status.is_lost() => {
                    track(&mut self.recoveries, &session, &known);
                }
                _ => {}
            }
            there.insert(id, known);
        }
        self.known = there;
        self.makes_devices_usable = devices_are_left;
        Ok(())
    }

    /// Returns `false` where no thread could be started.
    pub(super) fn start_making_devices_usable(&self, session: &IscsiSession) -> bool {
        let started =
            devices::make_devices_usable_in_background(&self.roots, &self.scheduler, session);
        if let Err(error) = &started {
            tracing::warn!(session = %session.id(), %error, "its devices are checked again later");
        }
        started.is_ok()
    }

    pub(super) fn handle_notice(&mut self, notice: SessionNotice) -> Result<()> {
        match notice {
            SessionNotice::Lost(id) => {
                let session = IscsiSession::new(&self.roots, id);
                if session.is_lunbd_owned()? {
                    self.track_known(&session).record_loss(Instant::now());
                }
            }
            SessionNotice::AsyncMessage(id, message) => {
                let session = IscsiSession::new(&self.roots, id);
                if session.is_lunbd_owned()? {
                    self.handle_async_message(&session, message);
                }
            }
            SessionNotice::Created(_) => {
                self.next_scan = self.next_scan.min(Instant::now() + NEW_SESSION_DELAY);
            }
            SessionNotice::Resync => self.next_scan = Instant::now(),
        }
        Ok(())
    }

    pub(super) fn track_known(&mut self, session: &IscsiSession) -> &mut RecoveryState {
        let known = self.known.entry(session.id()).or_default();
        track(&mut self.recoveries, session, known)
    }

    /// Acts on the requests that a target may send (RFC 7143, 11.9.1). Like iscsid, it answers
    /// a request to negotiate with a new login.
    fn handle_async_message(&mut self, session: &IscsiSession, message: AsyncMessage) {
        let id = session.id();
        let [connection, wait, _] = message.parameters;
        tracing::info!(session = %id, ?message, "the target sent an asynchronous message");
        match message.event {
            1 | 4 => {
                // A target that asks repeatedly still gets a pause between logins.
                self.track_known(session).request_logout();
            }
            // The session has one connection, number 0.
            2 | 3 if message.event == 3 || connection == 0 => {
                let wait = Duration::from_secs(wait.into()).min(MAX_REQUESTED_PAUSE);
                let until = Instant::now() + wait;
                self.known.entry(id).or_default().not_before = Some(until);
                if let Some(recovery) = self.recoveries.get_mut(&id) {
                    recovery.delay_until(Some(until));
                }
            }
            _ => {}
        }
    }
}

/// Begins the recovery of a session, or looks at the session of a recovery again.
fn track<'a>(
    recoveries: &'a mut BTreeMap<SessionId, RecoveryState>,
    session: &IscsiSession,
    known: &KnownSession,
) -> &'a mut RecoveryState {
    let now = Instant::now();
    match recoveries.entry(session.id()) {
        Entry::Occupied(recovery) => {
            let recovery = recovery.into_mut();
            recovery.look_again_at(now);
            recovery
        }
        Entry::Vacant(entry) => {
            let mut recovery = RecoveryState::new(session.clone(), now);
            recovery.delay_until(known.recovered.map(|at| at + MIN_RELOGIN_INTERVAL));
            recovery.delay_until(known.not_before);
            entry.insert(recovery)
        }
    }
}
