use std::fs;
use std::path::PathBuf;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use super::*;
use crate::uevent::message::Message;
use crate::uevent::{Hub, HubOptions};

const DEVPATH: &str = "/devices/x/block/sdb";
/// Much less than the time after which a barrier is sent again in any case.
const SHORT: Duration = Duration::from_secs(8);

/// A disk, whose events the test sends. The marks of the barriers are in its file `uevent`.
struct Machine {
    _root: tempfile::TempDir,
    roots: Roots,
    hub: Hub,
}

type Settling<'scope> = ScopedJoinHandle<'scope, Result<SettledDevice>>;

impl Machine {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let hub = Hub::start(&roots, &HubOptions::default().fed(Mode::Udev)).unwrap();
        let machine = Self {
            _root: root,
            roots,
            hub,
        };
        fs::create_dir_all(machine.dir()).unwrap();
        fs::write(machine.dir().join("uevent"), "").unwrap();
        machine
    }

    fn dir(&self) -> PathBuf {
        self.roots.sysfs.join(&DEVPATH[1..])
    }

    fn watch(&self) -> Watch {
        self.hub.watch("sdb")
    }

    fn send(&self, by: Origin, action: &str, seqnum: u64, more: &str) {
        let text = format!(
            "{action}@{DEVPATH}\0ACTION={action}\0DEVPATH={DEVPATH}\0SEQNUM={seqnum}\0{more}"
        );
        let message = Message::parse(text.as_bytes()).unwrap();
        match by {
            Origin::Kernel => self.hub.feed(&message),
            Origin::Udev => self.hub.feed_udev(&message),
        }
    }

    fn answer(&self, by: Origin, mark: &str) {
        let more = format!("SYNTH_UUID={mark}\0DEVLINKS=/dev/{mark}\0");
        self.send(by, "change", 9, &more);
    }

    /// The mark of the next barrier after `earlier`; `None` if none is sent in time.
    fn mark_after(&self, earlier: &str, limit: Duration) -> Option<String> {
        let begin = Instant::now();
        while begin.elapsed() < limit {
            let text = fs::read_to_string(self.dir().join("uevent")).unwrap();
            let mark = text.strip_prefix("change ").unwrap_or_default();
            if mark.len() == 36 && mark != earlier {
                return Some(mark.to_owned());
            }
            thread::park_timeout(Duration::from_millis(1));
        }
        None
    }

    fn next_mark(&self, earlier: &str) -> String {
        let mark = self.mark_after(earlier, SHORT);
        mark.expect("no barrier was sent")
    }

    /// Settles the disk, while `act` sends the events.
    fn settle<T>(
        &self,
        mut watch: Watch,
        limit: Duration,
        act: impl FnOnce(&Settling<'_>) -> T,
    ) -> Result<SettledDevice> {
        thread::scope(|scope| {
            let settling = scope.spawn(move || {
                let deadline = Deadline::after(limit);
                settle(&mut watch, Mode::Udev, &self.roots, &self.dir(), deadline)
            });
            act(&settling);
            settling.join().unwrap()
        })
    }
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_barrier_whose_event_the_kernel_drops_is_sent_again_and_the_answer_to_either_counts() {
    for answered in [0, 1] {
        let machine = Machine::new();
        let mut marks = Vec::new();
        let settled = machine.settle(machine.watch(), LONG, |_| {
            marks.push(machine.next_mark(""));
            marks.push(machine.next_mark(&marks[0]));
            machine.answer(Origin::Udev, &marks[answered]);
        });
        let settled = settled.unwrap();
        assert_eq!(settled.how, Settled::Barrier);
        assert_eq!(settled.links, [format!("/dev/{}", marks[answered])]);
    }
}

#[test]
fn a_barrier_that_the_kernel_has_sent_is_not_sent_again_while_udev_is_busy() {
    let machine = Machine::new();
    let settled = machine.settle(machine.watch(), LONG, |settling| {
        // Barriers follow each other until the test sends the event of one of them.
        let mut mark = machine.next_mark("");
        machine.answer(Origin::Kernel, &mark);
        while let Some(next) = machine.mark_after(&mark, Duration::from_millis(1500)) {
            assert!(!settling.is_finished());
            mark = next;
            machine.answer(Origin::Kernel, &mark);
        }
        machine.answer(Origin::Udev, &mark);
    });
    assert_eq!(settled.unwrap().how, Settled::Barrier);
}

#[test]
fn after_missed_events_only_the_answer_to_a_later_barrier_proves_it() {
    let machine = Machine::new();
    let watch = machine.watch();
    machine.send(Origin::Kernel, "add", 5, "");
    machine.send(Origin::Udev, "add", 5, "");
    machine.hub.feed_overrun();
    let mut last = String::new();
    let settled = machine.settle(watch, LONG, |_| {
        let before = machine.next_mark("");
        machine.answer(Origin::Kernel, &before);
        machine.hub.feed_overrun();
        last = machine.next_mark(&before);
        machine.answer(Origin::Udev, &before);
        machine.answer(Origin::Udev, &last);
    });
    let settled = settled.unwrap();
    assert_eq!(settled.how, Settled::Barrier);
    assert_eq!(settled.links, [format!("/dev/{last}")]);
}

#[test]
fn a_device_settles_again_by_a_barrier_and_not_by_the_event_that_settled_it() {
    let machine = Machine::new();
    let mut watch = machine.watch();
    machine.send(Origin::Kernel, "add", 5, "");
    machine.send(Origin::Udev, "add", 5, "");
    let (roots, dir) = (&machine.roots, machine.dir());
    let soon = Deadline::after(LONG);
    let first = settle(&mut watch, Mode::Udev, roots, &dir, soon).unwrap();
    assert_eq!(first.how, Settled::UdevEvent);
    let again = thread::scope(|scope| {
        let again = scope.spawn(|| settle_again(&mut watch, Mode::Udev, roots, &dir, soon));
        machine.answer(Origin::Udev, &machine.next_mark(""));
        again.join().unwrap().unwrap()
    });
    assert_eq!(again.how, Settled::Barrier);
}

#[test]
fn a_removal_ends_the_wait_and_a_late_udev_removal_of_the_previous_device_does_not() {
    let machine = Machine::new();
    let settled = machine.settle(machine.watch(), LONG, |_| {
        let mark = machine.next_mark("");
        machine.send(Origin::Udev, "remove", 3, "");
        machine.answer(Origin::Udev, &mark);
    });
    assert_eq!(settled.unwrap().how, Settled::Barrier);
    let machine = Machine::new();
    let begin = Instant::now();
    let settled = machine.settle(machine.watch(), LONG, |_| {
        machine.next_mark("");
        machine.send(Origin::Kernel, "remove", 6, "");
    });
    assert_eq!(settled.unwrap_err().kind(), ErrorKind::Vanished);
    assert!(begin.elapsed() < SHORT);
}

#[test]
fn a_udevd_that_does_not_answer_is_a_timeout_at_the_deadline() {
    let machine = Machine::new();
    let limit = Duration::from_secs(1);
    let begin = Instant::now();
    let settled = machine.settle(machine.watch(), limit, |_| {
        machine.answer(Origin::Kernel, &machine.next_mark(""));
    });
    let (error, took) = (settled.unwrap_err(), begin.elapsed());
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(limit <= took && took < SHORT, "{took:?}");
    let seen = error.last_seen().unwrap();
    assert!(
        seen.contains("the kernel's event 9, and none of udev"),
        "{seen}"
    );
}
