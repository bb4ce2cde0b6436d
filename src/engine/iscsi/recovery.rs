//! iSCSI sessions of ours whose connection was lost and can be had again.

mod attempt;
mod devices;
mod once;
mod options;
mod report;
mod spawn;
mod state;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::engine::{Engine, telemetry};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::pdu::AsyncMessage;
use crate::iscsi::{Plight, SessionNotice, SessionWaker, SessionWatch, StandingSession};
use crate::kernel::Roots;
use crate::scsi::Lanes;
use attempt::{Attempt, Came};
pub use options::KeepOptions;
pub use report::{KeepOutcome, KeptSession};
use state::Loss;

/// Without a word of the kernel's sessions are looked at this often: it may have had
/// no memory for one.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// After a new session its parameters are known.
const LOOK_SOON: Duration = Duration::from_secs(1);
/// One that is lost again sooner than this is not logged in again at once.
const STEADY: Duration = Duration::from_millis(500);
/// How long a target may ask us to stay away: it could say 18 hours, and I/O waits.
const LONGEST_WISH: Duration = Duration::from_secs(60);

impl Engine {
    /// Keeps the iSCSI sessions that were made here, by this process or by one before
    /// it, until what is returned is dropped: those whose connection is lost are
    /// logged in again, with growing pauses, and what waits on them goes on without
    /// an error. One that was lost for longer than its recovery timeout is tried on,
    /// and its devices run again; also those of a session that stands when the keeping
    /// of it begins, since who had it back may have been killed before it came to them:
    /// who has sessions kept has no use for a device's `offline`. A target that asks us
    /// to leave is left, and logged in to again.
    ///
    /// Sessions of others, iscsid's among them, are not touched. Several processes
    /// may keep sessions: of each session one at a time does it. Linux 5.10 with
    /// `iscsi_tcp`, root, in the initial network namespace; where the module is not
    /// loaded yet, it is waited for.
    ///
    /// # Errors
    /// `NotPermitted`; `NotSupported` in another network namespace.
    pub fn keep_sessions(&self, options: KeepOptions) -> Result<SessionKeeper> {
        let (told, came) = mpsc::channel();
        Ok(SessionKeeper {
            roots: self.roots().clone(),
            lanes: self.lanes.clone(),
            options,
            watch: SessionWatch::open(self.roots())?,
            stopped: Arc::default(),
            told,
            came,
            losses: BTreeMap::new(),
            known: BTreeMap::new(),
            look_at: Instant::now(),
            brings_devices_back: true,
        })
    }
}

/// Keeps sessions: see [`Engine::keep_sessions`]. Nothing is begun but in
/// [`next`](Self::next); what is under way when it is dropped comes to its end
/// within 10 seconds, but for a source of
/// [credentials](KeepOptions::credentials) that does not answer.
#[derive(Debug)]
pub struct SessionKeeper {
    roots: Roots,
    lanes: Lanes,
    options: KeepOptions,
    watch: SessionWatch,
    stopped: Arc<AtomicBool>,
    told: Sender<Came>,
    came: Receiver<Came>,
    losses: BTreeMap<SessionId, Loss>,
    known: BTreeMap<SessionId, Known>,
    look_at: Instant,
    /// The next look also has the devices of sessions that stand run again.
    brings_devices_back: bool,
}

/// What is known of a session of ours from when it stood.
#[derive(Debug, Default)]
struct Known {
    digests: Option<(bool, bool)>,
    recovered: Option<Instant>,
    /// The target wants us not to come back before.
    not_before: Option<Instant>,
}

/// Ends the waits of a [`SessionKeeper`] from another thread.
#[derive(Debug, Clone)]
pub struct KeeperStop {
    stopped: Arc<AtomicBool>,
    waker: SessionWaker,
}

impl KeeperStop {
    /// Has [`SessionKeeper::next`] return without waiting, from now on.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl SessionKeeper {
    /// What ends its waits.
    #[must_use]
    pub fn stopper(&self) -> KeeperStop {
        KeeperStop {
            stopped: Arc::clone(&self.stopped),
            waker: self.watch.waker(),
        }
    }

    /// Waits for the next news and returns it; empty when the deadline passes without
    /// any, or when it was [stopped](KeeperStop::stop). At first of the sessions that
    /// were lost before.
    ///
    /// # Errors
    /// Where sysfs cannot be read or the kernel cannot be heard.
    pub fn next(&mut self, deadline: Deadline) -> Result<Vec<KeptSession>> {
        loop {
            let mut news = Vec::new();
            if self.look_at <= Instant::now() {
                self.look()?;
            }
            while let Ok(came) = self.came.try_recv() {
                news.extend(self.take(came)?);
            }
            for id in self.due() {
                news.extend(self.treat(id)?);
            }
            for id in self.overdue() {
                news.extend(self.look_beside(id)?);
            }
            let stopped = self.stopped.load(Ordering::Acquire);
            if !news.is_empty() || deadline.has_passed() || stopped {
                return Ok(news);
            }
            let losses = self.losses.values();
            let next = losses.flat_map(|loss| [loss.due(), loss.overdue()]);
            let next = next.flatten().fold(self.look_at, Instant::min);
            let pause = next.saturating_duration_since(Instant::now());
            let turn = deadline.at_most(pause);
            if let Some(notice) = self.watch.next(turn)? {
                self.hear(notice)?;
            }
        }
    }

    /// Those whose attempt should have ended.
    fn overdue(&self) -> Vec<SessionId> {
        let now = Instant::now();
        let losses = self.losses.iter();
        let overdue = losses.filter(|(_, loss)| loss.overdue().is_some_and(|ends| ends <= now));
        overdue.map(|(id, _)| *id).collect()
    }

    fn due(&self) -> Vec<SessionId> {
        let now = Instant::now();
        let losses = self.losses.iter();
        let due = losses.filter(|(_, loss)| loss.due().is_some_and(|due| due <= now));
        due.map(|(id, _)| *id).collect()
    }

    /// Looks at all sessions of ours.
    fn look(&mut self) -> Result<()> {
        self.look_at = Instant::now() + LOOK_EVERY;
        let mut there = BTreeMap::new();
        let mut devices_are_left = false;
        for session in StandingSession::all(&self.roots)? {
            let id = session.id();
            if !session.is_ours()? {
                continue;
            }
            let mut known = self.known.remove(&id).unwrap_or_default();
            match session.plight()? {
                Some(Plight::Stands) => {
                    let digests = session.digests()?;
                    // Lost in between, the kernel may have forgotten them already.
                    if session.plight()? == Some(Plight::Stands) {
                        known.digests = Some(digests);
                    }
                    // A rescan that failed meanwhile may end after a recovery.
                    let recovered = known.recovered;
                    let is_fresh = recovered.is_some_and(|at| at.elapsed() < LOOK_EVERY * 2);
                    if self.brings_devices_back || is_fresh {
                        devices_are_left |= !self.bring_back(&session);
                    }
                }
                Some(plight) if plight.is_lost() => self.admit(&session, &known, false),
                _ => {}
            }
            there.insert(id, known);
        }
        self.known = there;
        self.brings_devices_back = devices_are_left;
        Ok(())
    }

    /// `false` where no thread for it could be started.
    fn bring_back(&self, session: &StandingSession) -> bool {
        let begun = devices::bring_back_beside(&self.roots, &self.lanes, session);
        if let Err(error) = &begun {
            tracing::warn!(session = %session.id(), %error, "its devices wait for the next look");
        }
        begun.is_ok()
    }

    fn hear(&mut self, notice: SessionNotice) -> Result<()> {
        match notice {
            SessionNotice::Lost(id) => {
                let session = StandingSession::new(&self.roots, id);
                if session.is_ours()? {
                    self.admit_known(&session, true);
                }
            }
            SessionNotice::Said(id, message) => {
                let session = StandingSession::new(&self.roots, id);
                if session.is_ours()? {
                    self.obey(&session, message);
                }
            }
            SessionNotice::Created(_) => {
                self.look_at = self.look_at.min(Instant::now() + LOOK_SOON);
            }
            SessionNotice::LookAgain => self.look_at = Instant::now(),
        }
        Ok(())
    }

    fn admit_known(&mut self, session: &StandingSession, heard: bool) {
        let known = self.known.remove(&session.id()).unwrap_or_default();
        self.admit(session, &known, heard);
        self.known.insert(session.id(), known);
    }

    fn admit(&mut self, session: &StandingSession, known: &Known, heard: bool) {
        let now = Instant::now();
        if let Some(loss) = self.losses.get_mut(&session.id()) {
            loss.look_again_at(now);
            if heard {
                loss.heard(now);
            }
            return;
        }
        let mut loss = Loss::new(session.clone(), now);
        if heard {
            loss.heard(now);
        }
        loss.not_before(known.recovered.map(|at| at + STEADY));
        loss.not_before(known.not_before);
        self.losses.insert(session.id(), loss);
    }

    /// What a target may ask for (RFC 7143, 11.9.1). As iscsid has it, a wish to
    /// negotiate is met by another login.
    fn obey(&mut self, session: &StandingSession, message: AsyncMessage) {
        let id = session.id();
        let [connection, wait, _] = message.parameters;
        tracing::info!(session = %id, ?message, "the target speaks");
        match message.event {
            1 | 4 => {
                // One that asks again and again is not left without a pause.
                self.admit_known(session, false);
                if let Some(loss) = self.losses.get_mut(&id) {
                    loss.ask_to_leave();
                }
            }
            // Of a session's one connection.
            2 | 3 if message.event == 3 || connection == 0 => {
                let wait = Duration::from_secs(wait.into()).min(LONGEST_WISH);
                let until = Instant::now() + wait;
                self.known.entry(id).or_default().not_before = Some(until);
                if let Some(loss) = self.losses.get_mut(&id) {
                    loss.not_before(Some(until));
                }
            }
            _ => {}
        }
    }

    /// Looks at one whose turn it is, and has it logged in again where it is lost.
    fn treat(&mut self, id: SessionId) -> Result<Option<KeptSession>> {
        let Some(loss) = self.losses.get_mut(&id) else {
            return Ok(None);
        };
        let plight = plight_of(loss)?;
        match plight {
            Plight::Ending => {
                let was_lost = loss.was_lost();
                return self.conclude(id, was_lost.then_some(KeepOutcome::Gone));
            }
            Plight::Stands if !loss.is_asked_to_leave() => {
                if loss.look_once_more(Instant::now()) {
                    return Ok(None);
                }
                let was_lost = loss.was_lost();
                return self.conclude(id, was_lost.then_some(KeepOutcome::Healthy));
            }
            Plight::Stands => {}
            Plight::Lost | Plight::GivenUp => loss.is_lost_now(),
        }
        let known = self.known.get(&id).and_then(|known| known.digests);
        let attempt = Attempt {
            roots: self.roots.clone(),
            lanes: self.lanes.clone(),
            session: loss.session().clone(),
            ask: self.options.ask.clone(),
            digests: known.unwrap_or(self.options.digests),
            leaves: loss.is_asked_to_leave(),
        };
        loss.begin(Instant::now() + attempt::LONGEST);
        if let Err(error) = attempt.start(self.told.clone(), self.watch.waker()) {
            let ended = Err(error);
            return self.take(Came { session: id, ended });
        }
        if plight == Plight::GivenUp && loss.is_first_to_say_spent() {
            return self.news(id, KeepOutcome::BudgetSpent).map(Some);
        }
        Ok(None)
    }

    /// An attempt hangs where no deadline ends it: in a file system that does not
    /// answer for its credentials, say. None is made beside it, and what becomes of the
    /// session meanwhile is said.
    fn look_beside(&mut self, id: SessionId) -> Result<Option<KeptSession>> {
        let Some(loss) = self.losses.get_mut(&id) else {
            return Ok(None);
        };
        loss.look_beside_at(Instant::now() + LOOK_EVERY);
        let outcome = match plight_of(loss)? {
            Plight::Ending => return self.conclude(id, Some(KeepOutcome::Gone)),
            Plight::Stands if !loss.is_asked_to_leave() => {
                return self.conclude(id, Some(KeepOutcome::Healthy));
            }
            Plight::GivenUp if loss.is_first_to_say_spent() => KeepOutcome::BudgetSpent,
            _ if loss.is_news(ErrorKind::TimedOut) => {
                let what = "a login again to end, and none is tried before";
                let error = Error::not_within(Stage::Session, attempt::LONGEST, what);
                let state = loss.session().state()?;
                let state = state.unwrap_or_else(|| "gone".to_owned());
                KeepOutcome::Failed(error.with_last_seen(format!("session {id} is {state}")))
            }
            _ => return Ok(None),
        };
        self.news(id, outcome).map(Some)
    }

    /// An attempt has come to its end.
    fn take(&mut self, came: Came) -> Result<Option<KeptSession>> {
        let Came { session: id, ended } = came;
        let Some(loss) = self.losses.get_mut(&id) else {
            return Ok(None);
        };
        match ended {
            Ok(attempt::Ended::Recovered) => {
                let known = self.known.entry(id).or_default();
                known.recovered = Some(Instant::now());
                known.not_before = None;
                self.conclude(id, Some(KeepOutcome::Recovered))
            }
            // Another process is at it; or it is as it should be, or gone.
            Ok(attempt::Ended::NotOurs) => {
                loss.end(Instant::now());
                Ok(None)
            }
            Err(error) => {
                tracing::debug!(session = %id, %error, "not had back");
                if error.kind() == ErrorKind::NotPermitted {
                    loss.is_refused();
                }
                loss.end(Instant::now());
                let is_new = loss.is_news(error.kind());
                is_new
                    .then(|| self.news(id, KeepOutcome::Failed(error)))
                    .transpose()
            }
        }
    }

    fn conclude(
        &mut self,
        id: SessionId,
        outcome: Option<KeepOutcome>,
    ) -> Result<Option<KeptSession>> {
        if matches!(outcome, Some(KeepOutcome::Healthy)) {
            let session = StandingSession::new(&self.roots, id);
            self.brings_devices_back |= !self.bring_back(&session);
        }
        let news = outcome.map(|outcome| self.news(id, outcome)).transpose();
        self.losses.remove(&id);
        news
    }

    fn news(&self, id: SessionId, outcome: KeepOutcome) -> Result<KeptSession> {
        let session = StandingSession::new(&self.roots, id);
        let (target, portal) = match session.name()? {
            Some(name) => (Some(name.target), Some(name.portal)),
            None => (None, None),
        };
        let loss = self.losses.get(&id);
        let budget_left = match (loss.and_then(Loss::seen), session.recovery_timeout()?) {
            (Some(seen), Some(budget)) if matches!(outcome, KeepOutcome::Failed(_)) => {
                Some(budget.saturating_sub(seen.elapsed()))
            }
            _ => None,
        };
        tracing::info!(session = %id, ?outcome, "kept");
        telemetry::keeping(outcome.as_str());
        Ok(KeptSession {
            session: id,
            target,
            portal,
            outcome,
            budget_left,
            tries: loss.map_or(0, Loss::tries),
        })
    }
}

/// One that is gone or another's by now is as good as being ended.
fn plight_of(loss: &Loss) -> Result<Plight> {
    Ok(match loss.session().plight()? {
        Some(plight) if loss.session().is_ours()? => plight,
        _ => Plight::Ending,
    })
}
