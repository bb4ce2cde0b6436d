use std::time::Duration;

use super::*;
use crate::uevent::event::Notice;
use crate::uevent::event::tests::event;

const PATH: &str = "/devices/x/host2/target2:0:0/2:0:0:3/scsi_disk/2:0:0:3";

fn component(name: &str) -> Interest {
    Interest::Component(name.into())
}

fn subscribe(dispatch: &Dispatch, interest: &Interest) -> Arc<Queue> {
    dispatch.subscribe(interest).1
}

fn deliver(dispatch: &Dispatch, devpath: &str) {
    dispatch.deliver(devpath, || false, || Some(event(devpath)));
}

fn read(queue: &Queue) -> Vec<Notice> {
    std::iter::from_fn(|| queue.take(Duration::ZERO)).collect()
}

#[test]
fn an_event_reaches_each_waiter_for_everything_or_a_component_of_its_path_once() {
    let dispatch = Dispatch::default();
    let mine = subscribe(&dispatch, &component("2:0:0:3"));
    let other = subscribe(&dispatch, &component("2:0:0:30"));
    let all = subscribe(&dispatch, &Interest::Everything);
    let attentions = subscribe(&dispatch, &Interest::UnitAttentionEvent);
    deliver(&dispatch, PATH);
    assert!(matches!(&read(&mine)[..], [Notice::Event(e)] if e.devpath == PATH));
    assert_eq!(read(&all).len(), 1);
    assert_eq!((read(&other).len(), read(&attentions).len()), (0, 0));
}

#[test]
fn an_event_without_a_waiter_is_not_copied() {
    let dispatch = Dispatch::default();
    let interest = component("nbd0");
    let (id, _queue) = dispatch.subscribe(&interest);
    dispatch.unsubscribe(&interest, id);
    let path = "/devices/virtual/block/nbd0";
    dispatch.deliver(path, || unreachable!(), || unreachable!());
    assert_eq!(dispatch.counters().events, 1);
}

#[test]
fn a_unit_attention_reaches_its_watcher_and_another_event_is_not_copied() {
    let dispatch = Dispatch::default();
    let attentions = subscribe(&dispatch, &Interest::UnitAttentionEvent);
    dispatch.deliver(PATH, || true, || Some(event(PATH)));
    dispatch.deliver(PATH, || false, || unreachable!());
    assert_eq!(read(&attentions).len(), 1);
}

#[test]
fn a_waiter_that_does_not_read_gets_one_notice_of_missed_events() {
    let dispatch = Dispatch::default();
    let queue = subscribe(&dispatch, &component("x"));
    for _ in 0..10_000 {
        deliver(&dispatch, "/x");
    }
    let notices = read(&queue);
    assert_eq!(notices.len(), crate::uevent::queue::LONGEST + 1);
    assert!(matches!(notices.last(), Some(Notice::Resync)));
    assert_eq!(dispatch.counters().resyncs, 1);
}

#[test]
fn a_thousand_overruns_give_each_waiter_one_resync() {
    let dispatch = Dispatch::default();
    let one = subscribe(&dispatch, &component("a"));
    let all = subscribe(&dispatch, &Interest::Everything);
    let attentions = subscribe(&dispatch, &Interest::UnitAttentionEvent);
    for _ in 0..1000 {
        dispatch.resync();
    }
    for queue in [one, all, attentions] {
        assert!(matches!(read(&queue)[..], [Notice::Resync]));
    }
    let counters = dispatch.counters();
    assert_eq!((counters.overruns, counters.resyncs), (1000, 3));
}

#[test]
fn an_event_with_a_path_longer_than_the_kernel_sends_is_skipped() {
    let dispatch = Dispatch::default();
    let queue = subscribe(&dispatch, &component("x"));
    let path = |length: usize| format!("/{}/x", "y".repeat(length - 3));
    deliver(&dispatch, &path(LONGEST_TEXT));
    deliver(&dispatch, &path(LONGEST_TEXT + 1));
    assert_eq!(read(&queue).len(), 1);
    let counters = dispatch.counters();
    assert_eq!((counters.events, counters.foreign_messages), (1, 1));
}

/// Ten thousand waiters come to one component and go in the worst order for a
/// list. At every step the rest is as small as before, and an event visits only
/// its own watchers.
#[test]
fn ten_thousand_waiters_on_one_component_leave_nothing_behind() {
    let dispatch = Dispatch::default();
    let (crowded, alone) = (component("host2"), component("nbd7"));
    let other = subscribe(&dispatch, &alone);
    let mut there: Vec<_> = (0..10_000).map(|_| dispatch.subscribe(&crowded)).collect();
    deliver(&dispatch, "/devices/virtual/block/nbd7");
    deliver(&dispatch, "/devices/x/host2");
    assert!(there.iter().all(|(_, queue)| read(queue).len() == 1));
    assert_eq!(read(&other).len(), 1);
    while let Some((id, _)) = there.pop() {
        dispatch.unsubscribe(&crowded, id);
        let waiters = dispatch.waiters.lock();
        let left = waiters.by_component.get("host2").map_or(0, Group::len);
        assert_eq!(left, there.len());
        assert_eq!(waiters.count, left as u64 + 1);
    }
    assert_eq!(dispatch.waiters.lock().by_component.len(), 1);
}

/// A flood of unknown paths leaves nothing in memory.
#[test]
fn a_flood_of_distinct_paths_leaves_nothing_behind() {
    let dispatch = Dispatch::default();
    let queue = subscribe(&dispatch, &component("nbd7"));
    for number in 0..100_000 {
        dispatch.deliver(
            &format!("/devices/{number}"),
            || unreachable!(),
            || unreachable!(),
        );
    }
    assert!(read(&queue).is_empty());
    let waiters = dispatch.waiters.lock();
    assert_eq!(waiters.by_component.len(), 1);
}
