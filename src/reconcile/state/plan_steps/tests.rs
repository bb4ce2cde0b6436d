use std::time::Duration;

use crate::engine::journal::VolumeSpec;
use crate::engine::{AttachRequest, ChangeEvent, Condition, VolumeStatus};
use crate::error::{Error, ErrorKind};
use crate::id::{Source, VolumeId};
use crate::reconcile::desired::Desired;
use crate::reconcile::job::{Job, Outcome};
use crate::reconcile::options::Options;
use crate::reconcile::plan::StepKind;
use crate::reconcile::state::State;

fn id(number: u32) -> VolumeId {
    format!("pvc-{number}").parse().unwrap()
}

fn request(number: u32) -> AttachRequest {
    let source: Source = format!("nbd://h{number}/{number}").parse().unwrap();
    AttachRequest::new(source)
}

/// A state with this many wanted volumes, each of its own server.
fn wanting(volumes: u32) -> State {
    let mut desired = Desired::default();
    for number in 0..volumes {
        desired.insert(id(number), &request(number)).unwrap();
    }
    let mut state = State::default();
    state.set_desired(desired);
    state
}

fn there(number: u32) -> VolumeStatus {
    let spec = VolumeSpec::of(&request(number));
    VolumeStatus::new(id(number), spec, Condition::Complete)
}

fn refused() -> Outcome {
    Outcome::Failed(Error::new(ErrorKind::Unreachable, "no server"))
}

fn take_all(state: &mut State) -> Vec<Job> {
    state.plan_and_queue();
    std::iter::from_fn(|| state.take_job(8)).collect()
}

/// Fails the first step of each volume. The retries are due after an hour.
fn fail_each_once(state: &mut State) {
    let hour = Duration::from_secs(3600);
    let patient = Options::default().retry(hour, hour);
    loop {
        let jobs = take_all(state);
        if jobs.is_empty() {
            return;
        }
        for mut job in jobs {
            state.end_step(&mut job, refused(), &patient);
        }
    }
}

#[test]
fn a_detach_is_not_behind_attaches_however_many_there_are_and_however_long_they_take() {
    let mut state = wanting(20);
    let attaches = take_all(&mut state);
    assert_eq!(attaches.len(), 8, "more than there are threads");
    // Volume 99 is not wanted.
    state.set_status(there(99));
    state.plan_and_queue();
    let job = state.take_job(8).expect("a thread for a detach");
    assert_eq!(job.step.kind, StepKind::Detach);
}

#[test]
fn a_first_attach_at_a_server_does_not_wait_for_those_at_another_server() {
    let mut state = State::default();
    let mut desired = Desired::default();
    let last = 999;
    let mut want = |number, source: String| {
        let request = AttachRequest::new(source.parse::<Source>().unwrap());
        desired.insert(id(number), &request).unwrap();
    };
    for number in 0..100 {
        want(number, format!("nbd://silent/{number}"));
    }
    want(last, "nbd://answers/1".to_owned());
    state.set_desired(desired);
    let first = take_all(&mut state);
    let is_served = first.iter().any(|job| job.step.volume == id(last));
    assert!(is_served && first.len() == 8, "{} steps", first.len());
}

#[test]
fn a_volume_of_a_server_that_is_back_does_not_wait_for_those_of_one_that_is_away() {
    let mut state = State::default();
    let mut desired = Desired::default();
    let mut want = |volume: &str, source: &str| {
        let request = AttachRequest::new(source.parse::<Source>().unwrap());
        desired.insert(volume.parse().unwrap(), &request).unwrap();
    };
    for number in 0..100 {
        want(&format!("away-{number}"), &format!("nbd://away/{number}"));
    }
    want("back", "nbd://back/1");
    state.set_desired(desired);
    // Each has failed once, and all are due for a retry.
    fail_each_once(&mut state);
    state.reset_backoff(Duration::ZERO);
    let _hang = take_all(&mut state);
    let at_work = state.at_work();
    let is_served = at_work.iter().any(|work| work.volume.as_str() == "back");
    assert!(is_served && at_work.len() <= 4, "{at_work:?}");
}

#[test]
fn a_volume_whose_paths_may_be_back_does_not_wait_for_those_that_hang() {
    let mut state = wanting(16);
    let mut desired = state.desired().clone();
    let source: Source = "scsi:2:0:0:1".parse().unwrap();
    desired.insert(id(77), &AttachRequest::new(source)).unwrap();
    state.set_desired(desired);
    fail_each_once(&mut state);
    // It waits for its retry behind the others.
    state.reset_backoff(Duration::ZERO);
    let _hang = take_all(&mut state);
    let hangs = state.at_work();
    assert!(
        !hangs.is_empty() && hangs.iter().all(|work| work.volume != id(77)),
        "{hangs:?}"
    );
    state.handle_change(&ChangeEvent::Transport { host: None });
    state.plan_and_queue();
    let job = state.take_job(8).expect("a thread for what is back");
    assert_eq!(job.step.volume, id(77));
}

#[test]
fn a_volume_whose_paths_may_be_back_does_not_wait_for_many_others_whose_paths_may_be_back() {
    let mut state = State::default();
    let mut desired = Desired::default();
    let hang = (0..40).map(|lun| format!("scsi:2:0:0:{lun}"));
    for (number, source) in (0..).zip(hang.chain(["scsi:3:0:0:1".to_owned()])) {
        let request = AttachRequest::new(source.parse::<Source>().unwrap());
        desired.insert(id(number), &request).unwrap();
    }
    state.set_desired(desired);
    fail_each_once(&mut state);
    state.handle_change(&ChangeEvent::Transport { host: None });
    let first = take_all(&mut state);
    let is_served = first.iter().any(|job| job.step.volume == id(40));
    assert!(is_served && first.len() < 20, "{} steps", first.len());
}

#[test]
fn what_is_back_is_tried_also_where_others_of_its_host_hang() {
    let mut state = State::default();
    let mut desired = Desired::default();
    for lun in 0..3 {
        let source: Source = format!("scsi:2:0:0:{lun}").parse().unwrap();
        desired
            .insert(id(lun), &AttachRequest::new(source))
            .unwrap();
    }
    state.set_desired(desired);
    let hour = Duration::from_secs(3600);
    let patient = Options::default().retry(hour, hour);
    for mut job in take_all(&mut state) {
        state.end_step(&mut job, refused(), &patient);
    }
    state.reset_backoff(Duration::ZERO);
    let hang = take_all(&mut state);
    assert_eq!(hang.len(), 2, "a quarter of the threads");
    state.handle_change(&ChangeEvent::Transport { host: None });
    assert_eq!(take_all(&mut state).len(), 1);
}
