use std::time::Duration;

use super::super::jobs::{Done, Job};
use super::super::options::Options;
use super::*;
use crate::engine::AttachRequest;
use crate::engine::journal::VolumeSpec;
use crate::error::ErrorKind;

fn id(number: u32) -> VolumeId {
    format!("pvc-{number}").parse().unwrap()
}

/// Tried again at once.
fn impatient() -> Options {
    Options::default().retry(Duration::ZERO, Duration::ZERO)
}

/// A SCSI volume of two paths, as sysfs shows it.
fn unit_there() -> Surveyed {
    let source = |host: u32| -> Source { format!("scsi:{host}:0:0:1").parse().unwrap() };
    let request = AttachRequest::new(source(2)).path(source(3));
    let mut there = Surveyed::new(id(0), VolumeSpec::of(&request), Condition::Complete);
    there.paths = ["2:0:0:1", "3:0:0:1"]
        .map(|path| path.parse().unwrap())
        .into();
    there.node = Some("/dev/dm-0".into());
    there
}

/// The only step that can be done now.
#[track_caller]
fn take(state: &mut State, kind: StepKind) -> Job {
    state.plan_now();
    let job = state.take_job(8).expect("a step");
    assert_eq!(job.step.kind, kind, "{}", job.step);
    assert!(state.take_job(8).is_none());
    job
}

fn look(state: &mut State, there: Surveyed) -> Vec<Event> {
    let epoch = state.epoch();
    state.merge(vec![there], &Scope::All, epoch, true)
}

#[test]
fn a_device_that_is_another_unit_is_not_attached_again_by_the_word_of_sysfs() {
    let mut state = State::default();
    let mut desired = Desired::default();
    let request = unit_there().spec.request().unwrap();
    desired.insert(id(0), &request).unwrap();
    state.want(desired);
    state.merge(vec![unit_there()], &Scope::All, 0, true);
    let mut job = take(&mut state, StepKind::Prove);
    let seen = "naa.2 answers at 2:0:0:1, where naa.1 was scanned";
    let differs = Done::Differs(Condition::Changed, seen.to_owned());
    state.settle(&mut job, differs, &impatient());
    // The device is the same, and so is what the kernel read when it scanned it.
    look(&mut state, unit_there());
    assert!(state.attached(&id(0)).is_none(), "it is handed out");

    let mut job = take(&mut state, StepKind::Attach);
    assert_eq!(job.step.reason, seen);
    let hour = Duration::from_secs(3600);
    let patient = Options::default().retry(hour, hour);
    let mounted = Done::Failed(Error::new(ErrorKind::InUse, "mounted"));
    state.settle(&mut job, mounted, &patient);
    look(&mut state, unit_there());
    assert!(state.attached(&id(0)).is_none(), "it is handed out");
    state.plan_now();
    assert!(state.take_job(8).is_none(), "it waits");
    assert_eq!(state.errors().len(), 1);
    assert_eq!(state.step(&id(0)).unwrap().reason, seen);

    state.forgive();
    let mut job = take(&mut state, StepKind::Attach);
    state.settle(&mut job, Done::Stands(Box::new(unit_there())), &patient);
    look(&mut state, unit_there());
    assert!(state.attached(&id(0)).is_some());
}
