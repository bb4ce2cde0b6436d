//! The hub under more events than it can take, and the reports of arrays.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lunbd::engine::Attachment;
use lunbd::uevent::{
    Hub, HubOptions, Mode, Notice, UnitAttention, UnitAttentionEvent, UnitAttentionWatch, Watch,
};
use lunbd::{AttachRequest, Deadline, Engine, Roots};
use nix::fcntl::OFlag;
use vm_tests::guest::agent::{attach, engine, soon, unit};
use vm_tests::guest::{self, KernelUevent, ScsiDebug, UeventCounter, udevd};

const WATCHES: usize = 10_000;
const MARKED: usize = 64;
const FLOODED: usize = 8;
const FLOOD: usize = 100_000;
const RECEIVE_BUFFER: usize = 4 << 10;

fn now() -> Deadline {
    Deadline::after(Duration::ZERO)
}

fn in_minutes(minutes: u64) -> Deadline {
    Deadline::after(Duration::from_mins(minutes))
}

/// Block devices that do nothing, `nullb0` and so on. They exist while this lives.
struct NullBlk;

impl NullBlk {
    fn load(devices: usize) -> Self {
        guest::modprobe("null_blk", &[&format!("nr_devices={devices}"), "gb=1"]);
        assert!(Path::new(&format!("/sys/block/nullb{}", devices - 1)).exists());
        Self
    }
}

impl Drop for NullBlk {
    fn drop(&mut self) {
        guest::run(&["modprobe", "-r", "null_blk"]);
    }
}

fn have_sent(device: usize, event: &str) {
    fs::write(format!("/sys/block/nullb{device}/uevent"), event).unwrap();
}

/// Sends at least [`FLOOD`] events, and continues until `enough`.
fn flood(sent: &AtomicUsize, enough: &AtomicBool) {
    loop {
        let number = sent.fetch_add(1, Ordering::Relaxed);
        if number >= FLOOD && enough.load(Ordering::Relaxed) {
            sent.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        have_sent(MARKED + number % FLOODED, "change");
    }
}

/// Makes the kernel send events with unique marks until one arrives. Returns the number of
/// resyncs before it.
fn see_own_mark(hub: &Hub, device: usize, deadline: Deadline) -> usize {
    let mut watch = hub.watch(&format!("nullb{device}"));
    let mut resyncs = 0;
    loop {
        let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
        have_sent(device, &format!("change {}", uuid.trim()));
        loop {
            match watch.next(deadline).expect("an event or a resync") {
                // This event or its resync must arrive: nothing else wakes the waiter.
                Notice::Event(event) if event.synth_uuid.as_deref() == Some(uuid.trim()) => {
                    return resyncs;
                }
                Notice::Event(_) => {}
                Notice::Resync => break resyncs += 1,
            }
        }
    }
}

fn threads_and_descriptors() -> (usize, usize) {
    let count = |dir| fs::read_dir(dir).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

fn seqnum() -> u64 {
    let text = fs::read_to_string("/sys/kernel/uevent_seqnum").unwrap();
    text.trim().parse().unwrap()
}

/// udevd would need an hour for this flood.
#[test]
fn in_a_flood_of_100000_uevents_no_waiter_of_10000_is_lost_and_attach_and_detach_go_on() {
    guest::enter();
    guest::time_limit(Duration::from_mins(20));
    let _no_udevd = udevd::absent();
    let target = ScsiDebug::with_luns(4);
    let _devices = NullBlk::load(MARKED + FLOODED);
    let before = threads_and_descriptors();
    // A few events fill a buffer this small: the flood must overrun it on a slow machine too.
    let options = HubOptions::default().receive_buffer(RECEIVE_BUFFER);
    let engine = Engine::with_options(Roots::default(), &options).unwrap();
    let hub = engine.hub();
    assert_eq!(hub.mode(), Mode::KernelOnly);
    let watch = |unit| hub.watch(&format!("9999:0:0:{unit}"));
    let mut watches: Vec<Watch> = (0..WATCHES).map(watch).collect();

    let (first, deadline) = (seqnum(), in_minutes(15));
    let (sent, enough) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut attached = 0;
    let resyncs: Vec<usize> = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| flood(&sent, &enough));
        }
        let marked: Vec<_> = (0..MARKED)
            .map(|device| scope.spawn(move || see_own_mark(hub, device, deadline)))
            .collect();
        let rounds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for lun in [1, 2, 3] {
                let request = AttachRequest::new(unit(&target, lun));
                assert!(engine.attach(&request, deadline).unwrap().changed);
                assert!(target.disk(lun).is_some());
                assert!(engine.detach(unit(&target, lun), deadline).unwrap().changed);
                assert_eq!(target.devices(), [] as [&str; 0]);
                attached += 1;
            }
            guest::wait_until("the loss of an event", soon().remaining(), || {
                (hub.counters().overruns > 0).then_some(())
            });
        }));
        let resyncs = marked.into_iter().map(std::thread::ScopedJoinHandle::join);
        let resyncs: Vec<_> = resyncs.collect();
        // The flood may end only now, or the rounds would run without one.
        enough.store(true, Ordering::Relaxed);
        rounds.unwrap();
        resyncs.into_iter().map(Result::unwrap).collect()
    });
    assert_eq!(attached, 3);
    let raised = seqnum() - first;
    let sent = sent.into_inner();
    assert!(sent >= FLOOD && raised >= sent as u64, "{sent}, {raised}");

    // When the hub's socket delivers this event, the hub has read all earlier ones.
    let mut last = hub.watch("nullb0");
    let synced = guest::wait_until("an event after the flood", soon().remaining(), || {
        have_sent(0, "change");
        last.next(Deadline::after(Duration::from_millis(200)))
    });
    println!(
        "{sent} sent, {raised} raised, {synced:?}, {:?}",
        hub.counters()
    );
    println!("resyncs of those with a mark: {resyncs:?}");
    let counters = hub.counters();
    assert!(
        counters.events > 0 && counters.events < raised,
        "{counters:?}"
    );
    assert_eq!((counters.foreign_messages, counters.cut), (0, 0));
    assert_eq!(counters.watches, WATCHES as u64 + 1);
    assert!(counters.waits >= MARKED as u64 && counters.longest_wait <= counters.waited);

    // Each of the ten thousand got one notice, and not one for each overrun.
    for watch in &mut watches {
        assert!(matches!(watch.next(now()), Some(Notice::Resync)));
    }
    let told = hub.counters();
    assert_eq!(told.waits - counters.waits, WATCHES as u64);
    assert!(watches.iter_mut().all(|watch| watch.next(now()).is_none()));
    assert_eq!(
        hub.counters().waits_in_vain - told.waits_in_vain,
        WATCHES as u64
    );
    drop((watches, last));
    assert_eq!(hub.counters().watches, 0);

    drop(engine);
    let limit = Duration::from_secs(60);
    guest::wait_until("no thread or descriptor to be left", limit, || {
        (threads_and_descriptors() == before).then_some(())
    });
}

/// A read that reaches the target.
fn read_past_the_cache(attachment: &Attachment) {
    let disk = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_DIRECT.bits())
        .open(&attachment.node)
        .unwrap();
    let mut buffer = vec![0; 8192];
    let aligned = buffer.as_ptr().align_offset(4096);
    disk.read_exact_at(&mut buffer[aligned..aligned + 4096], 0)
        .unwrap();
}

fn next(news: &mut UnitAttentionWatch) -> (UnitAttention, String) {
    match news.next(soon()) {
        Some(UnitAttentionEvent::Attention { what, unit, .. }) => (what, unit.unwrap().to_string()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_arrays_reports_arrive_as_events_with_their_unit_and_cause_no_scan() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(4));
    let mut news = engine.hub().watch_unit_attentions();
    let attachment = attach(&engine, &target, 1);
    let address = format!("{}:0:0:1", target.host());
    // A new unit first reports its reset.
    assert_eq!(
        next(&mut news),
        (UnitAttention::PoweredOnOrReset, address.clone())
    );
    udevd::settle();
    let mut others = engine.hub().watch("nbd0");
    let counter = UeventCounter::start();

    // The target reports the change with its next answer, not before.
    target.set("virtual_gb", 4);
    assert!(
        news.next(Deadline::after(Duration::from_millis(200)))
            .is_none()
    );
    read_past_the_cache(&attachment);
    assert_eq!(
        next(&mut news),
        (UnitAttention::CapacityChanged, address.clone())
    );
    target.set("max_luns", 6);
    read_past_the_cache(&attachment);
    assert_eq!(
        next(&mut news),
        (UnitAttention::LunsChanged, address.clone())
    );

    // There are two reports. Only udev's own rule reacts, which passes each on to the disk
    // (60-block.rules): no scan, no device, no resize.
    let raised = counter.until_quiet(Duration::from_secs(3));
    let (reports, rest): (Vec<_>, Vec<_>) = raised
        .iter()
        .partition(|event| event.properties.contains_key("SDEV_UA"));
    assert_eq!(reports.len(), 2, "{reports:?}");
    let passed_on = |event: &&KernelUevent| {
        let by = event.properties.get("SYNTH_UUID").map(String::as_str);
        event.kind() == ("change", "block", "disk") && by == Some("0")
    };
    assert!(rest.len() <= 2 && rest.iter().all(passed_on), "{rest:?}");
    assert_eq!(target.devices(), [address]);
    let size = fs::read_to_string(
        Path::new("/sys/block")
            .join(target.disk(1).unwrap())
            .join("size"),
    )
    .unwrap();
    assert_eq!(size.trim(), (8 << 11).to_string());
    assert!(news.next(now()).is_none());
    assert!(others.next(now()).is_none());
}
