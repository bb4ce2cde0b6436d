use std::time::{Duration, Instant};

use super::*;
use crate::engine::{AttachRequest, ChangeEvent};
use crate::error::{Error, ErrorKind};
use crate::id::{HostNo, SessionId, VolumeId};
use crate::iscsi::SessionOptions;
use crate::reconcile::desired::Desired;
use crate::reconcile::job::{Job, Outcome};
use crate::reconcile::options::Options;

const TARGET: &str = "iqn.2003-01.org.lunbd:array";

/// Two volumes of one target for which the array has mapped no units.
fn wanting_two() -> State {
    let mut desired = Desired::default();
    for lun in [1, 2] {
        let source: Source = format!("iscsi://10.0.0.1/{TARGET}/{lun}").parse().unwrap();
        let options = SessionOptions::new("iqn.2026-01.example:host".parse().unwrap());
        let volume: VolumeId = format!("pvc-{lun}").parse().unwrap();
        let request = AttachRequest::new(source).log_in(options);
        desired.insert(volume, &request).unwrap();
    }
    let mut state = State::default();
    state.set_desired(desired);
    state
}

fn take_all(state: &mut State) -> Vec<Job> {
    state.plan_and_queue();
    std::iter::from_fn(|| state.take_job(8)).collect()
}

/// Fails the step; its next attempt is in an hour.
fn fails(state: &mut State, mut job: Job) {
    let hour = Duration::from_secs(3600);
    let done = Outcome::Failed(Error::new(ErrorKind::NotFound, "no such LUN"));
    state.end_step(&mut job, done, &Options::default().retry(hour, hour));
}

fn session(id: u32, target: &str) -> ScsiTransport {
    ScsiTransport::Session {
        id: SessionId(id),
        host: HostNo(id),
        target: target.parse().unwrap(),
    }
}

/// The kernel sends a session event, and these transports are up.
fn see(state: &mut State, standing: &[ScsiTransport]) {
    state.handle_change(&ChangeEvent::HostOrSession);
    state.merge_transports(ScsiTransports {
        up: standing.iter().cloned().collect(),
        is_changing: false,
    });
}

#[test]
fn a_login_of_one_volumes_try_is_no_cause_to_try_another_at_once() {
    let mut state = wanting_two();
    let [one, two] = <[Job; 2]>::try_from(take_all(&mut state)).ok().unwrap();
    fails(&mut state, two);
    // The attempt that still runs has logged in, and will log out again.
    see(&mut state, &[session(1, TARGET)]);
    assert!(take_all(&mut state).is_empty(), "tried for our own login");
    fails(&mut state, one);
    see(&mut state, &[]);
    assert!(take_all(&mut state).is_empty(), "tried for our own logout");

    // Another process has logged in.
    see(&mut state, &[session(2, TARGET)]);
    let jobs = take_all(&mut state);
    assert_eq!(jobs.len(), 2);
    for job in jobs {
        fails(&mut state, job);
    }
    see(&mut state, &[session(2, TARGET)]);
    assert!(take_all(&mut state).is_empty(), "it stood before");
}

#[test]
fn a_session_that_a_try_has_left_standing_is_a_cause_for_the_other_volumes_of_its_target() {
    let mut state = wanting_two();
    let [one, two] = <[Job; 2]>::try_from(take_all(&mut state)).ok().unwrap();
    fails(&mut state, two);
    see(&mut state, &[session(1, TARGET)]);
    fails(&mut state, one);
    see(&mut state, &[session(1, TARGET)]);
    assert_eq!(take_all(&mut state).len(), 2);
}

#[test]
fn a_session_with_another_target_is_no_cause() {
    let mut state = wanting_two();
    for job in take_all(&mut state) {
        fails(&mut state, job);
    }
    see(&mut state, &[session(1, "iqn.2003-01.org.lunbd:other")]);
    assert!(take_all(&mut state).is_empty());
}

#[test]
fn an_event_of_another_host_is_no_cause_and_one_of_an_unknown_host_is() {
    let mut state = wanting_two();
    let both = [
        session(1, TARGET),
        session(2, "iqn.2003-01.org.lunbd:other"),
    ];
    see(&mut state, &both);
    for job in take_all(&mut state) {
        fails(&mut state, job);
    }
    let mut tell = |host: u32| {
        let host = Some(HostNo(host));
        state.handle_change(&ChangeEvent::Transport { host });
        let jobs = take_all(&mut state);
        let count = jobs.len();
        for job in jobs {
            fails(&mut state, job);
        }
        count
    };
    assert_eq!(tell(2), 0);
    assert_eq!(tell(1), 2);
    assert_eq!(tell(7), 2);
}

#[test]
fn a_session_that_serves_again_is_a_cause_for_the_volumes_of_its_target() {
    let mut state = wanting_two();
    for job in take_all(&mut state) {
        fails(&mut state, job);
    }
    let other = "iqn.2003-01.org.lunbd:other";
    state.retry_target(&other.parse().unwrap());
    assert!(take_all(&mut state).is_empty());
    state.retry_target(&TARGET.parse().unwrap());
    assert_eq!(take_all(&mut state).len(), 2);
}

#[test]
fn tries_that_failed_together_are_spread_when_all_is_tried_again() {
    let mut state = wanting_two();
    for job in take_all(&mut state) {
        fails(&mut state, job);
    }
    let now = Instant::now();
    state.reset_backoff(Duration::from_secs(30));
    let tracked = state.tracked.values();
    let nexts: Vec<Instant> = tracked
        .filter_map(|tracked| tracked.failure.as_ref()?.next_try())
        .collect();
    assert_eq!(nexts.len(), 2);
    let limit = now + Duration::from_secs(40);
    assert!(nexts.iter().all(|next| *next > now && *next < limit));
    state.reset_backoff(Duration::ZERO);
    assert_eq!(take_all(&mut state).len(), 2);
}
