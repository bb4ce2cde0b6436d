use std::collections::BTreeSet;

use super::*;
use crate::deadline::Deadline;
use crate::engine::ChangeEvent;
use crate::id::NbdIndex;
use crate::reconcile::desired::Desired;
use crate::reconcile::refresh::Scope;
use crate::reconcile::state::tests::{
    end, failed, id, nbd_request, nbd_status, refresh, retry_late, take, take_all, wanting_nbd,
};

fn attached(number: u32) -> Outcome {
    Outcome::Attached(Box::new(nbd_status(number)))
}

/// A state with one volume, which this process has attached.
fn with_attached() -> State {
    let mut state = wanting_nbd(1);
    end(&mut state, StepKind::Attach, attached(0));
    state
}

fn set_min_size(state: &mut State, bytes: Option<u64>) {
    let mut desired = state.desired().clone();
    desired.set_min_size(&id(0), bytes).unwrap();
    state.set_desired(desired);
}

/// A volume that is attached and wanted larger.
fn too_small() -> State {
    let mut state = with_attached();
    set_min_size(&mut state, Some(1 << 30));
    state
}

/// The result of a resize where the array has not grown the unit.
fn not_grown() -> Outcome {
    failed(ErrorKind::NotReady)
}

fn gone() -> VolumeStatus {
    let mut gone = nbd_status(0);
    (gone.nbd_index, gone.node, gone.condition) = (None, None, Condition::Gone);
    gone
}

/// The kernel reports that the link of the device with this index is dead.
fn report_death(state: &mut State, index: u32) -> Option<Event> {
    state.handle_change(&ChangeEvent::LinkDead(NbdIndex::new(index).unwrap()))
}

/// Begins the next run. With a deadline it tries each step once.
fn begin_run(state: &mut State, until: Option<Deadline>) {
    state.run.end();
    state.begin_run(until).unwrap();
    state.refresh.take();
}

#[test]
fn steps_that_failed_before_get_half_of_the_threads_and_other_steps_get_all() {
    let mut state = wanting_nbd(10);
    for job in take_all(&mut state) {
        state.end_step(job, failed(ErrorKind::Unreachable));
    }
    while let Some(job) = state.take_job() {
        state.end_step(job, failed(ErrorKind::Unreachable));
    }
    assert_eq!(take_all(&mut state).len(), 4);
    let mut desired = state.desired().clone();
    desired.insert(id(77), &nbd_request(77)).unwrap();
    state.set_desired(desired);
    assert_eq!(take(&mut state, StepKind::Attach).step.volume, id(77));
}

#[test]
fn a_step_that_succeeds_ends_the_failure_of_the_last_one() {
    let mut state = wanting_nbd(1);
    end(&mut state, StepKind::Attach, failed(ErrorKind::Unreachable));
    assert_eq!(state.errors().len(), 1);
    end(&mut state, StepKind::Attach, attached(0));
    assert!(state.errors().is_empty());
}

#[test]
fn steps_that_failed_together_are_not_retried_together() {
    let mut state = wanting_nbd(8);
    retry_late(&mut state);
    let mut pauses = BTreeSet::new();
    for job in take_all(&mut state) {
        for event in state.end_step(job, failed(ErrorKind::Unreachable)) {
            if let Event::Failed { next_try, .. } = event {
                pauses.insert(next_try.unwrap());
            }
        }
    }
    assert!(pauses.len() > 1, "{pauses:?}");
    let hour = Duration::from_secs(3600);
    assert!(pauses.iter().all(|pause| *pause < hour), "{pauses:?}");
}

#[test]
fn a_step_that_has_not_begun_is_planned_again_when_something_else_is_wanted() {
    let mut state = wanting_nbd(3);
    state.plan_and_queue();
    assert!(state.schedule.has_job());
    state.set_desired(Desired::default());
    assert!(state.take_job().is_none());
    assert!(state.schedule.needs_plan());
    state.plan_and_queue();
    assert!(state.plan().is_empty());
    assert!(state.busy().next().is_none());
}

#[test]
fn a_refresh_that_began_before_a_step_ended_does_not_change_its_volume() {
    let mut state = wanting_nbd(1);
    let job = take(&mut state, StepKind::Attach);
    let ended_steps = state.counters.steps;
    state.end_step(job, attached(0));
    // The volume was not there when the refresh began.
    state.merge(Vec::new(), &Scope::All, ended_steps, false);
    assert!(state.attached(&id(0)).is_some());
    state.merge(Vec::new(), &Scope::All, ended_steps + 1, false);
    assert!(state.attached(&id(0)).is_none());
}

#[test]
fn a_link_that_dies_during_a_step_is_healed_after_it() {
    let mut state = wanting_nbd(1);
    state.plan_and_queue();
    refresh(&mut state, nbd_status(0));
    // The attach was planned before the first refresh.
    let job = state.take_job().unwrap();
    assert_eq!(job.step.kind, StepKind::Attach);
    state.end_step(job, attached(0));
    assert!(state.plan().is_empty());
    assert!(report_death(&mut state, 0).is_some());
    assert!(report_death(&mut state, 0).is_none(), "reported twice");
    let job = take(&mut state, StepKind::Heal);
    assert!(state.attached(&id(0)).is_none());
    let healed = state.end_step(job, Outcome::Serves);
    assert!(matches!(&*healed, [Event::Healed { .. }]), "{healed:?}");
    assert!(state.attached(&id(0)).is_some());
    state.plan_and_queue();
    assert!(state.is_idle() && state.plan().is_empty());
}

#[test]
fn other_content_that_a_heal_took_is_reported_with_both_names_and_other_differences_are_not() {
    let mut state = with_attached();
    report_death(&mut state, 0);
    let name = "fs.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9".parse().unwrap();
    let differences = vec![
        Difference::BecameWritable,
        Difference::Content {
            from: vec![name],
            to: Vec::new(),
            is_proven: false,
        },
    ];
    let events = end(&mut state, StepKind::Heal, Outcome::Adopted(differences));
    let [Event::Healed { .. }, differs @ Event::ContentDiffers { .. }] = &*events else {
        panic!("{events:?}");
    };
    let text = differs.to_string();
    let names = "no name that is known instead of fs.0a1b";
    assert!(text.contains(names), "{text}");
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_link_that_dies_while_it_is_asked_is_asked_once_more() {
    let mut state = wanting_nbd(1);
    refresh(&mut state, nbd_status(0));
    let job = take(&mut state, StepKind::Verify);
    // The death may follow the answer, and the kernel reports it only once.
    report_death(&mut state, 0);
    state.end_step(job, Outcome::Serves);
    let job = take(&mut state, StepKind::Verify);
    assert!(!state.refresh.is_wanted());
    // A step that only asks does not cause device events itself.
    let devpath = "/devices/virtual/block/nbd0".to_owned();
    let removed = false;
    state.handle_change(&ChangeEvent::Device { devpath, removed });
    state.end_step(job, Outcome::Serves);
    assert!(state.refresh.is_wanted());
    assert!(take_all(&mut state).is_empty());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_dead_link_has_the_same_budget_if_a_refresh_or_the_kernel_reports_it() {
    let mut state = with_attached();
    let mut dead = nbd_status(0);
    dead.condition = Condition::LinkDead;
    let events = refresh(&mut state, dead);
    let [Event::Lost { budget_left, .. }] = &*events else {
        panic!("{events:?}");
    };
    assert!(budget_left.is_some());
    let reported = report_death(&mut with_attached(), 0);
    let Some(Event::Lost {
        budget_left: of_kernel,
        ..
    }) = &reported
    else {
        panic!("{reported:?}");
    };
    assert_eq!(budget_left, of_kernel);
}

#[test]
fn a_heal_that_no_retry_helps_does_not_delay_an_attach() {
    let mut state = with_attached();
    report_death(&mut state, 0);
    end(&mut state, StepKind::Heal, failed(ErrorKind::NotSupported));
    assert!(take_all(&mut state).is_empty());
    // Another of its connections dies: the kernel may accept a new one now.
    report_death(&mut state, 0);
    end(&mut state, StepKind::Heal, failed(ErrorKind::NotSupported));
    refresh(&mut state, gone());
    take(&mut state, StepKind::Attach);
}

#[test]
fn a_death_on_an_index_that_a_volume_had_before_is_not_its_own() {
    let mut state = wanting_nbd(1);
    let mut on_nbd3 = nbd_status(0);
    on_nbd3.nbd_index = NbdIndex::new(3);
    on_nbd3.node = Some("/dev/nbd3".into());
    let attached = Outcome::Attached(Box::new(on_nbd3));
    end(&mut state, StepKind::Attach, attached);
    refresh(&mut state, gone());
    refresh(&mut state, nbd_status(0));
    assert!(report_death(&mut state, 3).is_none());
    assert!(state.attached(&id(0)).is_some());
    assert!(report_death(&mut state, 0).is_some());
}

#[test]
fn a_volume_that_was_attached_before_this_process_is_asked_once() {
    let mut state = wanting_nbd(1);
    refresh(&mut state, nbd_status(0));
    assert!(state.attached(&id(0)).is_none());
    let events = end(&mut state, StepKind::Verify, Outcome::Serves);
    assert!(events.is_empty(), "{events:?}");
    refresh(&mut state, nbd_status(0));
    assert!(take_all(&mut state).is_empty());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_step_whose_error_no_retry_helps_waits_until_something_changes() {
    let mut state = wanting_nbd(1);
    let never = failed(ErrorKind::NotSupported);
    let events = end(&mut state, StepKind::Attach, never);
    let [Event::Failed { next_try: None, .. }] = &*events else {
        panic!("{events:?}");
    };
    assert!(take_all(&mut state).is_empty());
    state.reset_backoff(Duration::ZERO);
    take(&mut state, StepKind::Attach);
}

#[test]
fn a_step_that_failed_in_a_run_that_tries_once_is_not_tried_again_while_another_step_runs() {
    let mut state = wanting_nbd(2);
    begin_run(&mut state, Some(Deadline::after(Duration::MAX)));
    let [fails, _runs] = <[Job; 2]>::try_from(take_all(&mut state)).ok().unwrap();
    let volume = fails.step.volume.clone();
    state.end_step(fails, failed(ErrorKind::Unreachable));
    assert!(take_all(&mut state).is_empty());
    assert!(!state.schedule.is_plan_due(), "the loop is woken for it");
    begin_run(&mut state, Some(Deadline::after(Duration::MAX)));
    assert_eq!(take(&mut state, StepKind::Attach).step.volume, volume);
}

#[test]
fn a_step_that_failed_in_an_apply_is_tried_again_by_the_next_run() {
    let mut state = wanting_nbd(1);
    begin_run(&mut state, Some(Deadline::after(Duration::MAX)));
    end(&mut state, StepKind::Attach, failed(ErrorKind::Unreachable));
    assert!(take_all(&mut state).is_empty());
    begin_run(&mut state, None);
    assert!(!state.is_idle(), "it sleeps");
    state.plan_and_queue();
    assert!(state.next_timer().is_some() || state.take_job().is_some());
}

#[test]
fn a_volume_is_attached_as_wanted_when_its_size_was_read_back_and_not_before() {
    let mut state = too_small();
    assert!(state.attached(&id(0)).is_none());
    let (old_size, size) = (0, 1 << 30);
    let resized = Outcome::Resized { old_size, size };
    let events = end(&mut state, StepKind::Resize, resized);
    let [Event::Resized { size: reported, .. }] = &*events else {
        panic!("{events:?}");
    };
    assert_eq!(*reported, size);
    assert!(state.attached(&id(0)).is_some());
    assert!(take_all(&mut state).is_empty() && state.plan().is_empty());
}

#[test]
fn a_volume_that_does_not_grow_is_tried_again_later_and_its_link_is_healed_at_once() {
    let mut state = too_small();
    retry_late(&mut state);
    let events = end(&mut state, StepKind::Resize, not_grown());
    let [Event::Failed { next_try, .. }] = &*events else {
        panic!("{events:?}");
    };
    assert!(next_try.is_some());
    assert!(take_all(&mut state).is_empty(), "it waits");
    assert_eq!(state.errors().len(), 1);

    report_death(&mut state, 0);
    end(&mut state, StepKind::Heal, Outcome::Serves);
    end(&mut state, StepKind::Resize, not_grown());

    set_min_size(&mut state, None);
    assert!(take_all(&mut state).is_empty() && state.errors().is_empty());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_failed_resize_is_no_failure_once_the_volume_has_grown_by_other_means() {
    let mut state = too_small();
    retry_late(&mut state);
    end(&mut state, StepKind::Resize, not_grown());
    let mut grown = nbd_status(0);
    grown.size = Some(1 << 31);
    refresh(&mut state, grown);
    state.plan_and_queue();
    assert!(state.errors().is_empty());
    assert!(state.attached(&id(0)).is_some());
}

fn disconnected(kind: ErrorKind) -> Outcome {
    let error = Error::new(kind, "no server");
    Outcome::NotServing(NotServing::because(error))
}

#[test]
fn a_device_without_a_server_is_not_handed_out_and_is_healed_until_it_answers() {
    let mut state = wanting_nbd(1);
    refresh(&mut state, nbd_status(0));
    // The device does not answer, and sysfs does not show it.
    let outcome = disconnected(ErrorKind::Unreachable);
    let events = end(&mut state, StepKind::Verify, outcome);
    assert!(matches!(&*events, [Event::Lost { .. }]), "{events:?}");
    assert!(state.attached(&id(0)).is_none());
    assert_eq!(state.errors().len(), 1);
    assert!(!state.refresh.is_wanted());
    let outcome = disconnected(ErrorKind::Unreachable);
    let job = take(&mut state, StepKind::Heal);
    assert!(job.step.reason.contains("no server"), "{}", job.step);
    assert_eq!(job.tries, 1);
    state.end_step(job, outcome);
    let events = end(&mut state, StepKind::Heal, Outcome::Serves);
    assert!(matches!(&*events, [Event::Healed { .. }]), "{events:?}");
    assert!(state.attached(&id(0)).is_some() && state.errors().is_empty());
}

#[test]
fn a_device_that_is_gone_when_it_is_healed_is_looked_at() {
    for kind in [ErrorKind::NotFound, ErrorKind::Vanished] {
        let mut state = with_attached();
        report_death(&mut state, 0);
        end(&mut state, StepKind::Heal, disconnected(kind));
        assert!(state.refresh.is_wanted(), "{kind:?}");
    }
}
