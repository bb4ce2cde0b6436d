//! The memory that ten thousand waiters for events cost.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test panics to fail, and prints what it measured"
)]

use std::fmt::Write;
use std::time::Duration;

use lunbd::uevent::{Hub, HubOptions, Message, Watch};
use lunbd::{Deadline, Roots};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const WATCHES: usize = 10_000;

/// A hub that has neither sockets nor a thread, because its sysfs is a directory.
fn hub(machine: &tempfile::TempDir) -> Hub {
    let roots = Roots {
        sysfs: machine.path().to_owned(),
        ..Roots::default()
    };
    Hub::start(&roots, &HubOptions::default()).unwrap()
}

fn in_use() -> usize {
    dhat::HeapStats::get().curr_bytes
}

/// A disk's `add` event, for the watch of its unit.
fn add(unit: usize, datagram: &mut String) {
    let path = format!("/devices/x/host1/target1:0:0/1:0:0:{unit}/block/sda");
    datagram.clear();
    write!(
        datagram,
        "add@{path}\0ACTION=add\0DEVPATH={path}\0SUBSYSTEM=block\0DEVTYPE=disk\0SEQNUM={unit}\0"
    )
    .unwrap();
}

/// There is only one test, because the allocator counts for the whole process.
#[test]
fn ten_thousand_watches_take_a_few_mebibytes_and_give_them_back() {
    let _counts = dhat::Profiler::builder().testing().build();
    let machine = tempfile::tempdir().unwrap();
    let hub = hub(&machine);

    let before = in_use();
    let watch = |unit| hub.watch(&format!("1:0:0:{unit}"));
    let mut watches: Vec<Watch> = (0..WATCHES).map(watch).collect();
    let idle = in_use() - before;
    assert_eq!(hub.counters().watches, WATCHES as u64);
    println!("{} bytes for each idle watch", idle / WATCHES);
    assert!(idle / WATCHES < 1024, "{} bytes a watch", idle / WATCHES);

    // Each watch gets one event that it has not read yet, and a flood comes that no watch
    // wants.
    let mut datagram = String::new();
    for unit in 0..WATCHES + 100_000 {
        add(unit, &mut datagram);
        hub.feed(&Message::parse(datagram.as_bytes()).unwrap());
    }
    let waiting = in_use() - before;
    println!("{} bytes for each with an event unread", waiting / WATCHES);
    assert!(waiting < 16 << 20, "{waiting} bytes");
    assert_eq!(hub.counters().events, 110_000);

    // After the read, the event stays in each watch's knowledge of its device.
    let now = Deadline::after(Duration::ZERO);
    assert!(watches.iter_mut().all(|watch| watch.next(now).is_some()));
    let known = in_use() - before;
    println!("{} bytes for each that has read it", known / WATCHES);
    assert!(known < 16 << 20, "{known} bytes");

    drop(watches);
    let after = in_use().saturating_sub(before);
    // The map keeps its empty buckets for later.
    assert!(after < 1 << 20, "{after} bytes are left");
}
