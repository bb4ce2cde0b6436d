use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::journal::{Operation, VolumeSpec};
use crate::engine::{ChangeEvent, Condition, VolumeStatus};
use crate::error::ErrorKind;
use crate::reconcile::job::Outcome;
use crate::reconcile::state::State;
use crate::reconcile::state::tests::{
    end, failed, id, nbd_request, nbd_status, request, retry_late, take, take_all, unit_status,
    wanting, wanting_nbd,
};
use crate::reconcile::step::StepKind;

/// Fails the first step of each volume. The retries are due after an hour.
fn fail_each_once(state: &mut State) {
    retry_late(state);
    loop {
        let jobs = take_all(state);
        if jobs.is_empty() {
            return;
        }
        for job in jobs {
            state.end_step(job, failed(ErrorKind::Unreachable));
        }
    }
}

#[test]
fn a_detach_does_not_wait_for_attaches_however_many_there_are_and_however_long_they_take() {
    // Volume 99 is not wanted, and volume 19 is wanted from another server.
    let (unwanted, mut begun, mut elsewhere) = (nbd_status(99), nbd_status(99), nbd_status(19));
    let abandon_unwritten = false;
    begun.under_way = Some(Operation::Detach { abandon_unwritten });
    elsewhere.spec = VolumeSpec::of(&nbd_request(98));
    for (status, kind) in [
        (unwanted, StepKind::Detach),
        (begun, StepKind::Finish),
        (elsewhere, StepKind::Detach),
    ] {
        let mut state = wanting_nbd(20);
        let attaches = take_all(&mut state);
        assert_eq!(attaches.len(), 8, "more than there are threads");
        state.set_status(status);
        state.schedule.require_plan();
        take(&mut state, kind);
    }
}

#[test]
fn a_detach_that_failed_before_does_not_wait_for_attaches() {
    let mut state = wanting_nbd(20);
    // Volume 99 is not wanted.
    state.set_status(nbd_status(99));
    state.schedule.require_plan();
    let mut jobs = take_all(&mut state);
    let detach = jobs.remove(0);
    assert_eq!((detach.step.kind, jobs.len()), (StepKind::Detach, 8));
    state.end_step(detach, failed(ErrorKind::InUse));
    take(&mut state, StepKind::Detach);
}

#[test]
fn a_first_attach_at_a_server_does_not_wait_for_those_at_another_server() {
    let silent = (0..100).map(|number| request(&format!("nbd://silent/{number}")));
    let mut state = wanting(silent.chain([request("nbd://answers/1")]));
    let first = take_all(&mut state);
    let is_served = first.iter().any(|job| job.step.volume == id(100));
    assert!(is_served && first.len() == 8, "{} steps", first.len());
}

#[test]
fn a_volume_of_a_server_that_is_back_does_not_wait_for_those_of_one_that_is_away() {
    let away = (0..100).map(|number| request(&format!("nbd://away/{number}")));
    let mut state = wanting(away.chain([request("nbd://back/1")]));
    // Each has failed once, and all are due for a retry.
    fail_each_once(&mut state);
    state.reset_backoff(Duration::ZERO);
    let running = take_all(&mut state);
    let is_served = running.iter().any(|job| job.step.volume == id(100));
    assert!(is_served && running.len() <= 4, "{} steps", running.len());
}

#[test]
fn a_volume_whose_paths_may_be_back_does_not_wait_for_those_that_hang() {
    let mut state = wanting((0..16).map(nbd_request).chain([request("scsi:2:0:0:1")]));
    fail_each_once(&mut state);
    // It waits for its retry behind the others.
    state.reset_backoff(Duration::ZERO);
    let hang = take_all(&mut state);
    assert!(!hang.is_empty() && hang.iter().all(|job| job.step.volume != id(16)));
    state.handle_change(&ChangeEvent::Transport { host: None });
    let job = take(&mut state, StepKind::Attach);
    assert_eq!(job.step.volume, id(16));
}

#[test]
fn a_volume_whose_paths_may_be_back_does_not_wait_for_many_others_whose_paths_may_be_back() {
    let hang = (0..40).map(|lun| request(&format!("scsi:2:0:0:{lun}")));
    let mut state = wanting(hang.chain([request("scsi:3:0:0:1")]));
    fail_each_once(&mut state);
    state.handle_change(&ChangeEvent::Transport { host: None });
    let first = take_all(&mut state);
    let is_served = first.iter().any(|job| job.step.volume == id(40));
    assert!(is_served && first.len() < 20, "{} steps", first.len());
}

#[test]
fn a_volume_whose_paths_may_be_back_is_tried_even_if_others_of_its_host_hang() {
    let mut state = wanting((0..3).map(|lun| request(&format!("scsi:2:0:0:{lun}"))));
    fail_each_once(&mut state);
    state.reset_backoff(Duration::ZERO);
    let hang = take_all(&mut state);
    assert_eq!(hang.len(), 2, "a quarter of the threads");
    state.handle_change(&ChangeEvent::Transport { host: None });
    assert_eq!(take_all(&mut state).len(), 1);
}

#[test]
fn an_attach_begins_only_after_the_detach_for_which_it_waits() {
    let mut state = wanting_nbd(1);
    let mut owner = nbd_status(99);
    owner.spec = VolumeSpec::of(&nbd_request(0));
    state.set_status(owner);
    let safe_to_unmap = true;
    end(
        &mut state,
        StepKind::Detach,
        Outcome::Detached { safe_to_unmap },
    );
    take(&mut state, StepKind::Attach);
}

#[test]
fn a_volume_that_only_waits_for_its_paths_has_no_step_to_begin() {
    let mut state = wanting([request("scsi:2:0:0:1")]);
    let spec = VolumeSpec::of(&request("scsi:2:0:0:1"));
    state.set_status(VolumeStatus::new(id(0), spec, Condition::LinkDead));
    assert_eq!(state.step(&id(0)).unwrap().kind, StepKind::Wait);
    assert!(take_all(&mut state).is_empty());
}

#[test]
fn a_volume_is_looked_at_when_the_retry_of_its_missing_path_is_due_and_after_a_failure() {
    let mut state = wanting([request("scsi:2:0:0:1")]);
    let attached = || Outcome::Attached(Box::new(unit_status(true)));
    end(&mut state, StepKind::Attach, attached());
    state.plan_and_queue();
    assert!(state.refresh.is_wanted());
    let mut state = wanting([request("scsi:2:0:0:1")]);
    retry_late(&mut state);
    end(&mut state, StepKind::Attach, attached());
    state.plan_and_queue();
    assert!(!state.refresh.is_wanted(), "not before its time");
    assert!(state.next_timer().is_some());
    let mut state = wanting_nbd(1);
    end(&mut state, StepKind::Attach, failed(ErrorKind::Unreachable));
    assert!(state.refresh.is_wanted());
}

#[test]
fn a_run_with_a_deadline_looks_at_all_and_tries_what_failed_before_and_no_other_run_does() {
    let soon = || Some(Deadline::after(Duration::from_secs(60)));
    for (until, tries) in [(soon(), 1), (None, 0)] {
        let mut state = wanting_nbd(1);
        retry_late(&mut state);
        end(&mut state, StepKind::Attach, failed(ErrorKind::Unreachable));
        assert!(take_all(&mut state).is_empty());
        state.run.end();
        while state.refresh.take().is_none() {
            std::thread::yield_now();
        }
        state.begin_run(until).unwrap();
        assert!(state.refresh.until_resync() < Duration::MAX);
        assert_eq!(state.refresh.is_wanted(), until.is_some());
        assert_eq!(take_all(&mut state).len(), tries);
    }
}

#[test]
fn what_failed_in_a_run_with_a_deadline_is_retried_in_the_next_run() {
    let mut state = wanting_nbd(1);
    state.run.end();
    let soon = Deadline::after(Duration::from_secs(60));
    state.begin_run(Some(soon)).unwrap();
    end(&mut state, StepKind::Attach, failed(ErrorKind::Unreachable));
    assert!(take_all(&mut state).is_empty(), "each step is tried once");
    state.run.end();
    state.begin_run(None).unwrap();
    take(&mut state, StepKind::Attach);
}
