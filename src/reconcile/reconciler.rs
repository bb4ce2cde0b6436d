//! The public calls of a reconciler.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::actual::Actual;
use super::desired::Desired;
use super::followers::Events;
use super::options::Options;
use super::plan::{self, Plan};
use super::progress::{Counters, RunningStep};
use super::shared::Shared;
use crate::deadline::Deadline;
use crate::engine::{Engine, Journal, ReapReport, ReapRequest, VolumeStatus};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::VolumeId;

/// Keeps the volumes of a journal as they are wanted. It is shared by reference: one thread
/// [runs](Self::run) it, others set what is wanted, wait for volumes, and follow the events.
pub struct Reconciler {
    pub(super) engine: Arc<Engine>,
    pub(super) journal: Journal,
    pub(super) options: Options,
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let journal = self.journal.directory();
        f.debug_struct("Reconciler")
            .field("journal", &journal)
            .finish_non_exhaustive()
    }
}

impl Reconciler {
    /// No volume is wanted yet, and nothing is done before [`run`](Self::run) or
    /// [`apply`](Self::apply). **These detach each volume of the journal that is not
    /// [set](Self::set) as wanted by then**.
    #[must_use]
    pub fn new(engine: Arc<Engine>, journal: Journal, options: Options) -> Self {
        let shared = Arc::new(Shared::new(options.clone()));
        Self {
            engine,
            journal,
            options,
            shared,
        }
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Sets what is wanted from now on. Running steps finish first; steps that have not
    /// begun are planned again.
    pub fn set(&self, desired: Desired) {
        self.shared.state().set_desired(desired);
        self.shared.wake.notify_all();
        self.shared.changed.notify_all();
    }

    /// The remaining steps, by the known state.
    #[must_use]
    pub fn plan(&self) -> Plan {
        self.shared.state().plan()
    }

    /// The steps to which [`set`](Self::set) of this would lead, as the machine is now. It
    /// does nothing and sets nothing.
    ///
    /// # Errors
    /// If sysfs cannot be read.
    pub fn preview(&self, desired: &Desired) -> Result<Plan> {
        let actual = Actual::read(&self.engine, &self.journal)?;
        Ok(plan::plan(desired, &actual))
    }

    /// The volumes that this machine uses, or may use: those that are wanted, from that moment
    /// on, and those whose detach is not proven yet. Like the journal, this outlives the
    /// process. No other machine may be given one of these volumes. A volume whose record was
    /// set aside is not among them: while [`Journal::problems`] is not empty, the set is
    /// incomplete.
    #[must_use]
    pub fn in_use(&self) -> BTreeSet<VolumeId> {
        // The journal is read last: a wanted volume enters it and leaves it while the volume is
        // busy.
        let state = self.shared.state();
        let wanted = state.desired().iter().map(|(volume, _)| volume.clone());
        let mut volumes: BTreeSet<VolumeId> = wanted.collect();
        volumes.extend(state.busy().cloned());
        volumes.extend(self.journal.records().into_iter().map(|r| r.volume));
        volumes
    }

    /// The steps that workers do at this moment, by the volumes' names, for a display.
    #[must_use]
    pub fn running_steps(&self) -> Vec<RunningStep> {
        self.shared.state().running_steps()
    }

    /// Follows the events from now on.
    #[must_use]
    pub fn subscribe(&self) -> Events {
        self.shared.subscribe()
    }

    /// The counters as they are now.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.state().counters()
    }

    /// Waits until a volume is attached as it is wanted, and was read back.
    ///
    /// # Errors
    /// `NotFound` if it is not wanted; `TimedOut` at stage `converge`, with its last error.
    pub fn wait_attached(&self, volume: &VolumeId, deadline: Deadline) -> Result<VolumeStatus> {
        let mut state = self.shared.state();
        loop {
            if let Some(there) = state.attached(volume) {
                return Ok(there.clone());
            }
            if state.desired().get(volume).is_none() {
                let message = format!("volume {volume} is not wanted");
                return Err(Error::new(ErrorKind::NotFound, message).at(Stage::Converge));
            }
            if deadline.has_passed() {
                let what = format!("volume {volume} to be attached as it is wanted");
                let error = Error::timed_out(Stage::Converge, deadline, &what);
                let mut errors = state.errors().into_iter();
                let last = errors.find(|(failed, _)| failed == volume);
                let last = last.map(|(_, error)| format!("{error:#}"));
                let step = || state.step(volume).map(|step| step.to_string());
                return Err(match last.or_else(step) {
                    Some(last) => error.with_last_seen(last),
                    None => error,
                });
            }
            self.shared
                .changed
                .wait_for(&mut state, deadline.max_sleep());
        }
    }

    /// Brings the volumes to what is wanted, once: it tries each step one time, and also does
    /// the steps that another step makes possible. Returns the steps that are left: none if all
    /// is as wanted, and else the [`errors`](Self::errors) say why.
    ///
    /// # Errors
    /// `InUse` if it runs already; `TimedOut` at stage `converge`: the running steps have
    /// finished, and the others have not begun; where sysfs cannot be read.
    pub fn apply(&self, deadline: Deadline) -> Result<Plan> {
        self.run_until(Some(deadline))?;
        let state = self.shared.state();
        if deadline.has_passed() && !state.is_idle() {
            let error = Error::timed_out(Stage::Converge, deadline, "all volumes to converge");
            let left = state.plan().steps.len();
            return Err(error.with_last_seen(format!("{left} volumes differ from what is wanted")));
        }
        Ok(state.plan())
    }

    /// The last error of each volume whose last step failed.
    #[must_use]
    pub fn errors(&self) -> Vec<(VolumeId, Arc<Error>)> {
        self.shared.state().errors()
    }

    /// Removes the SCSI devices whose unit is gone on the array, except those of the journal's
    /// volumes, as [`Engine::reap_except_volumes_of`] does. It may be called while the reconciler
    /// [runs](Self::run). A process that cannot call this uses
    /// [`Engine::reap_except_volumes_in`] with the journal's directory.
    ///
    /// # Errors
    /// As [`Engine::reap`].
    pub fn reap(&self, request: &ReapRequest, deadline: Deadline) -> Result<ReapReport> {
        self.engine
            .reap_except_volumes_of(&self.journal, request, deadline)
    }

    /// Keeps the volumes as they are wanted, until it is [stopped](Self::stop). The failure of
    /// a step is an [`Event`](super::Event), and the step is tried again. Once a volume with a
    /// login is wanted, or if an earlier process left one in the journal, it also recovers the
    /// sessions of this machine that lunbd made: see [`Engine::recover_sessions`].
    ///
    /// # Errors
    /// `InUse` if it runs already; where it cannot be begun.
    pub fn run(&self) -> Result<()> {
        self.run_until(None)
    }

    /// Ends [`run`](Self::run) for good: it returns when the running steps have finished. A
    /// process that cannot wait for that may exit: the next process continues from the journal.
    pub fn stop(&self) {
        self.shared.state().run.stop();
        self.shared.wake.notify_all();
    }
}
