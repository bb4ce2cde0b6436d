//! A hanging call here waits for a channel.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use nix::unistd::gettid;

use super::*;
use crate::error::Retry;

const LONG: Duration = Duration::from_secs(60);
/// Long enough for a thread to start on a busy machine.
const SHORT: Duration = Duration::from_secs(2);

fn scheduler() -> CallScheduler {
    CallScheduler::new(&Roots::default())
}

fn at(hctl: &str) -> Hctl {
    hctl.parse().unwrap()
}

/// A sender that releases a hanging call, and the call.
fn hanging() -> (Sender<()>, impl FnOnce() -> Result<()> + Send + 'static) {
    let (release, hang): (Sender<()>, Receiver<()>) = mpsc::channel();
    let call = move || {
        let _ = hang.recv();
        Ok(())
    };
    (release, call)
}

fn on_host<T: Send + 'static>(
    scheduler: &CallScheduler,
    hctl: &str,
    limit: Duration,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (what, seen) = (format!("the scan of {hctl}"), || "state=running".to_owned());
    let deadline = Deadline::after(limit);
    let slot = scheduler.on_host(at(hctl), Stage::Scan, &what, deadline)?;
    slot.run(deadline, seen, call)
}

fn on_device<T: Send + 'static>(
    scheduler: &CallScheduler,
    hctl: &str,
    limit: Duration,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (what, seen) = (format!("the flush of {hctl}"), || {
        "state=running".to_owned()
    });
    let slot = scheduler.on_device(at(hctl), Stage::Flush, &what)?;
    slot.run(Deadline::after(limit), seen, call)
}

/// Polls until the condition holds.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Deadline::after(LONG);
    while !so() {
        assert!(!deadline.has_passed(), "{what}");
        thread::yield_now();
    }
}

fn queued(scheduler: &CallScheduler, host: u32) -> usize {
    let register = scheduler.table();
    let running = register.running(crate::id::HostNo(host));
    running.map_or(0, |(_, _, waiting)| waiting)
}

fn is_idle(scheduler: &CallScheduler) -> bool {
    scheduler.table().is_empty()
}

#[test]
fn the_report_of_a_stuck_call_shows_the_thread_that_is_in_the_kernel_for_it() {
    let scheduler = scheduler();
    let (release, hang) = hanging();
    let (told, own) = mpsc::channel();
    let call = |note_thread: NoteThread| {
        let in_the_kernel = thread::spawn(move || {
            note_thread();
            told.send(gettid()).unwrap();
            hang()
        });
        in_the_kernel.join().unwrap()
    };
    let slot = scheduler.on_device(at("3:0:0:1"), Stage::Flush, "the flush");
    let ended = slot
        .unwrap()
        .run_with_thread(Deadline::after(SHORT), String::new, call);
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::TimedOut);
    let own = own.recv_timeout(LONG).unwrap();
    let calls: Vec<Call> = scheduler.table().stuck().cloned().collect();
    let [call] = &*calls else {
        panic!("{calls:?}");
    };
    let stack = call.stack.clone().unwrap();
    assert!(stack.ends_with(format!("task/{own}/stack")), "{stack:?}");
    drop(release);
}

#[test]
fn calls_on_one_host_run_one_at_a_time_in_the_order_in_which_they_came() {
    let scheduler = scheduler();
    let (release, first) = hanging();
    let (done, order) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| on_host(&scheduler, "3:0:0:0", LONG, first));
        until("the first runs", || {
            scheduler.table().running(crate::id::HostNo(3)).is_some()
        });
        for number in 1..=5 {
            let (scheduler, done) = (&scheduler, done.clone());
            scope.spawn(move || {
                on_host(scheduler, "3:0:0:9", LONG, move || {
                    done.send(number).unwrap();
                    Ok(())
                })
            });
            until("it queues", || queued(scheduler, 3) == number);
        }
        assert!(order.try_recv().is_err());
        drop(release);
    });
    drop(done);
    assert_eq!(order.iter().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert!(is_idle(&scheduler));
}

#[test]
fn a_call_that_hangs_quarantines_its_host_until_it_returns_and_no_other_host() {
    let scheduler = scheduler();
    let (release, call) = hanging();
    let error = on_host(&scheduler, "3:0:0:7", SHORT, call).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert_eq!(error.last_seen(), Some("state=running"));

    for refused in [
        on_host(&scheduler, "3:0:0:8", LONG, || Ok(())),
        on_device(&scheduler, "3:0:0:9", LONG, || Ok(())),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Quarantined);
        assert_eq!(error.retry(), Retry::Again);
        let text = error.to_string();
        assert!(text.contains("host 3 is quarantined"), "{text}");
        assert!(text.contains("stage scan"), "{text}");
        assert!(text.contains("the scan of 3:0:0:7"), "{text}");
        assert!(text.contains("kernel"), "{text}");
    }
    on_host(&scheduler, "4:0:0:7", LONG, || Ok(())).unwrap();
    on_device(&scheduler, "4:0:0:7", LONG, || Ok(())).unwrap();

    let stuck = scheduler.stuck();
    assert_eq!(stuck.len(), 1);
    assert_eq!(stuck[0].hctl, at("3:0:0:7"));
    assert!(stuck[0].whole_host && !stuck[0].age.is_zero());

    // The return alone lifts the quarantine: no call asks in between.
    drop(release);
    until("the quarantine lifts", || is_idle(&scheduler));
    assert_eq!(scheduler.stuck(), []);
    on_host(&scheduler, "3:0:0:8", LONG, || Ok(())).unwrap();
}

#[test]
fn a_call_that_waits_behind_a_hanging_one_is_refused_once_that_is_given_up() {
    let scheduler = scheduler();
    let (release, call) = hanging();
    let (error, waited) = thread::scope(|scope| {
        let first = scope.spawn(|| on_host(&scheduler, "3:0:0:7", SHORT, call));
        until("the first runs", || {
            scheduler.table().running(crate::id::HostNo(3)).is_some()
        });
        let start = Instant::now();
        let error = on_host(&scheduler, "3:0:0:8", LONG, || Ok(())).unwrap_err();
        assert!(first.join().unwrap().is_err());
        (error, start.elapsed())
    });
    assert_eq!(error.kind(), ErrorKind::Quarantined);
    assert!(waited < LONG / 2, "{waited:?}");
    drop(release);
}

#[test]
fn a_wait_in_the_queue_ends_at_its_own_deadline_and_names_what_is_ahead() {
    let scheduler = scheduler();
    let (release, call) = hanging();
    thread::scope(|scope| {
        scope.spawn(|| on_host(&scheduler, "3:0:0:7", LONG, call));
        until("the first runs", || {
            scheduler.table().running(crate::id::HostNo(3)).is_some()
        });
        let error = on_host(&scheduler, "3:0:0:8", SHORT, || Ok(())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.stage(), Some(Stage::Queue));
        assert!(error.to_string().contains("the scan of 3:0:0:7"), "{error}");
        // The call has left the queue, and a call that only waited quarantines nothing.
        assert_eq!(queued(&scheduler, 3), 0);
        assert_eq!(scheduler.stuck(), []);
        drop(release);
    });
    assert!(is_idle(&scheduler));
}

#[test]
fn a_device_that_hangs_stops_neither_its_hosts_other_devices_nor_its_delete() {
    let scheduler = scheduler();
    let (release, call) = hanging();
    let error = on_device(&scheduler, "3:0:0:7", SHORT, call).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let error = on_device(&scheduler, "3:0:0:7", LONG, || Ok(())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Quarantined);
    assert!(error.to_string().contains("device 3:0:0:7"), "{error}");
    assert!(scheduler.is_stuck_at(at("3:0:0:7"), Stage::Flush));
    assert!(!scheduler.is_stuck_at(at("3:0:0:8"), Stage::Flush));

    on_device(&scheduler, "3:0:0:8", LONG, || Ok(())).unwrap();
    // The delete of an abandoned device runs like this.
    on_host(&scheduler, "3:0:0:7", LONG, || Ok(())).unwrap();
    drop(release);
    until("the quarantine lifts", || is_idle(&scheduler));
    on_device(&scheduler, "3:0:0:7", LONG, || Ok(())).unwrap();
}

#[test]
fn a_call_that_dies_frees_its_host() {
    let scheduler = scheduler();
    let result = on_host(&scheduler, "3:0:0:7", LONG, || -> Result<()> {
        std::panic::resume_unwind(Box::new("dies"))
    });
    assert!(result.is_err());
    on_host(&scheduler, "3:0:0:7", LONG, || Ok(())).unwrap();
}

#[test]
fn nothing_is_begun_after_the_deadline_and_the_place_is_free_again() {
    let scheduler = scheduler();
    let (began, seen) = mpsc::channel();
    let result = on_host(&scheduler, "3:0:0:7", Duration::ZERO, move || {
        Ok(began.send(()).is_ok())
    });
    assert_eq!(result.unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(seen.recv().is_err());
    assert!(is_idle(&scheduler));
}

#[test]
fn what_the_kernel_may_hold_for_long_has_none_of_the_open_files_of_the_process() {
    let scheduler = scheduler();
    let file = File::open("/dev/null").unwrap();
    let own = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let call = || {
        let own = own.clone();
        move || Ok(Path::new(&own).exists())
    };
    assert!(!on_host(&scheduler, "1:0:0:1", LONG, call()).unwrap());
    let rescan = scheduler.on_device_isolated(at("1:0:0:1"), Stage::Rescan, "the rescan");
    let rescanned = rescan
        .unwrap()
        .run(Deadline::after(LONG), String::new, call());
    assert!(!rescanned.unwrap());
    // This call may open a file for its caller, so it shares the open files.
    assert!(on_device(&scheduler, "1:0:0:1", LONG, call()).unwrap());
}

#[test]
fn a_question_that_is_not_answered_quarantines_nothing_and_is_not_asked_beside_itself() {
    let scheduler = scheduler();
    let ask = |call: Box<dyn FnOnce() -> Result<()> + Send>| {
        let deadline = Deadline::after(SHORT);
        scheduler.ask(at("3:0:0:1"), Stage::Identify, "a state", deadline, call)
    };
    let (release, hang) = hanging();
    assert_eq!(ask(Box::new(hang)).unwrap(), None);
    assert!(scheduler.stuck().is_empty());
    on_device(&scheduler, "3:0:0:1", LONG, || Ok(())).unwrap();
    let beside = ask(Box::new(|| panic!("asked beside the first")));
    assert_eq!(beside.unwrap(), None);
    drop(release);
    until("the question to return", || is_idle(&scheduler));
    assert_eq!(ask(Box::new(|| Ok(()))).unwrap(), Some(()));
    // A quarantined device is not asked.
    let (release, hang) = hanging();
    on_device(&scheduler, "3:0:0:1", SHORT, hang).unwrap_err();
    let refused = ask(Box::new(|| panic!("asked while it is quarantined")));
    assert_eq!(refused.unwrap(), None);
    drop(release);
}
