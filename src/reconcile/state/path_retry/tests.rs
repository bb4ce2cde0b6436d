use std::time::{Duration, Instant};

use super::*;
use crate::engine::{ChangeEvent, VolumeStatus};
use crate::error::{ErrorKind, MissingPath};
use crate::id::{HostNo, RouteKind, SessionId};
use crate::iscsi::SessionOptions;
use crate::reconcile::job::{Job, Outcome};
use crate::reconcile::state::tests::{failed, id, refresh, request, retry_late, take_all, wanting};

const TARGET: &str = "iqn.2003-01.org.lunbd:array";

/// Two volumes of one target for which the array has mapped no units. A failed step is retried
/// after an hour.
fn wanting_two() -> State {
    let options = SessionOptions::new("iqn.2026-01.example:host".parse().unwrap());
    let request = |lun| request(&format!("iscsi://10.0.0.1/{TARGET}/{lun}"));
    let mut state = wanting([1, 2].map(|lun| request(lun).log_in(options.clone())));
    retry_late(&mut state);
    state
}

fn fail(state: &mut State, job: Job) {
    state.end_step(job, failed(ErrorKind::NotFound));
}

/// Fails all steps that can begin now. Returns how many they were.
fn fail_all(state: &mut State) -> usize {
    let jobs = take_all(state);
    let count = jobs.len();
    for job in jobs {
        fail(state, job);
    }
    count
}

fn session(id: u32, target: &str) -> ScsiTransport {
    ScsiTransport::Session {
        id: SessionId(id),
        host: HostNo(id),
        target: target.parse().unwrap(),
    }
}

/// The kernel sends a session event, and these transports are up.
fn refresh_transports(state: &mut State, up: &[ScsiTransport]) {
    state.handle_change(&ChangeEvent::HostOrSession);
    state.merge_transports(ScsiTransports {
        up: up.iter().cloned().collect(),
        is_changing: false,
    });
}

#[test]
fn a_login_for_one_volume_is_no_cause_to_retry_another() {
    let mut state = wanting_two();
    let [one, two] = <[Job; 2]>::try_from(take_all(&mut state)).ok().unwrap();
    fail(&mut state, two);
    // The attempt that still runs has logged in, and will log out again.
    refresh_transports(&mut state, &[session(1, TARGET)]);
    assert!(take_all(&mut state).is_empty(), "retried for our own login");
    fail(&mut state, one);
    refresh_transports(&mut state, &[]);
    assert!(
        take_all(&mut state).is_empty(),
        "retried for our own logout"
    );

    // Another process has logged in.
    refresh_transports(&mut state, &[session(2, TARGET)]);
    assert_eq!(fail_all(&mut state), 2);
    refresh_transports(&mut state, &[session(2, TARGET)]);
    assert!(take_all(&mut state).is_empty(), "the session was up before");
}

#[test]
fn a_session_that_a_failed_attach_keeps_is_a_cause_to_retry_the_other_volumes_of_its_target() {
    let mut state = wanting_two();
    let [one, two] = <[Job; 2]>::try_from(take_all(&mut state)).ok().unwrap();
    fail(&mut state, two);
    refresh_transports(&mut state, &[session(1, TARGET)]);
    fail(&mut state, one);
    refresh_transports(&mut state, &[session(1, TARGET)]);
    assert_eq!(take_all(&mut state).len(), 2);
}

#[test]
fn a_session_with_another_target_is_no_cause_to_retry() {
    let mut state = wanting_two();
    fail_all(&mut state);
    refresh_transports(&mut state, &[session(1, "iqn.2003-01.org.lunbd:other")]);
    assert!(take_all(&mut state).is_empty());
}

#[test]
fn a_session_with_the_target_of_a_new_path_is_a_cause_to_retry_an_attached_volume() {
    let other = "iqn.2003-01.org.lunbd:other";
    let one_path = request(&format!("iscsi://10.0.0.1/{TARGET}/1"));
    let second: Source = format!("iscsi://10.0.0.2/{other}/1").parse().unwrap();
    let both = one_path.clone().path(second).min_paths(2);
    let mut state = wanting([both]);
    retry_late(&mut state);
    let spec = VolumeSpec::of(&one_path);
    refresh(
        &mut state,
        VolumeStatus::new(id(0), spec, Condition::Complete),
    );
    assert_eq!(fail_all(&mut state), 1);
    refresh_transports(&mut state, &[session(1, other)]);
    assert_eq!(fail_all(&mut state), 1);
}

#[test]
fn an_event_of_another_host_is_no_cause_to_retry_and_one_of_an_unknown_host_is() {
    let mut state = wanting_two();
    let both = [
        session(1, TARGET),
        session(2, "iqn.2003-01.org.lunbd:other"),
    ];
    refresh_transports(&mut state, &both);
    fail_all(&mut state);
    let mut tell = |host: u32| {
        let host = Some(HostNo(host));
        state.handle_change(&ChangeEvent::Transport { host });
        fail_all(&mut state)
    };
    assert_eq!(tell(2), 0);
    assert_eq!(tell(1), 2);
    assert_eq!(tell(7), 2);
}

#[test]
fn a_session_that_serves_again_is_a_cause_to_retry_the_volumes_of_its_target() {
    let mut state = wanting_two();
    fail_all(&mut state);
    let other = "iqn.2003-01.org.lunbd:other";
    state.retry_target(&other.parse().unwrap());
    assert!(take_all(&mut state).is_empty());
    state.retry_target(&TARGET.parse().unwrap());
    assert_eq!(take_all(&mut state).len(), 2);
}

#[test]
fn retries_of_steps_that_failed_together_are_spread() {
    let mut state = wanting_two();
    fail_all(&mut state);
    let now = Instant::now();
    state.reset_backoff(Duration::from_secs(30));
    let tracked = state.tracked.values();
    let mut nexts: Vec<Duration> = tracked
        .filter_map(|tracked| Some(tracked.failure.as_ref()?.next_try()? - now))
        .collect();
    nexts.sort();
    let [first, second] = nexts[..] else {
        panic!("{nexts:?}");
    };
    let apart = Duration::from_secs(7);
    assert!(first > apart && second > first + apart, "{nexts:?}");
    assert!(second < Duration::from_secs(40), "{nexts:?}");
    state.reset_backoff(Duration::ZERO);
    assert_eq!(take_all(&mut state).len(), 2);
}

#[test]
fn a_session_that_serves_again_is_a_cause_to_look_at_the_volumes_that_lack_a_path_over_it() {
    let mut state = wanting_two();
    for job in take_all(&mut state) {
        let spec = state.desired.get(&job.step.volume).unwrap().clone();
        let mut status = VolumeStatus::new(job.step.volume.clone(), spec, Condition::Complete);
        let via = RouteKind::Address {
            hctl: "3:0:0:1".parse().unwrap(),
        };
        status
            .missing
            .push(MissingPath::new(via, &"it is not there"));
        state.end_step(job, Outcome::Attached(Box::new(status)));
    }
    assert!(take_all(&mut state).is_empty() && !state.refresh.is_wanted());
    let other = "iqn.2003-01.org.lunbd:other";
    state.retry_target(&other.parse().unwrap());
    assert!(!state.refresh.is_wanted());
    state.retry_target(&TARGET.parse().unwrap());
    assert!(state.refresh.is_wanted());
}
