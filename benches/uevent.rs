//! The hub's work for every uevent of the machine: it reads the event and delivers it to its
//! waiters, however many other waiters there are.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "criterion's macro makes a public function, and a bench may panic"
)]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lunbd::uevent::{Hub, HubOptions, Message, Watch};
use lunbd::{Deadline, Roots};

/// A disk's `add`, as Linux 6.12 sends it.
const ADD: &[u8] = b"add@/devices/pseudo_0/adapter0/host1/target1:0:0/1:0:0:7/block/sda\0\
    ACTION=add\0DEVPATH=/devices/pseudo_0/adapter0/host1/target1:0:0/1:0:0:7/block/sda\0\
    SUBSYSTEM=block\0MAJOR=8\0MINOR=0\0DEVNAME=sda\0DEVTYPE=disk\0DISKSEQ=9\0SEQNUM=1771\0";

/// A report of the disk's target.
const CHANGE: &[u8] = b"change@/devices/pseudo_0/adapter0/host1/target1:0:0/1:0:0:7\0\
    ACTION=change\0DEVPATH=/devices/pseudo_0/adapter0/host1/target1:0:0/1:0:0:7\0\
    SUBSYSTEM=scsi\0SDEV_UA=CAPACITY_DATA_HAS_CHANGED\0DEVTYPE=scsi_device\0DRIVER=sd\0\
    MODALIAS=scsi:t-0x00\0SEQNUM=1772\0";

fn parse(criterion: &mut Criterion) {
    criterion.bench_function("uevent/parse a disk's add", |bencher| {
        bencher.iter(|| Message::parse(black_box(ADD)));
    });
}

/// A hub without sockets; the benchmark feeds its events.
fn hub() -> Hub {
    let roots = Roots {
        sysfs: "/".into(),
        ..Roots::default()
    };
    Hub::start(&roots, &HubOptions::default()).unwrap()
}

fn others(hub: &Hub, count: usize) -> Vec<Watch> {
    let watch = |unit| hub.watch(&format!("9:0:0:{unit}"));
    (0..count).map(watch).collect()
}

/// Delivers one event to its waiter, which reads it, while others wait for something else.
fn dispatch(criterion: &mut Criterion) {
    let message = Message::parse(ADD).unwrap();
    let mut group = criterion.benchmark_group("uevent/to its watch, others present");
    for count in [1, 100, 10_000] {
        let hub = hub();
        let _others = others(&hub, count - 1);
        let mut mine = hub.watch("1:0:0:7");
        let now = Deadline::after(Duration::ZERO);
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            bencher.iter(|| {
                hub.feed(black_box(&message));
                mine.next(now).unwrap()
            });
        });
    }
}

/// One event that none of ten thousand waiters wants, as nearly all events are.
fn to_no_waiter(criterion: &mut Criterion) {
    let message = Message::parse(ADD).unwrap();
    let hub = hub();
    let _others = others(&hub, 10_000);
    criterion.bench_function("uevent/to none of 10000", |bencher| {
        bencher.iter(|| hub.feed(black_box(&message)));
    });
}

/// One report of a target, and its reading, while ten thousand waiters wait for something else.
fn unit_attention(criterion: &mut Criterion) {
    let message = Message::parse(CHANGE).unwrap();
    let hub = hub();
    let _others = others(&hub, 10_000);
    let mut watch = hub.watch_unit_attentions();
    let now = Deadline::after(Duration::ZERO);
    criterion.bench_function("uevent/news, 10000 others present", |bencher| {
        bencher.iter(|| {
            hub.feed(black_box(&message));
            watch.next(now).unwrap()
        });
    });
}

/// One event to all waiters that watch one component.
fn to_many_waiters(criterion: &mut Criterion) {
    let message = Message::parse(ADD).unwrap();
    let mut group = criterion.benchmark_group("uevent/to a crowd on one component");
    let now = Deadline::after(Duration::ZERO);
    for count in [1, 100, 10_000] {
        let hub = hub();
        let mut watches: Vec<_> = (0..count).map(|_| hub.watch("host1")).collect();
        group.throughput(Throughput::Elements(count));
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            bencher.iter_batched(
                || watches.iter_mut().for_each(|watch| drop(watch.next(now))),
                |()| hub.feed(black_box(&message)),
                BatchSize::PerIteration,
            );
        });
    }
}

/// Subscribes and unsubscribes, alone and among ten thousand: on separate components, and all
/// on the same one.
fn subscribe(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("uevent/watch and drop, others present");
    for count in [1, 10_000] {
        let hub = hub();
        let _others = others(&hub, count - 1);
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            bencher.iter(|| hub.watch(black_box("1:0:0:7")));
        });
    }
    let hub = hub();
    let _crowd: Vec<_> = (0..10_000).map(|_| hub.watch("host1")).collect();
    group.bench_function("10000 on the same component", |bencher| {
        bencher.iter(|| hub.watch(black_box("host1")));
    });
}

criterion_group!(
    benches,
    parse,
    dispatch,
    to_no_waiter,
    unit_attention,
    to_many_waiters,
    subscribe
);
criterion_main!(benches);
