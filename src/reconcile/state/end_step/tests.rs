use super::*;
use crate::deadline::Deadline;
use crate::engine::journal::VolumeSpec;
use crate::engine::{AttachRequest, ChangeEvent};
use crate::id::Source;
use crate::nbd::Difference;
use crate::reconcile::desired::Desired;
use crate::reconcile::refresh::Scope;

fn id(number: u32) -> VolumeId {
    format!("pvc-{number}").parse().unwrap()
}

fn request(number: u32) -> AttachRequest {
    let source: Source = format!("nbd://h{number}/{number}").parse().unwrap();
    AttachRequest::new(source)
}

fn wanting(volumes: u32) -> State {
    let mut desired = Desired::default();
    for number in 0..volumes {
        desired.insert(id(number), &request(number)).unwrap();
    }
    let mut state = State::default();
    state.set_desired(desired);
    state.plan_and_queue();
    state
}

fn there(number: u32) -> VolumeStatus {
    let spec = VolumeSpec::of(&request(number));
    let mut there = VolumeStatus::new(id(number), spec, Condition::Complete);
    there.nbd_index = crate::id::NbdIndex::new(number);
    there.node = Some(format!("/dev/nbd{number}").into());
    there
}

fn attached(number: u32) -> Outcome {
    Outcome::Attached(Box::new(there(number)))
}

/// A volume that is attached and wanted larger.
fn too_small() -> State {
    let mut state = wanting(1);
    let mut job = state.take_job(8).unwrap();
    state.end_step(&mut job, attached(0), &impatient());
    let mut desired = state.desired().clone();
    desired.set_min_size(&id(0), Some(1 << 30)).unwrap();
    state.set_desired(desired);
    state.plan_and_queue();
    state
}

/// The result of a resize where the array has not grown the unit.
fn not_grown() -> Outcome {
    Outcome::Failed(Error::new(ErrorKind::NotReady, "it has 0 bytes"))
}

fn refused() -> Outcome {
    Outcome::Failed(Error::new(ErrorKind::Unreachable, "no server"))
}

/// Options that retry at once.
fn impatient() -> Options {
    Options::default().retry(Duration::ZERO, Duration::ZERO)
}

/// Begins the next run. With a deadline it tries each step once.
fn begin_run(state: &mut State, until: Option<Deadline>) {
    state.run.end();
    state.begin_run(until, &impatient()).unwrap();
}

#[test]
fn those_that_failed_before_are_given_half_of_the_threads_and_the_others_all() {
    let mut state = wanting(10);
    for _ in 0..10 {
        let mut job = state.take_job(8).unwrap();
        state.end_step(&mut job, refused(), &impatient());
    }
    state.plan_and_queue();
    let hung: Vec<Job> = std::iter::from_fn(|| state.take_job(8)).collect();
    assert_eq!(hung.len(), 4);
    let mut desired = state.desired().clone();
    desired.insert(id(77), &request(77)).unwrap();
    state.set_desired(desired);
    state.plan_and_queue();
    let job = state.take_job(8).unwrap();
    assert_eq!(job.step.volume, id(77));
}

#[test]
fn a_step_that_has_not_begun_is_thought_over_when_something_else_is_wanted() {
    let mut state = wanting(3);
    state.set_desired(Desired::default());
    assert!(state.take_job(8).is_none());
    assert!(state.schedule.needs_plan());
    state.plan_and_queue();
    assert!(state.plan().is_empty());
    assert!(state.busy().next().is_none());
}

#[test]
fn a_look_that_began_before_a_step_ended_says_nothing_of_its_volume() {
    let mut state = wanting(1);
    let mut job = state.take_job(8).unwrap();
    let ended_steps = state.counters.steps;
    state.end_step(&mut job, attached(0), &impatient());
    // The volume was not there when the look began.
    state.merge(Vec::new(), &Scope::All, ended_steps, false);
    assert!(state.attached(&id(0)).is_some());
    let ended_steps = state.counters.steps;
    state.merge(Vec::new(), &Scope::All, ended_steps, false);
    assert!(state.attached(&id(0)).is_none());
}

#[test]
fn a_link_that_dies_during_a_step_is_healed_after_it() {
    let mut state = wanting(1);
    state.merge(vec![there(0)], &Scope::All, 0, true);
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    // The attach was planned before the first look.
    assert_eq!(job.step.kind, StepKind::Attach);
    state.end_step(&mut job, attached(0), &impatient());
    assert!(state.plan().is_empty());
    let index = crate::id::NbdIndex::new(0).unwrap();
    assert!(state.handle_change(&ChangeEvent::LinkDead(index)).is_some());
    assert!(
        state.handle_change(&ChangeEvent::LinkDead(index)).is_none(),
        "told twice"
    );
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    assert_eq!(job.step.kind, StepKind::Heal);
    assert!(state.attached(&id(0)).is_none());
    let healed = state.end_step(&mut job, Outcome::Serves, &impatient());
    assert!(
        matches!(healed.as_slice(), [Event::Healed { .. }]),
        "{healed:?}"
    );
    assert!(state.attached(&id(0)).is_some());
    state.plan_and_queue();
    assert!(state.is_idle() && state.plan().is_empty());
}

#[test]
fn other_content_that_a_heal_took_is_told_with_both_names_and_other_differences_are_not() {
    let mut state = wanting(1);
    state.merge(vec![there(0)], &Scope::All, 0, true);
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    state.end_step(&mut job, attached(0), &impatient());
    let index = crate::id::NbdIndex::new(0).unwrap();
    state.handle_change(&ChangeEvent::LinkDead(index));
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    let name = "fs.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9".parse().unwrap();
    let differences = vec![
        Difference::BecameWritable,
        Difference::Content {
            from: vec![name],
            to: Vec::new(),
            is_proven: false,
        },
    ];
    let events = state.end_step(&mut job, Outcome::Adopted(differences), &impatient());
    let [Event::Healed { .. }, differs @ Event::ContentDiffers { .. }] = &*events else {
        panic!("{events:?}");
    };
    let told = differs.to_string();
    assert!(
        told.contains("no name that is known instead of fs.0a1b"),
        "{told}"
    );
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_link_that_dies_while_it_is_asked_is_asked_once_more() {
    let mut state = wanting(0);
    let mut desired = Desired::default();
    desired.insert(id(0), &request(0)).unwrap();
    state.set_desired(desired);
    state.merge(vec![there(0)], &Scope::All, 0, true);
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    assert_eq!(job.step.kind, StepKind::Prove);
    // The death may follow the answer, and the kernel reports it only once.
    state.handle_change(&ChangeEvent::LinkDead(crate::id::NbdIndex::new(0).unwrap()));
    state.end_step(&mut job, Outcome::Serves, &impatient());
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    assert_eq!(job.step.kind, StepKind::Prove);
    // A step that only asks does not cause device events itself.
    let devpath = "/devices/virtual/block/nbd0".to_owned();
    let removed = false;
    state.handle_change(&ChangeEvent::Device { devpath, removed });
    state.end_step(&mut job, Outcome::Serves, &impatient());
    assert!(state.refresh.is_wanted());
    state.plan_and_queue();
    assert!(state.take_job(8).is_none());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_link_that_a_look_finds_dead_has_its_budget_as_one_that_the_kernel_tells_of() {
    let mut state = wanting(1);
    let mut job = state.take_job(8).unwrap();
    state.end_step(&mut job, attached(0), &impatient());
    let mut dead = there(0);
    dead.condition = Condition::LinkDead;
    let ended_steps = state.counters.steps;
    let events = state.merge(vec![dead], &Scope::All, ended_steps, false);
    let told = matches!(
        events.as_slice(),
        [Event::Lost {
            budget_left: Some(_),
            ..
        }]
    );
    assert!(told, "{events:?}");
}

#[test]
fn a_healing_that_no_repetition_helps_does_not_hold_up_another_attach() {
    let mut state = wanting(1);
    let mut job = state.take_job(8).unwrap();
    state.end_step(&mut job, attached(0), &impatient());
    state.handle_change(&ChangeEvent::LinkDead(crate::id::NbdIndex::new(0).unwrap()));
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    assert_eq!(job.step.kind, StepKind::Heal);
    let never = Outcome::Failed(Error::new(ErrorKind::NotSupported, "no"));
    state.end_step(&mut job, never, &impatient());
    state.plan_and_queue();
    assert!(state.take_job(8).is_none());
    // Another of its connections dies: the kernel may accept a new one now.
    state.handle_change(&ChangeEvent::LinkDead(crate::id::NbdIndex::new(0).unwrap()));
    state.plan_and_queue();
    let mut job = state.take_job(8).expect("a healing at once");
    assert_eq!(job.step.kind, StepKind::Heal);
    let never = Outcome::Failed(Error::new(ErrorKind::NotSupported, "no"));
    state.end_step(&mut job, never, &impatient());
    let mut gone = there(0);
    (gone.nbd_index, gone.node, gone.condition) = (None, None, Condition::Gone);
    let ended_steps = state.counters.steps;
    state.merge(vec![gone], &Scope::All, ended_steps, false);
    state.plan_and_queue();
    assert_eq!(state.take_job(8).unwrap().step.kind, StepKind::Attach);
}

#[test]
fn a_death_on_an_index_that_a_volume_had_before_is_not_its_own() {
    let mut state = wanting(1);
    let mut job = state.take_job(8).unwrap();
    let mut on_nbd3 = there(0);
    on_nbd3.nbd_index = crate::id::NbdIndex::new(3);
    on_nbd3.node = Some("/dev/nbd3".into());
    let done = Outcome::Attached(Box::new(on_nbd3));
    state.end_step(&mut job, done, &impatient());
    let mut gone = there(0);
    (gone.nbd_index, gone.node, gone.condition) = (None, None, Condition::Gone);
    for found in [gone, there(0)] {
        let ended_steps = state.counters.steps;
        state.merge(vec![found], &Scope::All, ended_steps, false);
    }
    let foreign_messages = crate::id::NbdIndex::new(3).unwrap();
    assert!(
        state
            .handle_change(&ChangeEvent::LinkDead(foreign_messages))
            .is_none()
    );
    assert!(state.attached(&id(0)).is_some());
    let own = crate::id::NbdIndex::new(0).unwrap();
    assert!(state.handle_change(&ChangeEvent::LinkDead(own)).is_some());
}

#[test]
fn what_stood_before_this_process_is_asked_once() {
    let mut state = wanting(0);
    let mut desired = Desired::default();
    desired.insert(id(0), &request(0)).unwrap();
    state.set_desired(desired);
    state.merge(vec![there(0)], &Scope::All, 0, true);
    assert!(state.attached(&id(0)).is_none());
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    assert_eq!(job.step.kind, StepKind::Prove);
    let events = state.end_step(&mut job, Outcome::Serves, &impatient());
    assert!(events.is_empty(), "{events:?}");
    let ended_steps = state.counters.steps;
    state.merge(vec![there(0)], &Scope::All, ended_steps, true);
    state.plan_and_queue();
    assert!(state.take_job(8).is_none());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn an_error_that_no_repetition_helps_is_not_repeated_until_something_changes() {
    let mut state = wanting(1);
    let mut job = state.take_job(8).unwrap();
    let never = Outcome::Failed(Error::new(ErrorKind::NotSupported, "no"));
    let events = state.end_step(&mut job, never, &impatient());
    assert!(matches!(
        events.as_slice(),
        [Event::Failed { next_try: None, .. }]
    ));
    state.plan_and_queue();
    assert!(state.take_job(8).is_none());
    state.reset_backoff(Duration::ZERO);
    state.plan_and_queue();
    assert!(state.take_job(8).is_some());
}

#[test]
fn a_step_that_failed_in_a_run_that_tries_once_is_not_tried_again_while_another_step_runs() {
    let mut state = wanting(2);
    begin_run(&mut state, Some(Deadline::after(Duration::MAX)));
    let mut fails = state.take_job(8).unwrap();
    let _at_work = state.take_job(8).unwrap();
    state.end_step(&mut fails, refused(), &impatient());
    state.plan_and_queue();
    assert!(state.take_job(8).is_none());
    assert!(
        !state.schedule.is_plan_due(),
        "nor is the loop woken for it"
    );
    begin_run(&mut state, Some(Deadline::after(Duration::MAX)));
    state.reset_backoff(Duration::ZERO);
    state.plan_and_queue();
    let again = state.take_job(8).unwrap();
    assert_eq!(again.step.volume, fails.step.volume);
}

#[test]
fn a_volume_is_attached_as_it_is_wanted_when_its_size_was_read_back_and_not_before() {
    let mut state = too_small();
    assert!(state.attached(&id(0)).is_none());
    let mut job = state.take_job(8).unwrap();
    assert_eq!(job.step.kind, StepKind::Resize);
    let (old_size, size) = (0, 1 << 30);
    let events = state.end_step(&mut job, Outcome::Resized { old_size, size }, &impatient());
    assert!(
        matches!(
            events.as_slice(),
            [Event::Resized {
                size: 0x4000_0000,
                ..
            }]
        ),
        "{events:?}"
    );
    assert!(state.attached(&id(0)).is_some());
    state.plan_and_queue();
    assert!(state.take_job(8).is_none() && state.plan().is_empty());
}

#[test]
fn a_volume_that_does_not_grow_is_tried_again_later_and_its_link_is_healed_at_once() {
    let mut state = too_small();
    let mut job = state.take_job(8).unwrap();
    let hour = Duration::from_secs(3600);
    let patient = Options::default().retry(hour, hour);
    let events = state.end_step(&mut job, not_grown(), &patient);
    assert!(
        matches!(
            events.as_slice(),
            [Event::Failed {
                next_try: Some(_),
                ..
            }]
        ),
        "{events:?}"
    );
    state.plan_and_queue();
    assert!(state.take_job(8).is_none(), "it waits");
    assert_eq!(state.errors().len(), 1);

    let index = crate::id::NbdIndex::new(0).unwrap();
    state.handle_change(&ChangeEvent::LinkDead(index));
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    assert_eq!(job.step.kind, StepKind::Heal);
    state.end_step(&mut job, Outcome::Serves, &patient);
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    assert_eq!(job.step.kind, StepKind::Resize);
    state.end_step(&mut job, not_grown(), &patient);

    let mut desired = state.desired().clone();
    desired.set_min_size(&id(0), None).unwrap();
    state.set_desired(desired);
    state.plan_and_queue();
    assert!(state.attached(&id(0)).is_some());
    assert!(state.take_job(8).is_none() && state.errors().is_empty());
}

#[test]
fn a_size_that_was_reached_past_us_is_no_failure_any_more() {
    let mut state = too_small();
    let mut job = state.take_job(8).unwrap();
    let hour = Duration::from_secs(3600);
    state.end_step(&mut job, not_grown(), &Options::default().retry(hour, hour));
    let mut grown = there(0);
    grown.size = Some(1 << 31);
    let ended_steps = state.counters.steps;
    state.merge(vec![grown], &Scope::All, ended_steps, false);
    state.plan_and_queue();
    assert!(state.errors().is_empty());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_step_that_failed_in_an_apply_is_tried_again_by_the_next_run() {
    let mut state = wanting(1);
    begin_run(&mut state, Some(Deadline::after(Duration::MAX)));
    state.plan_and_queue();
    let mut job = state.take_job(8).unwrap();
    state.end_step(&mut job, refused(), &impatient());
    state.plan_and_queue();
    assert!(state.take_job(8).is_none());
    begin_run(&mut state, None);
    assert!(!state.is_idle(), "it sleeps");
    state.plan_and_queue();
    assert!(state.next_timer().is_some() || state.take_job(8).is_some());
}
