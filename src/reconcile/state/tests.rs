//! What the tests of the state share.

use super::*;
use crate::engine::AttachRequest;
use crate::engine::journal::VolumeSpec;
use crate::error::{ErrorKind, MissingPath};
use crate::id::{NbdIndex, RouteKind, Source};
use crate::reconcile::event::Event;
use crate::reconcile::job::{Job, Outcome};
use crate::reconcile::refresh::Scope;
use crate::reconcile::step::StepKind;

pub(super) fn id(number: u32) -> VolumeId {
    format!("pvc-{number}").parse().unwrap()
}

pub(super) fn request(source: &str) -> AttachRequest {
    AttachRequest::new(source.parse::<Source>().unwrap())
}

/// A request for an NBD volume of its own server.
pub(super) fn nbd_request(number: u32) -> AttachRequest {
    request(&format!("nbd://h{number}/{number}"))
}

/// A state with these wanted volumes, numbered from 0. It retries at once.
pub(super) fn wanting(requests: impl IntoIterator<Item = AttachRequest>) -> State {
    let mut desired = Desired::default();
    for (number, request) in (0..).zip(requests) {
        desired.insert(id(number), &request).unwrap();
    }
    let retries_at_once = Options::default().retry(Duration::ZERO, Duration::ZERO);
    let mut state = State::new(retries_at_once);
    // The first refresh has found nothing.
    state.refresh.take();
    state.schedule.workers = Workers::new(8, false);
    state.set_desired(desired);
    state
}

/// A state with this many wanted NBD volumes.
pub(super) fn wanting_nbd(volumes: u32) -> State {
    wanting((0..volumes).map(nbd_request))
}

/// Has failed steps retried after an hour.
pub(super) fn retry_late(state: &mut State) {
    let hour = Duration::from_secs(3600);
    state.options = Options::default().retry(hour, hour);
}

/// The status of an attached NBD volume.
pub(super) fn nbd_status(number: u32) -> VolumeStatus {
    let spec = VolumeSpec::of(&nbd_request(number));
    let mut status = VolumeStatus::new(id(number), spec, Condition::Complete);
    status.nbd_index = NbdIndex::new(number);
    status.node = Some(format!("/dev/nbd{number}").into());
    status
}

/// The status of an attached SCSI volume that has one path, and lacks the other where
/// `is_missing`.
pub(super) fn unit_status(is_missing: bool) -> VolumeStatus {
    let spec = VolumeSpec::of(&request("scsi:2:0:0:1"));
    let mut status = VolumeStatus::new(id(0), spec, Condition::Complete);
    status.node = Some("/dev/sdb".into());
    if is_missing {
        let hctl = "3:0:0:1".parse().unwrap();
        let via = RouteKind::Address { hctl };
        status
            .missing
            .push(MissingPath::new(via, &"it is not there"));
    }
    status
}

pub(super) fn failed(kind: ErrorKind) -> Outcome {
    Outcome::Failed(Error::new(kind, "the test fails the step"))
}

/// The steps that can begin now. As in the loop, a plan is made only when it is due.
pub(super) fn take_all(state: &mut State) -> Vec<Job> {
    if state.schedule.is_plan_due() {
        state.plan_and_queue();
    }
    std::iter::from_fn(|| state.take_job()).collect()
}

/// The only step that can begin now.
#[track_caller]
pub(super) fn take(state: &mut State, kind: StepKind) -> Job {
    let mut jobs = take_all(state);
    let job = jobs.pop().expect("a step");
    assert_eq!(job.step.kind, kind, "{}", job.step);
    assert!(jobs.is_empty());
    job
}

/// Does the only step that can begin now.
#[track_caller]
pub(super) fn end(state: &mut State, kind: StepKind, outcome: Outcome) -> Vec<Event> {
    let job = take(state, kind);
    state.end_step(job, outcome)
}

/// A refresh that finds only this volume.
pub(super) fn refresh(state: &mut State, status: VolumeStatus) -> Vec<Event> {
    let ended_steps = state.counters.steps;
    state.merge(vec![status], &Scope::All, ended_steps, true)
}
