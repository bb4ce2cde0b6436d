use std::time::Duration;

use super::*;
use crate::engine::AttachRequest;
use crate::engine::journal::VolumeSpec;
use crate::error::{Error, ErrorKind};
use crate::id::Source;
use crate::reconcile::desired::Desired;
use crate::reconcile::job::{Job, Outcome};
use crate::reconcile::options::Options;
use crate::reconcile::plan::StepKind;

fn id(number: u32) -> VolumeId {
    format!("pvc-{number}").parse().unwrap()
}

/// Options that retry at once.
fn impatient() -> Options {
    Options::default().retry(Duration::ZERO, Duration::ZERO)
}

/// A SCSI volume of two paths, as sysfs shows it.
fn unit_there() -> VolumeStatus {
    let source = |host: u32| -> Source { format!("scsi:{host}:0:0:1").parse().unwrap() };
    let request = AttachRequest::new(source(2)).path(source(3));
    let mut there = VolumeStatus::new(id(0), VolumeSpec::of(&request), Condition::Complete);
    there.paths = ["2:0:0:1", "3:0:0:1"]
        .map(|path| path.parse().unwrap())
        .into();
    there.node = Some("/dev/dm-0".into());
    there
}

/// A state with one volume that was verified and is attached.
fn unit_attached() -> State {
    let mut state = State::default();
    let mut desired = Desired::default();
    let request = unit_there().spec.request().unwrap();
    desired.insert(id(0), &request).unwrap();
    state.set_desired(desired);
    state.merge(vec![unit_there()], &Scope::All, 0, true);
    let mut job = take(&mut state, StepKind::Prove);
    state.end_step(&mut job, Outcome::Serves, &impatient());
    assert!(state.attached(&id(0)).is_some());
    state
}

/// Takes the only step that can be done now.
#[track_caller]
fn take(state: &mut State, kind: StepKind) -> Job {
    state.plan_and_queue();
    let job = state.take_job(8).expect("a step");
    assert_eq!(job.step.kind, kind, "{}", job.step);
    assert!(state.take_job(8).is_none());
    job
}

fn look(state: &mut State, there: VolumeStatus) -> Vec<Event> {
    let ended_steps = state.counters.steps;
    state.merge(vec![there], &Scope::All, ended_steps, true)
}

#[test]
fn a_device_that_is_another_unit_is_not_attached_again_by_the_word_of_sysfs() {
    let mut state = State::default();
    let mut desired = Desired::default();
    let request = unit_there().spec.request().unwrap();
    desired.insert(id(0), &request).unwrap();
    state.set_desired(desired);
    state.merge(vec![unit_there()], &Scope::All, 0, true);
    let mut job = take(&mut state, StepKind::Prove);
    let seen = "naa.2 answers at 2:0:0:1, where naa.1 was scanned";
    let differs = Outcome::Differs(Condition::Changed, seen.to_owned());
    state.end_step(&mut job, differs, &impatient());
    // Sysfs still shows the same device, with the data that the kernel read at its scan.
    look(&mut state, unit_there());
    assert!(state.attached(&id(0)).is_none(), "it is handed out");

    let mut job = take(&mut state, StepKind::Attach);
    assert_eq!(job.step.reason, seen);
    let hour = Duration::from_secs(3600);
    let patient = Options::default().retry(hour, hour);
    let mounted = Outcome::Failed(Error::new(ErrorKind::InUse, "mounted"));
    state.end_step(&mut job, mounted, &patient);
    look(&mut state, unit_there());
    assert!(state.attached(&id(0)).is_none(), "it is handed out");
    state.plan_and_queue();
    assert!(state.take_job(8).is_none(), "it waits");
    assert_eq!(state.errors().len(), 1);
    assert_eq!(state.step(&id(0)).unwrap().reason, seen);

    state.reset_backoff(Duration::ZERO);
    let mut job = take(&mut state, StepKind::Attach);
    state.end_step(
        &mut job,
        Outcome::Attached(Box::new(unit_there())),
        &patient,
    );
    look(&mut state, unit_there());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_device_that_came_in_place_of_another_unit_is_judged_by_itself() {
    let mut state = unit_attached();
    let mut doubted = unit_there();
    doubted.condition = Condition::LinkDead;
    look(&mut state, doubted);
    look(&mut state, unit_there());
    let mut job = take(&mut state, StepKind::Prove);
    let differs = Outcome::Differs(Condition::Changed, "another answers".to_owned());
    state.end_step(&mut job, differs, &impatient());
    let mut gone = unit_there();
    (gone.condition, gone.node) = (Condition::Gone, None);
    gone.paths.clear();
    look(&mut state, gone);
    look(&mut state, unit_there());
    take(&mut state, StepKind::Prove);
}

#[test]
fn a_volume_whose_paths_were_offline_is_asked_which_unit_it_is_before_it_is_said_to_be_healed() {
    let mut state = unit_attached();
    let mut offline = unit_there();
    (offline.condition, offline.silent) = (Condition::LinkDead, offline.paths.clone());
    let events = look(&mut state, offline);
    assert!(
        matches!(events.as_slice(), [Event::Lost { .. }]),
        "{events:?}"
    );
    let events = look(&mut state, unit_there());
    assert!(events.is_empty(), "{events:?}");
    assert!(state.attached(&id(0)).is_none());
    let mut job = take(&mut state, StepKind::Prove);
    let events = state.end_step(&mut job, Outcome::Serves, &impatient());
    assert!(
        matches!(events.as_slice(), [Event::Healed { .. }]),
        "{events:?}"
    );
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn one_path_that_was_offline_is_asked_which_unit_it_is_though_the_other_served_meanwhile() {
    let mut state = unit_attached();
    let mut offline = unit_there();
    offline.silent.push("3:0:0:1".parse().unwrap());
    look(&mut state, offline.clone());
    assert!(state.attached(&id(0)).is_some(), "the other path serves");
    look(&mut state, offline);
    look(&mut state, unit_there());
    assert!(state.attached(&id(0)).is_none(), "nobody has asked it");
    let mut job = take(&mut state, StepKind::Prove);
    state.end_step(&mut job, Outcome::Serves, &impatient());
    look(&mut state, unit_there());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_path_that_the_kernel_takes_for_empty_has_its_volume_asked_at_the_next_look() {
    let mut state = unit_attached();
    let mut there = unit_there();
    there.verify_reason = Some("the kernel takes 2:0:0:1 for empty".to_owned());
    look(&mut state, there);
    let job = take(&mut state, StepKind::Prove);
    assert_eq!(job.step.reason, "the kernel takes 2:0:0:1 for empty");
}

#[test]
fn a_certificate_that_ends_within_30_days_is_told_of_once() {
    let with_days_left = |days: u64| {
        let source: Source = "nbds://192.0.2.1/vol-7".parse().unwrap();
        let spec = VolumeSpec::of(&AttachRequest::new(source));
        let mut there = VolumeStatus::new(id(0), spec, Condition::Complete);
        let end = SystemTime::now() + Duration::from_secs(days * 24 * 60 * 60);
        let end = humantime::format_rfc3339_seconds(end).to_string();
        let tls = serde_json::json!({
            "version": "1.3",
            "cipher": "chacha20-poly1305",
            "certificate": {"subject": "CN=storage.example", "valid_until": end},
        });
        there.tls = serde_json::from_value(tls).unwrap();
        there
    };
    let mut state = State::default();
    let mut told = |there: &VolumeStatus| {
        let events = look(&mut state, there.clone());
        let ends = |event: &&Event| matches!(event, Event::CertificateEnds { .. });
        events.iter().filter(ends).count()
    };
    assert_eq!(told(&with_days_left(31)), 0);
    let soon = with_days_left(29);
    assert_eq!(told(&soon), 1);
    assert_eq!(told(&soon), 0);
    // A renewed certificate has an end of its own.
    assert_eq!(told(&with_days_left(10)), 1);
}
