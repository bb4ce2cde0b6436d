use super::*;
use crate::engine::ChangeEvent;
use crate::engine::journal::VolumeSpec;
use crate::error::{ErrorKind, MissingPath};
use crate::id::{NbdIndex, RouteKind, Source};
use crate::reconcile::Options;
use crate::reconcile::job::Outcome;
use crate::reconcile::state::tests::{
    end, failed, id, refresh, request, retry_late, take, take_all, wanting,
};
use crate::reconcile::step::StepKind;

/// A SCSI volume of two paths, as sysfs shows it.
fn unit_status() -> VolumeStatus {
    let source: Source = "scsi:3:0:0:1".parse().unwrap();
    let request = request("scsi:2:0:0:1").path(source);
    let mut status = VolumeStatus::new(id(0), VolumeSpec::of(&request), Condition::Complete);
    status.paths = ["2:0:0:1", "3:0:0:1"]
        .map(|path| path.parse().unwrap())
        .into();
    status.node = Some("/dev/dm-0".into());
    status
}

/// A state with one volume that is attached, and that was not verified.
fn unit_found() -> State {
    let mut state = wanting([unit_status().spec.request().unwrap()]);
    refresh(&mut state, unit_status());
    state
}

/// A state with one volume that was verified and is attached.
fn unit_attached() -> State {
    let mut state = unit_found();
    end(&mut state, StepKind::Verify, Outcome::Serves);
    assert!(state.attached(&id(0)).is_some());
    state
}

#[test]
fn a_device_that_is_another_unit_does_not_count_as_attached_again_because_of_sysfs() {
    let mut state = unit_found();
    let seen = "naa.2 answers at 2:0:0:1, where naa.1 was scanned";
    let differs = Outcome::Differs(Condition::Changed, seen.to_owned());
    end(&mut state, StepKind::Verify, differs);
    assert_eq!(state.step(&id(0)).unwrap().reason, seen);
    // Sysfs still shows the same device, with the data that the kernel read at its scan.
    refresh(&mut state, unit_status());
    assert!(state.attached(&id(0)).is_none(), "it is handed out");

    let job = take(&mut state, StepKind::Attach);
    assert_eq!(job.step.reason, seen);
    retry_late(&mut state);
    state.end_step(job, failed(ErrorKind::InUse));
    refresh(&mut state, unit_status());
    assert!(state.attached(&id(0)).is_none(), "it is handed out");
    assert!(take_all(&mut state).is_empty(), "it waits");
    assert_eq!(state.errors().len(), 1);
    assert_eq!(state.step(&id(0)).unwrap().reason, seen);

    state.reset_backoff(Duration::ZERO);
    let attached = Outcome::Attached(Box::new(unit_status()));
    end(&mut state, StepKind::Attach, attached);
    refresh(&mut state, unit_status());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_device_that_replaced_another_unit_is_asked_itself() {
    let mut state = unit_attached();
    let mut dead = unit_status();
    dead.condition = Condition::LinkDead;
    refresh(&mut state, dead);
    refresh(&mut state, unit_status());
    let differs = Outcome::Differs(Condition::Changed, "another answers".to_owned());
    end(&mut state, StepKind::Verify, differs);
    let mut gone = unit_status();
    (gone.condition, gone.node) = (Condition::Gone, None);
    gone.paths.clear();
    refresh(&mut state, gone);
    refresh(&mut state, unit_status());
    take(&mut state, StepKind::Verify);
}

#[test]
fn a_volume_whose_paths_were_offline_is_asked_which_unit_it_is_before_it_counts_as_healed() {
    let mut state = unit_attached();
    let mut offline = unit_status();
    (offline.condition, offline.silent) = (Condition::LinkDead, offline.paths.clone());
    let events = refresh(&mut state, offline);
    assert!(matches!(&*events, [Event::Lost { .. }]), "{events:?}");
    let events = refresh(&mut state, unit_status());
    assert!(events.is_empty(), "{events:?}");
    assert!(state.attached(&id(0)).is_none());
    let events = end(&mut state, StepKind::Verify, Outcome::Serves);
    assert!(matches!(&*events, [Event::Healed { .. }]), "{events:?}");
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_path_that_was_offline_is_asked_which_unit_it_is_even_if_the_other_path_served() {
    let mut state = unit_attached();
    let mut offline = unit_status();
    offline.silent.push("3:0:0:1".parse().unwrap());
    refresh(&mut state, offline.clone());
    assert!(state.attached(&id(0)).is_some(), "the other path serves");
    refresh(&mut state, offline);
    assert!(state.attached(&id(0)).is_some(), "it is still away");
    refresh(&mut state, unit_status());
    assert!(state.attached(&id(0)).is_none(), "nobody has asked it");
    end(&mut state, StepKind::Verify, Outcome::Serves);
    refresh(&mut state, unit_status());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn a_volume_is_asked_at_the_next_refresh_if_the_kernel_takes_a_path_of_it_for_empty() {
    let mut state = unit_attached();
    let mut status = unit_status();
    status.verify_reason = Some("the kernel takes 2:0:0:1 for empty".to_owned());
    refresh(&mut state, status);
    let job = take(&mut state, StepKind::Verify);
    assert_eq!(job.step.reason, "the kernel takes 2:0:0:1 for empty");
}

#[test]
fn a_refresh_that_finds_nothing_of_a_wanted_volume_does_not_shorten_its_retry() {
    let mut state = wanting([unit_status().spec.request().unwrap()]);
    retry_late(&mut state);
    let mut half = unit_status();
    half.condition = Condition::HalfAttached;
    refresh(&mut state, half);
    end(&mut state, StepKind::Attach, failed(ErrorKind::NotFound));
    let ended_steps = state.counters.steps;
    state.merge(Vec::new(), &Scope::All, ended_steps, true);
    assert_eq!(state.errors().len(), 1);
    assert!(take_all(&mut state).is_empty(), "it waits");
}

#[test]
fn a_certificate_that_ends_within_30_days_is_reported_once() {
    let with_days_left = |days: u64| {
        let spec = VolumeSpec::of(&request("nbds://192.0.2.1/vol-7"));
        let mut status = VolumeStatus::new(id(0), spec, Condition::Complete);
        let end = SystemTime::now() + Duration::from_secs(days * 24 * 60 * 60);
        let end = humantime::format_rfc3339_seconds(end).to_string();
        let tls = serde_json::json!({
            "version": "1.3",
            "cipher": "chacha20-poly1305",
            "certificate": {"subject": "CN=storage.example", "valid_until": end},
        });
        status.tls = serde_json::from_value(tls).unwrap();
        status
    };
    let mut state = wanting([]);
    let mut reported = |status: &VolumeStatus| {
        let events = refresh(&mut state, status.clone());
        let ends = |event: &&Event| matches!(event, Event::CertificateEnds { .. });
        events.iter().filter(ends).count()
    };
    assert_eq!(reported(&with_days_left(31)), 0);
    let soon = with_days_left(29);
    assert_eq!(reported(&soon), 1);
    assert_eq!(reported(&soon), 0);
    // A renewed certificate has an end of its own.
    assert_eq!(reported(&with_days_left(10)), 1);
}

/// The volume as an attach hands it out that found no device at its second address.
fn attached_by_one_path() -> Outcome {
    let mut status = unit_status();
    let hctl = status.paths.pop().unwrap();
    let via = RouteKind::Address { hctl };
    status
        .missing
        .push(MissingPath::new(via, &"it is not there"));
    Outcome::Attached(Box::new(status))
}

/// The same volume as a refresh finds it: another attach may bring its second path.
fn lacking() -> [VolumeStatus; 2] {
    let mut unscanned = unit_status();
    let mut without_session = unscanned.clone();
    unscanned.unscanned.extend(unscanned.paths.pop());
    without_session.paths.pop();
    let portal = "192.0.2.1:3260".parse().unwrap();
    without_session.without_session.push(portal);
    [unscanned, without_session]
}

#[test]
fn a_path_that_an_attach_did_not_bring_is_tried_again_after_a_pause_that_grows() {
    for lacking in lacking() {
        let mut state = wanting([unit_status().spec.request().unwrap()]);
        let hour = Duration::from_secs(3600);
        state.options = Options::default().retry(Duration::from_secs(1), hour);
        end(&mut state, StepKind::Attach, attached_by_one_path());
        for _ in 0..10 {
            refresh(&mut state, lacking.clone());
            assert!(take_all(&mut state).is_empty(), "it waits");
            state.reset_backoff(Duration::ZERO);
            refresh(&mut state, lacking.clone());
            end(&mut state, StepKind::Attach, attached_by_one_path());
        }
        state.plan_and_queue();
        let pause = state.schedule.next_plan().unwrap() - Instant::now();
        assert!(pause > Duration::from_secs(60), "{pause:?}");
    }
}

#[test]
fn a_volume_whose_missing_path_is_there_is_not_looked_at_again_for_it() {
    let mut state = wanting([unit_status().spec.request().unwrap()]);
    end(&mut state, StepKind::Attach, attached_by_one_path());
    state.plan_and_queue();
    assert!(state.refresh.is_wanted(), "the retry is due at once");
    while state.refresh.take().is_none() {
        std::thread::yield_now();
    }
    refresh(&mut state, unit_status());
    state.plan_and_queue();
    assert!(!state.refresh.is_wanted());
}

#[test]
fn a_dead_link_and_a_difference_are_forgotten_when_nothing_of_the_volume_is_left() {
    let mut state = wanting([request("nbd://192.0.2.1/a")]);
    let spec = VolumeSpec::of(&request("nbd://192.0.2.1/a"));
    let mut attached = VolumeStatus::new(id(0), spec, Condition::Complete);
    attached.nbd_index = NbdIndex::new(0);
    end(
        &mut state,
        StepKind::Attach,
        Outcome::Attached(Box::new(attached.clone())),
    );
    state.handle_change(&ChangeEvent::LinkDead(NbdIndex::new(0).unwrap()));
    // The kernel shows the death later than it reports it.
    refresh(&mut state, attached.clone());
    assert_eq!(state.step(&id(0)).unwrap().kind, StepKind::Heal);
    let ended_steps = state.counters.steps;
    state.merge(Vec::new(), &Scope::All, ended_steps, true);
    // Another process has attached it again.
    let events = refresh(&mut state, attached);
    assert!(events.is_empty(), "{events:?}");
    let events = end(&mut state, StepKind::Verify, Outcome::Serves);
    assert!(events.is_empty(), "it was not lost: {events:?}");

    let mut state = unit_found();
    let differs = Outcome::Differs(Condition::Changed, "another answers".to_owned());
    end(&mut state, StepKind::Verify, differs);
    let ended_steps = state.counters.steps;
    state.merge(Vec::new(), &Scope::All, ended_steps, true);
    refresh(&mut state, unit_status());
    take(&mut state, StepKind::Verify);
}
