//! What a reconciler knows: what is wanted, what stands, what is being done and
//! when what failed is tried again.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::actual::Actual;
use super::desired::Desired;
use super::event::Event;
use super::options::Options;
use super::plan::{Plan, Step, StepKind, plan, step_for};
use crate::deadline::Backoff;
use crate::engine::{Cause, Condition, Surveyed, Treatment};
use crate::error::{Error, ErrorKind, Retry};
use crate::id::{Source, VolumeId};

/// What a reconciler has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[non_exhaustive]
pub struct Counters {
    /// How often its loop woke, by an event, a step's end, a timer or a call.
    pub wakeups: u64,
    /// Looks at everything.
    pub resyncs: u64,
    /// Looks at those volumes alone that an event was about.
    pub looks: u64,
    /// Plans made.
    pub plans: u64,
    /// Steps that came to their end.
    pub steps: u64,
    /// Steps that failed.
    pub failures: u64,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) desired: Desired,
    /// Counts the changes of what is wanted.
    wish: u64,
    pub(super) actual: Actual,
    tracked: BTreeMap<VolumeId, Tracked>,
    /// Whose a part of a device path is: `2:0:0:1`, `nbd3`, `dm-0`.
    by_component: HashMap<String, VolumeId>,
    pub(super) look: Look,
    pub(super) replan: bool,
    pub(super) plan: Plan,
    fresh: VecDeque<Job>,
    again: VecDeque<Job>,
    at_work: usize,
    retrying: usize,
    retry_at: Option<Instant>,
    /// Counts the steps that ended, so that a look that began before is not
    /// believed about their volumes.
    ended: u64,
    pub(super) stopped: bool,
    pub(super) drive: Drive,
    pub(super) counters: Counters,
}

/// Whether somebody runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Drive {
    #[default]
    Nobody,
    Somebody,
    /// The workers are to go home.
    Over,
}

/// What is to be looked at.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) all: bool,
    some: BTreeSet<VolumeId>,
    /// Not before this.
    at: Option<Instant>,
    /// When the last ended, and how long it took.
    last: Option<(Instant, Duration)>,
}

/// What is looked at.
pub(super) enum Scope {
    All,
    Some(BTreeSet<VolumeId>),
}

/// A volume beside what stands of it.
#[derive(Debug, Default)]
struct Tracked {
    busy: bool,
    /// What a worker does with it now.
    doing: Option<StepKind>,
    failure: Option<Failure>,
    /// The kernel said that its link died, then.
    died: Option<Instant>,
    treatment: Option<Box<Treatment>>,
    /// Its missing paths were asked for and did not come.
    asked: bool,
    /// It was said to be lost.
    lost: bool,
    /// What it was refused for.
    refused: Option<String>,
    /// The count of ended steps when its own last ended.
    ended: u64,
}

#[derive(Debug)]
struct Failure {
    error: Arc<Error>,
    tries: u32,
    pauses: Backoff,
    /// `None` where something must change first.
    next: Option<Instant>,
}

/// A step that a worker takes.
pub(super) struct Job {
    pub(super) step: Step,
    wish: u64,
    /// It has failed before.
    pub(super) again: bool,
    pub(super) tries: u32,
    pub(super) treatment: Option<Box<Treatment>>,
}

/// How a step ended.
pub(super) enum Done {
    /// It is as this says.
    Stands(Box<Surveyed>, bool),
    /// Nothing of it is left.
    Gone {
        safe_to_unmap: bool,
    },
    /// It was asked, and is the one, and serves.
    Serves,
    /// It came to its end; how it stands is to be looked for.
    Finished,
    /// An NBD device that still has no server.
    Sick {
        treatment: Option<Box<Treatment>>,
        error: Error,
        budget_left: Option<Duration>,
    },
    /// It was asked, and is otherwise than sysfs shows.
    Differs(Condition, String),
    Failed(Error),
}

fn sooner(one: Option<Instant>, two: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(two).min()
}

impl Look {
    /// After something happened: a moment later, for what comes with it, and so
    /// that looks take a sixth of the time at the most.
    fn soon(&mut self) {
        const MOMENT: Duration = Duration::from_millis(30);
        const SHARE: u32 = 5;
        let rest = self.last.map(|(end, took)| end + took * SHARE);
        let at = (Instant::now() + MOMENT).max(rest.unwrap_or_else(Instant::now));
        self.at.get_or_insert(at);
    }

    fn is_wanted(&self) -> bool {
        self.all || !self.some.is_empty()
    }

    pub(super) fn now(&mut self) {
        (self.all, self.at) = (true, None);
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.is_wanted()
            .then(|| self.at.unwrap_or_else(Instant::now))
    }

    /// What is to be looked at now.
    pub(super) fn take(&mut self) -> Option<Scope> {
        let due = self.due().is_some_and(|at| at <= Instant::now());
        if !due {
            return None;
        }
        self.at = None;
        let some = std::mem::take(&mut self.some);
        Some(if std::mem::take(&mut self.all) {
            Scope::All
        } else {
            Scope::Some(some)
        })
    }

    pub(super) fn ended(&mut self, began: Instant) {
        self.last = Some((Instant::now(), began.elapsed()));
    }

    /// It failed: the same, in a while.
    pub(super) fn later(&mut self) {
        self.all = true;
        self.at = Some(Instant::now() + Duration::from_secs(1));
    }
}

impl State {
    pub(super) fn want(&mut self, desired: Desired) {
        for (volume, tracked) in &mut self.tracked {
            if self.desired.get(volume) != desired.get(volume) {
                (tracked.failure, tracked.refused) = (None, None);
                tracked.asked = false;
            }
        }
        self.desired = desired;
        self.wish += 1;
        self.replan = true;
    }

    /// Everything is tried again now.
    pub(super) fn forgive(&mut self) {
        for tracked in self.tracked.values_mut() {
            (tracked.asked, tracked.refused) = (false, None);
            if let Some(failure) = &mut tracked.failure {
                failure.next = Some(Instant::now());
            }
        }
        self.replan = true;
    }

    pub(super) fn is_idle(&self) -> bool {
        let queued = !self.fresh.is_empty() || !self.again.is_empty();
        !queued && self.at_work == 0 && !self.replan && !self.look.is_wanted()
    }

    pub(super) fn epoch(&self) -> u64 {
        self.ended
    }

    /// When there is something to do though nothing happens.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        sooner(self.look.due(), self.retry_at)
    }

    pub(super) fn retry_is_due(&self) -> bool {
        self.retry_at.is_some_and(|at| at <= Instant::now())
    }

    /// Whether the loop is to be woken for it.
    pub(super) fn take_in(&mut self, cause: &Cause) -> Option<Event> {
        match cause {
            Cause::Device { devpath } => {
                let whose = devpath
                    .split('/')
                    .find_map(|part| self.by_component.get(part));
                if let Some(volume) = whose.filter(|volume| !self.is_busy(volume)) {
                    self.look.some.insert(volume.clone());
                    self.look.soon();
                }
            }
            Cause::Transport => self.try_lost_paths(),
            Cause::LookAgain => {
                self.look.all = true;
                self.look.soon();
            }
            Cause::AskAgain => {
                for there in self.actual.volumes.values_mut() {
                    if there.spec.nbd.is_some() && there.condition == Condition::Complete {
                        let doubt = "the death of its link may have been missed";
                        there.doubt = Some(doubt.to_owned());
                    }
                }
                self.replan = true;
            }
            Cause::LinkDead(index) => {
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

    /// Paths may have come back: who lacks one is looked at, and tried again.
    fn try_lost_paths(&mut self) {
        for (volume, tracked) in &mut self.tracked {
            let there = self.actual.get(volume);
            let spec = there.map(|there| &there.spec).or(self.desired.get(volume));
            if tracked.busy || spec.is_none_or(|spec| spec.nbd.is_some()) {
                continue;
            }
            if let Some(failure) = &mut tracked.failure {
                failure.next = Some(Instant::now());
                self.replan = true;
            }
            tracked.asked = false;
        }
        for there in self.actual.volumes.values() {
            let lacks = there.condition != Condition::Complete || !there.missing.is_empty();
            if there.spec.nbd.is_none() && lacks && !self.is_busy(&there.volume) {
                self.look.some.insert(there.volume.clone());
                self.look.soon();
            }
        }
    }

    fn is_busy(&self, volume: &VolumeId) -> bool {
        self.tracked.get(volume).is_some_and(|tracked| tracked.busy)
    }

    /// Its NBD link died.
    fn mark_dead(&mut self, volume: &VolumeId) -> Option<Event> {
        let there = self.actual.volumes.get_mut(volume)?;
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

    /// Takes in a look that began at `epoch`. With `doubt`, what is met for the
    /// first time is to be asked.
    pub(super) fn merge(
        &mut self,
        found: Vec<Surveyed>,
        scope: &Scope,
        epoch: u64,
        doubt: bool,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        let mut gone: BTreeSet<VolumeId> = match scope {
            Scope::All => self.actual.volumes.keys().cloned().collect(),
            Scope::Some(volumes) => volumes.clone(),
        };
        for there in found {
            gone.remove(&there.volume);
            if self.is_newer(&there.volume, epoch) {
                continue;
            }
            events.extend(self.merge_one(there, doubt));
        }
        for volume in gone {
            if !self.is_newer(&volume, epoch) {
                self.forget(&volume);
            }
        }
        self.replan = true;
        events
    }

    /// What is known of it is newer than a look of that epoch.
    fn is_newer(&self, volume: &VolumeId, epoch: u64) -> bool {
        let tracked = self.tracked.get(volume);
        tracked.is_some_and(|tracked| tracked.busy || tracked.ended > epoch)
    }

    fn merge_one(&mut self, mut there: Surveyed, doubt: bool) -> Option<Event> {
        let tracked = self.tracked.entry(there.volume.clone()).or_default();
        let known = self.actual.volumes.get(&there.volume);
        if tracked.asked {
            there.untaken.clear();
        }
        let stands = matches!(there.condition, Condition::Complete | Condition::LinkDead);
        there.doubt = match known {
            Some(known) => known.doubt.clone().filter(|_| stands),
            None if doubt && stands => {
                Some("nobody has asked it since this process started".to_owned())
            }
            None => None,
        };
        if tracked.died.is_some() && there.condition == Condition::Complete {
            there.condition = Condition::LinkDead;
            "its link has died".clone_into(&mut there.seen);
        }
        let before = known.is_some_and(|known| known.condition == Condition::Complete);
        let now = there.condition == Condition::Complete;
        let volume = there.volume.clone();
        let event = if before && !now && !tracked.lost {
            tracked.lost = true;
            Some(Event::Lost {
                volume,
                why: there.seen.clone(),
                budget_left: budget(&there),
            })
        } else if now && there.doubt.is_none() && tracked.lost {
            tracked.lost = false;
            Some(Event::Healed { volume })
        } else {
            None
        };
        self.know(there);
        event
    }

    fn know(&mut self, there: Surveyed) {
        let volume = &there.volume;
        for component in components(&there) {
            self.by_component.insert(component, volume.clone());
        }
        self.actual.volumes.insert(volume.clone(), there);
    }

    /// Nothing of it is left.
    fn forget(&mut self, volume: &VolumeId) {
        if let Some(there) = self.actual.volumes.remove(volume) {
            for component in components(&there) {
                if self.by_component.get(&component) == Some(volume) {
                    self.by_component.remove(&component);
                }
            }
        }
        if let Some(tracked) = self.tracked.get_mut(volume) {
            (tracked.died, tracked.treatment, tracked.lost) = (None, None, false);
            tracked.asked = false;
        }
        let wanted = self.desired.get(volume).is_some();
        if !wanted && !self.is_busy(volume) {
            self.tracked.remove(volume);
        }
    }

    /// Plans, and has the workers do what can be done now.
    pub(super) fn plan_now(&mut self) -> Vec<Event> {
        let now = Instant::now();
        let mut events = Vec::new();
        self.counters.plans += 1;
        (self.replan, self.retry_at) = (false, None);
        self.plan = plan(&self.desired, &self.actual);
        for step in &self.plan.steps {
            let tracked = self.tracked.entry(step.volume.clone()).or_default();
            if tracked.busy {
                continue;
            }
            let refused = step.kind == StepKind::Refused;
            if refused && tracked.refused.as_deref() != Some(&*step.reason) {
                tracked.refused = Some(step.reason.clone().into_owned());
                let error = Error::new(ErrorKind::InUse, step.to_string());
                events.push(Event::Failed {
                    volume: step.volume.clone(),
                    step: step.kind,
                    error: Arc::new(error),
                    next_try: None,
                });
            }
            if !step.kind.acts() || !step.after.is_empty() {
                continue;
            }
            let again = tracked.failure.is_some();
            let mut tries = 0;
            if let Some(failure) = &tracked.failure {
                tries = failure.tries;
                if failure.next.is_none_or(|next| next > now) {
                    self.retry_at = sooner(self.retry_at, failure.next);
                    continue;
                }
            }
            tracked.busy = true;
            let job = Job {
                step: step.clone(),
                wish: self.wish,
                again,
                tries,
                treatment: None,
            };
            if again {
                self.again.push_back(job);
            } else {
                self.fresh.push_back(job);
            }
        }
        events
    }

    /// A step for a worker. Of `threads`, those that failed before are given half.
    pub(super) fn take_job(&mut self, threads: usize) -> Option<Job> {
        loop {
            let mut job = self.fresh.pop_front();
            if job.is_none() && self.retrying < (threads / 2).max(1) {
                job = self.again.pop_front();
            }
            let mut job = job?;
            let tracked = self.tracked.entry(job.step.volume.clone()).or_default();
            if job.wish != self.wish {
                // It may be wanted otherwise by now.
                tracked.busy = false;
                self.replan = true;
                continue;
            }
            job.treatment = tracked.treatment.take();
            tracked.doing = Some(job.step.kind);
            if job.step.kind == StepKind::Attach {
                tracked.died = None;
            }
            self.at_work += 1;
            self.retrying += usize::from(job.again);
            return Some(job);
        }
    }

    pub(super) fn settle(&mut self, job: &Job, done: Done, options: &Options) -> Vec<Event> {
        let volume = &job.step.volume;
        self.at_work -= 1;
        self.retrying -= usize::from(job.again);
        self.ended += 1;
        self.counters.steps += 1;
        let ended = self.ended;
        let tracked = self.tracked.entry(volume.clone()).or_default();
        (tracked.busy, tracked.ended, tracked.doing) = (false, ended, None);
        let failed = matches!(done, Done::Failed(_) | Done::Sick { .. });
        if !failed {
            tracked.failure = None;
        }
        let mut events = Vec::new();
        match done {
            Done::Stands(there, changed) => events.extend(self.stands(*there, changed)),
            Done::Gone { safe_to_unmap } => {
                self.forget(volume);
                events.push(Event::Detached {
                    volume: volume.clone(),
                    safe_to_unmap,
                });
            }
            Done::Serves => events.extend(self.serves(volume)),
            Done::Finished => self.look_at(volume),
            Done::Differs(condition, seen) => {
                if let Some(there) = self.actual.volumes.get_mut(volume) {
                    (there.condition, there.seen, there.doubt) = (condition, seen, None);
                }
            }
            Done::Sick {
                treatment,
                error,
                budget_left,
            } => {
                let gone = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Vanished);
                if gone {
                    self.look_at(volume);
                }
                let why = error.to_string();
                if let Some(there) = self.actual.volumes.get_mut(volume) {
                    (there.condition, there.seen) = (Condition::LinkDead, why.clone());
                }
                self.fail(volume, job.step.kind, error, options);
                let tracked = self.tracked.entry(volume.clone()).or_default();
                tracked.treatment = treatment.filter(|_| !gone);
                tracked.lost = true;
                events.push(Event::Lost {
                    volume: volume.clone(),
                    why,
                    budget_left,
                });
            }
            Done::Failed(error) => {
                self.look_at(volume);
                let (error, next_try) = self.fail(volume, job.step.kind, error, options);
                events.push(Event::Failed {
                    volume: volume.clone(),
                    step: job.step.kind,
                    error,
                    next_try,
                });
            }
        }
        let there = self.actual.get(volume);
        let goes_on = step_for(volume, self.desired.get(volume), there).is_some();
        let freed = matches!(job.step.kind, StepKind::Detach | StepKind::Finish);
        self.replan |= goes_on || freed || failed || job.wish != self.wish;
        events
    }

    fn look_at(&mut self, volume: &VolumeId) {
        self.look.some.insert(volume.clone());
        self.look.soon();
    }

    /// It was attached.
    fn stands(&mut self, there: Surveyed, changed: bool) -> Option<Event> {
        let volume = there.volume.clone();
        let tracked = self.tracked.entry(volume.clone()).or_default();
        (tracked.lost, tracked.treatment) = (false, None);
        tracked.asked = !there.missing.is_empty();
        let died = tracked.died.is_some();
        let before = self.actual.volumes.get(&volume);
        let was_handed_out = before.is_some_and(|before| before.node.is_some());
        let same = before.is_some_and(|before| {
            before.node == there.node
                && before.paths == there.paths
                && before.condition == Condition::Complete
        });
        let node = there.node.clone().unwrap_or_default();
        let event = if changed || !was_handed_out {
            let size = there.size.unwrap_or_default();
            let volume = volume.clone();
            Some(Event::Attached { volume, node, size })
        } else if same {
            None
        } else {
            Some(Event::Changed {
                volume: volume.clone(),
                node,
                paths: there.paths.len(),
                missing: there.missing.iter().map(ToString::to_string).collect(),
            })
        };
        self.know(there);
        if died {
            let lost = self.mark_dead(&volume);
            return event.or(lost);
        }
        event
    }

    /// It was asked, and answers.
    fn serves(&mut self, volume: &VolumeId) -> Option<Event> {
        let tracked = self.tracked.entry(volume.clone()).or_default();
        (tracked.died, tracked.treatment) = (None, None);
        let lost = std::mem::take(&mut tracked.lost);
        let there = self.actual.volumes.get_mut(volume)?;
        (there.condition, there.doubt) = (Condition::Complete, None);
        "it answers".clone_into(&mut there.seen);
        lost.then(|| Event::Healed {
            volume: volume.clone(),
        })
    }

    fn fail(
        &mut self,
        volume: &VolumeId,
        kind: StepKind,
        error: Error,
        options: &Options,
    ) -> (Arc<Error>, Option<Duration>) {
        /// Requests wait for it, and their time is limited.
        const LONGEST_WITHOUT_SERVER: Duration = Duration::from_secs(10);
        self.counters.failures += 1;
        let tracked = self.tracked.entry(volume.clone()).or_default();
        let error = Arc::new(error);
        let (shortest, longest) = (options.shortest_retry, options.longest_retry);
        let (tries, mut pauses) = match &tracked.failure {
            Some(failure) => (failure.tries, failure.pauses.clone()),
            None => (0, Backoff::new(shortest, longest)),
        };
        let mut pause = (error.retry() != Retry::Never).then(|| pauses.pause());
        if matches!(kind, StepKind::Heal | StepKind::Prove) {
            pause = pause.map(|pause| pause.min(LONGEST_WITHOUT_SERVER));
        }
        tracked.failure = Some(Failure {
            error: Arc::clone(&error),
            tries: tries.saturating_add(1),
            pauses,
            next: pause.map(|pause| Instant::now() + pause),
        });
        (error, pause)
    }

    /// The last error of a volume.
    pub(super) fn error(&self, volume: &VolumeId) -> Option<Arc<Error>> {
        let failure = self.tracked.get(volume)?.failure.as_ref()?;
        Some(Arc::clone(&failure.error))
    }

    pub(super) fn errors(&self) -> Vec<(VolumeId, Arc<Error>)> {
        let failed = self.tracked.iter().filter_map(|(volume, tracked)| {
            let failure = tracked.failure.as_ref()?;
            Some((volume.clone(), Arc::clone(&failure.error)))
        });
        failed.collect()
    }

    pub(super) fn at_work(&self) -> Vec<(VolumeId, StepKind)> {
        let at_work = self
            .tracked
            .iter()
            .filter_map(|(volume, tracked)| Some((volume.clone(), tracked.doing?)));
        at_work.collect()
    }

    pub(super) fn busy(&self) -> impl Iterator<Item = &VolumeId> {
        let busy = self.tracked.iter().filter(|(_, tracked)| tracked.busy);
        busy.map(|(volume, _)| volume)
    }

    /// What stands, where it is as it is wanted.
    pub(super) fn attached(&self, volume: &VolumeId) -> Option<&Surveyed> {
        let (wanted, there) = (self.desired.get(volume)?, self.actual.get(volume)?);
        let stands = there.condition == Condition::Complete
            && there.under_way.is_none()
            && there.doubt.is_none();
        (stands && there.spec == *wanted).then_some(there)
    }
}

fn budget(there: &Surveyed) -> Option<Duration> {
    let nbd = there.spec.nbd.as_ref()?;
    Some(Duration::from_millis(nbd.dead_connection_timeout_ms))
}

/// The parts of device paths by which its events are known.
fn components(there: &Surveyed) -> Vec<String> {
    let mut components: Vec<String> = there.paths.iter().map(ToString::to_string).collect();
    components.extend(there.nbd_index.map(crate::id::NbdIndex::name));
    let node = there.node.as_ref().and_then(|node| node.file_name());
    components.extend(node.map(|name| name.to_string_lossy().into_owned()));
    for source in &there.spec.sources {
        if let Source::Scsi(hctl) = source {
            components.push(hctl.to_string());
        }
    }
    components
}
