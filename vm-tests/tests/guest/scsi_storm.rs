//! Many units are attached and detached at once while the kernel sends events of other devices.

use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lunbd::id::Wwid;
use lunbd::uevent::Notice;
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, Roots, Source};
use vm_tests::guest::agent::engine;
use vm_tests::guest::{self, ScsiDebug};

const HOSTS: u32 = 4;
/// The deadline of one call, far above what 64 at once take under emulation.
const PATIENCE: Duration = Duration::from_mins(10);
const FLOODED: usize = 4;
/// The events between two marks. udevd handles them before the next ones come, or it would fall
/// behind forever.
const BURST: usize = 40;

/// Unused block devices, which go when this is dropped.
struct Flooded(());

impl Flooded {
    fn load() -> Self {
        guest::modprobe("null_blk", &[&format!("nr_devices={FLOODED}"), "gb=1"]);
        guest::udevd::settle();
        Self(())
    }
}

impl Drop for Flooded {
    fn drop(&mut self) {
        // udev has a device open while it works on the last events.
        guest::udevd::settle();
        guest::run(&["modprobe", "-r", "null_blk"]);
    }
}

/// Makes the kernel send `change` events of devices that no test attaches, until `enough`.
/// Returns how many.
fn flood(enough: &AtomicBool) -> usize {
    // A separate engine: its hub shares nothing with the other engine's.
    let peer = Engine::start(Roots::default()).unwrap();
    let mut watch = peer.hub().watch("nullb0");
    let mut sent = 0;
    while !enough.load(Ordering::Relaxed) {
        for number in 0..BURST {
            let device = number % FLOODED;
            fs::write(format!("/sys/block/nullb{device}/uevent"), "change").unwrap();
        }
        let mark = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
        let mark = mark.trim();
        fs::write("/sys/block/nullb0/uevent", format!("change {mark}")).unwrap();
        sent += BURST + 1;
        let deadline = Deadline::after(PATIENCE);
        while let Some(notice) = watch.next(deadline) {
            let Notice::Event(event) = notice else { break };
            let by_udev = event.origin == lunbd::uevent::Origin::Udev;
            if by_udev && event.synth_uuid.as_deref() == Some(mark) {
                break;
            }
        }
    }
    sent
}

/// One attach and one detach of one unit.
fn round(engine: &Engine, source: &Source, expected: Option<&Wwid>) -> Wwid {
    let deadline = Deadline::after(PATIENCE);
    let mut request = AttachRequest::new(source.clone());
    if let Some(expected) = expected {
        request = request.expect(expected.clone());
    }
    let attachment = engine.attach(&request, deadline).unwrap();
    assert!(attachment.changed, "{attachment:?}");
    let Source::Scsi(hctl) = source else {
        unreachable!("an address")
    };
    assert_eq!(attachment.hctl(), Some(*hctl));
    let name = attachment.identity().unwrap().wwid().unwrap().clone();
    assert!(expected.is_none_or(|expected| *expected == name));
    for link in &attachment.links {
        assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
    }
    assert!(!attachment.links.is_empty(), "{attachment:?}");
    let deadline = Deadline::after(PATIENCE);
    let request = DetachRequest::new(source.clone()).expect(name.clone());
    let detachment = engine.detach(request, deadline).unwrap();
    assert!(
        detachment.changed && detachment.safe_to_unmap,
        "{detachment:?}"
    );
    assert_eq!(detachment.diskseq, attachment.diskseq);
    name
}

#[test]
fn units_of_four_hosts_come_and_go_at_once_in_a_flood_and_nothing_is_lost_or_left() {
    guest::sweep_time_limit();
    // The LUNs of each host, and how long the rounds last.
    let (luns, length) = if guest::sweeps_are_whole() {
        (16, Duration::from_mins(2))
    } else {
        (4, Duration::from_secs(10))
    };
    let units = usize::try_from(HOSTS * luns).unwrap();
    let target = ScsiDebug::options().luns(luns).hosts(HOSTS).load();
    let _flooded = Flooded::load();
    let engine = engine();
    let sources: Vec<Source> = target
        .hosts()
        .iter()
        .flat_map(|host| (0..luns).map(move |lun| format!("scsi:{host}:0:0:{lun}")))
        .map(|source| source.parse().unwrap())
        .collect();
    assert_eq!(sources.len(), units);
    // Learns the name of each unit, one at a time on each host.
    let names: Vec<Wwid> = thread::scope(|scope| {
        let learn = |of: &[Source]| -> Vec<Wwid> {
            let names = of.iter().map(|source| round(&engine, source, None));
            names.collect()
        };
        let hosts = sources.chunks(units / target.hosts().len());
        let threads: Vec<_> = hosts.map(|of| scope.spawn(move || learn(of))).collect();
        let learnt = threads.into_iter().map(|thread| thread.join().unwrap());
        learnt.flatten().collect()
    });
    let mut apart = names.clone();
    apart.sort();
    apart.dedup();
    assert_eq!(apart.len(), units, "a name for each unit");
    // The rounds above created what the process keeps: its index of devices has a descriptor.
    let before = guest::descriptors_and_threads();

    let enough = AtomicBool::new(false);
    let rounds: Vec<AtomicUsize> = sources.iter().map(|_| AtomicUsize::new(0)).collect();
    let slowest = Mutex::new(Duration::ZERO);
    let start = Instant::now();
    let sent = thread::scope(|scope| {
        let flood = scope.spawn(|| flood(&enough));
        let threads: Vec<_> = sources
            .iter()
            .zip(&names)
            .zip(&rounds)
            .map(|((source, name), rounds)| {
                let (engine, slowest) = (&engine, &slowest);
                scope.spawn(move || {
                    // A thread that starts late makes one round, too.
                    loop {
                        let begun = Instant::now();
                        round(engine, source, Some(name));
                        rounds.fetch_add(1, Ordering::Relaxed);
                        let mut slowest = slowest.lock().unwrap();
                        *slowest = begun.elapsed().max(*slowest);
                        if start.elapsed() >= length {
                            break;
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = threads
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        enough.store(true, Ordering::Relaxed);
        let sent = flood.join().unwrap();
        for end in ended {
            end.unwrap();
        }
        sent
    });
    let rounds: Vec<usize> = rounds.into_iter().map(AtomicUsize::into_inner).collect();
    let counters = engine.hub().counters();
    println!(
        "{} rounds in {:?}, {} to {} a LUN, the slowest {:?}; {sent} foreign events, {counters:?}",
        rounds.iter().sum::<usize>(),
        start.elapsed(),
        rounds.iter().min().unwrap(),
        rounds.iter().max().unwrap(),
        slowest.into_inner().unwrap()
    );
    assert!(rounds.iter().all(|&rounds| rounds >= 1), "{rounds:?}");
    assert!(sent > BURST, "{sent}");

    assert_eq!(target.devices(), [] as [&str; 0]);
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
    assert!(engine.stuck_calls().is_empty());
    assert_eq!(counters.watches, 0);
    assert_eq!((counters.foreign_messages, counters.cut), (0, 0));
    // Where events were lost, the watches learned that.
    let were_told = counters.overruns > 0 && counters.resyncs > 0;
    assert!(counters.events >= sent as u64 || were_told, "{counters:?}");
    guest::wait_for_no_more_than(&before);
}
