use super::*;

fn id(number: u32) -> VolumeId {
    format!("pvc-{number}").parse().unwrap()
}

#[test]
fn a_thread_that_could_not_be_started_is_started_later() {
    let (mut workers, now) = (Workers::new(2, false), Instant::now());
    assert!(workers.needs_thread(1, now));
    workers.note_start_failed(now);
    assert!(!workers.needs_thread(1, now), "the loop spins");
    assert!(workers.needs_thread(1, workers.next_slow(now)));
}

#[test]
fn no_more_threads_are_started_than_there_are_steps() {
    let (mut workers, now) = (Workers::new(8, false), Instant::now());
    for _ in 0..2 {
        assert!(workers.needs_thread(2, now));
        workers.note_started();
    }
    assert!(!workers.needs_thread(2, now), "both have a thread");
    workers.begin(id(0), Priority::FirstTry, None, now);
    assert!(!workers.needs_thread(1, now), "the other will be taken");
    workers.begin(id(1), Priority::FirstTry, None, now);
    assert!(workers.needs_thread(1, now));
}

#[test]
fn a_session_recovery_that_could_not_be_started_is_started_later() {
    let now = Instant::now();
    let apply = Workers::new(8, false);
    assert!(!apply.must_start_recovery(now), "an apply recovers none");
    let mut workers = Workers::new(8, true);
    assert!(workers.must_start_recovery(now));
    workers.note_start_failed(now);
    assert!(!workers.must_start_recovery(now), "the loop spins");
    let again = workers
        .next_recovery_start()
        .expect("the loop sleeps for ever");
    assert!(workers.must_start_recovery(again));
    workers.note_recovery_started();
    assert!(!workers.must_start_recovery(again) && workers.next_recovery_start().is_none());
}

#[test]
fn a_detach_has_a_thread_where_attaches_hang_in_all_other_threads() {
    let mut workers = Workers::new(8, false);
    let begin = Instant::now();
    let later = begin + SLOW_AFTER;
    let mut number = 0;
    let mut begin_those_of = |priority: Priority| {
        while workers.capacity(later).admits(priority, None) {
            assert!(number < 1000, "without a limit");
            workers.begin(id(number), priority, None, begin);
            number += 1;
        }
        number
    };
    let attaches = begin_those_of(Priority::FirstTry);
    assert_eq!(begin_those_of(Priority::Retry), attaches);
    let unblocked = begin_those_of(Priority::Unblocked);
    assert_eq!(unblocked, attaches + 1);
    let capacity = workers.capacity(later);
    assert!(capacity.admits(Priority::Detach, None));
    // A thread can be started for it.
    for _ in 0..unblocked {
        workers.note_started();
    }
    assert!(workers.needs_thread(1, later));
}

#[test]
fn first_attaches_that_hang_at_one_endpoint_leave_threads_for_another_endpoint() {
    let endpoint = |name: &str| Endpoint {
        name: name.to_owned(),
        may_hang: false,
    };
    let (silent, answers) = (endpoint("silent"), endpoint("answers"));
    let (mut workers, begin) = (Workers::new(8, false), Instant::now());
    for number in 0..8 {
        assert!(
            workers
                .capacity(begin)
                .admits(Priority::FirstTry, Some(&silent))
        );
        workers.begin(id(number), Priority::FirstTry, Some(silent.clone()), begin);
    }
    let capacity = workers.capacity(begin + SLOW_AFTER);
    assert!(!capacity.admits(Priority::FirstTry, Some(&silent)));
    assert!(capacity.admits(Priority::FirstTry, Some(&answers)));
}

#[test]
fn a_further_thread_is_started_for_each_slow_step_and_ends_after_it() {
    let mut workers = Workers::new(2, false);
    let begin = Instant::now();
    let threads = 2 + u32::try_from(RESERVED).unwrap();
    assert!(workers.needs_thread(1, begin));
    for number in 0..threads {
        workers.note_started();
        workers.begin(id(number), Priority::FirstTry, None, begin);
    }
    assert!(!workers.needs_thread(1, begin));
    let later = begin + SLOW_AFTER;
    for number in threads..2 * threads {
        assert!(workers.needs_thread(1, later));
        workers.note_started();
        assert!(!workers.needs_thread(1, later), "one has nothing to do");
        workers.begin(id(number), Priority::FirstTry, None, later);
    }
    assert!(!workers.needs_thread(1, later));
    assert!(!workers.release_thread(later));
    workers.end(&id(0));
    assert!(workers.release_thread(later));
    assert!(!workers.release_thread(later));
}
