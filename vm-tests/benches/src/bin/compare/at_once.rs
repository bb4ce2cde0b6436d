//! The cost of many devices at once by one engine. One thread reads each event once for all
//! callers that wait.

use std::fs;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use lunbd::{AttachRequest, Engine, Source};
use vm_bench::figures::{AtOnce, Burst};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::{self, udevd};

use crate::nbd::is_free;
use crate::rounds::{in_ticks, millis};

const DEVICES: u32 = 64;

pub(crate) fn measure() -> AtOnce {
    let _module = NbdModule::load(DEVICES);
    // One thread for each client, since many idle threads are not to be measured.
    let server = NbdServer::nbdkit(At::unix(), &["--threads=1", "memory", "64M"]);
    let engine = engine();
    let sources: Vec<Source> = (0..DEVICES)
        .map(|n| server.uri(&format!("e{n}")).parse().expect("a source"))
        .collect();
    let attach = all_at_once(&engine, &sources, |source| {
        let request = AttachRequest::new(source.clone());
        engine.attach(&request, soon()).expect("an attach").changed
    });
    let inventory = engine.inventory().expect("an inventory");
    assert_eq!(inventory.units.len(), sources.len());
    let detach = all_at_once(&engine, &sources, |source| {
        let detachment = engine.detach(source.clone(), soon());
        detachment.expect("a detach").changed
    });
    let disks = guest::entries("/sys/block");
    let mut disks = disks.iter().filter(|disk| disk.starts_with("nbd"));
    assert!(disks.all(|disk| is_free(disk)), "a device is left");
    AtOnce {
        devices: DEVICES,
        attach,
        detach,
    }
}

fn all_at_once(
    engine: &Engine,
    sources: &[Source],
    call: impl Fn(&Source) -> bool + Sync,
) -> Burst {
    udevd::settle();
    until_read(engine);
    let before = (engine.hub().counters(), kernel_events(), cpu());
    let together = &Barrier::new(sources.len() + 1);
    let call = &call;
    let start = thread::scope(|scope| {
        for source in sources {
            scope.spawn(move || {
                together.wait();
                assert!(call(source), "{source} was so already");
            });
        }
        // Taken before the wait, since the threads may begin before it returns.
        let start = Instant::now();
        together.wait();
        start
    });
    let (wall, cpu) = (start.elapsed(), cpu().saturating_sub(before.2));
    udevd::settle();
    until_read(engine);
    let counters = engine.hub().counters();
    let burst = Burst {
        wall_ms: millis(wall),
        cpu_ms: millis(cpu),
        kernel_events: kernel_events() - before.1,
        events_read: counters.events - before.0.events,
        overruns: counters.overruns - before.0.overruns,
    };
    // Each event comes twice, from the kernel and from udev, however many callers wait.
    assert!(
        burst.events_read <= 2 * burst.kernel_events,
        "an event was read more than once: {burst:?}"
    );
    burst
}

/// Returns when the hub has nothing left to read.
fn until_read(engine: &Engine) {
    let mut seen = engine.hub().counters().events;
    loop {
        thread::sleep(Duration::from_millis(200));
        let now = engine.hub().counters().events;
        if now == seen {
            return;
        }
        seen = now;
    }
}

/// The number of the last uevent that the kernel sent. The kernel numbers them in sequence.
fn kernel_events() -> u64 {
    let path = "/sys/kernel/uevent_seqnum";
    let number = fs::read_to_string(path).expect(path);
    number.trim().parse().expect(path)
}

/// The processor time of this process and of its ended children so far, user and system
/// (proc(5), fields 14 to 17 of `stat`).
pub(crate) fn cpu() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").expect("/proc/self/stat");
    let (_, after_name) = stat.rsplit_once(')').expect("a name");
    let fields = after_name.split_whitespace().skip(11).take(4);
    let ticks: u64 = fields
        .map(|field| field.parse::<u64>().expect("a number of ticks"))
        .sum();
    in_ticks(ticks)
}

pub(crate) fn print(at_once: &AtOnce) {
    println!(
        "{:<42} {:>10} {:>10} {:>14} {:>14}",
        format!("NBD, {} devices from as many threads", at_once.devices),
        "wall",
        "CPU",
        "kernel events",
        "events read"
    );
    for (name, burst) in [("attach", &at_once.attach), ("detach", &at_once.detach)] {
        println!(
            "  {:<40} {:>7.0} ms {:>7.0} ms {:>14} {:>14}",
            format!("lunbd, one engine: {name}"),
            burst.wall_ms,
            burst.cpu_ms,
            burst.kernel_events,
            burst.events_read
        );
    }
    println!("  each event is read once from the kernel and once from udev, for all threads\n");
}
