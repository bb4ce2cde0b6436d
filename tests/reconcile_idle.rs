//! The cost of an idle agent with a thousand volumes, on a machine that is a directory.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test panics to fail, prints what it measured, and measures a pause"
)]

#[allow(dead_code, reason = "other tests use the rest of it")]
mod machine;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use lunbd::engine::journal::Record;
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Options, Reconciler};
use lunbd::{AttachRequest, Deadline, Engine, Source};
use machine::san::San;
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::json;

const VOLUMES: u32 = 1000;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// A value of `/proc/self/status`, in KiB.
fn status(key: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let number = line.unwrap().trim_start_matches(':').trim();
    number.split(' ').next().unwrap().parse().unwrap()
}

/// Whether every thread but this one sleeps, so that all work is finished.
fn all_others_sleep() -> bool {
    let own = nix::unistd::gettid().to_string();
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let others = tasks.filter(|task| task.file_name() != *own);
    others
        .filter_map(|task| fs::read_to_string(task.path().join("stat")).ok())
        .all(|stat| {
            let state = stat.rsplit_once(") ").unwrap().1;
            state.starts_with('S')
        })
}

/// A thousand attached disks, and their journal.
fn machine() -> (San, Desired) {
    let mut san = San::new();
    san.machine.host(0);
    san.machine.write("run/lunbd/journal/journal.lock", "");
    let mut desired = Desired::default();
    for lun in 0..VOLUMES {
        let name = san.disk(0, lun, Some(lun));
        let volume = format!("pvc-7f0c5a1e-9b1d-4d4e-8c57-{lun:012}");
        let record = json!({
            "volume": volume,
            "spec": {
                "sources": [format!("scsi:0:0:0:{lun}")], "expect": null, "min_paths": 1,
                "multipath": "prefer", "nbd": null,
            },
            "intent": null,
            "outcome": {
                "node": format!("/dev/{name}"), "devno": format!("8:{}", lun * 16),
                "diskseq": (lun + 1).to_string(), "size": 1_048_576,
                "names": [format!("naa.60014051{:016x}{lun:08x}", 0)], "map": null,
                "nbd_index": null, "at": "2026-11-21T03:00:00Z",
            },
        });
        let sealed = Record::seal(&serde_json::to_vec(&record).unwrap());
        let file = format!("run/lunbd/journal/{volume}.json");
        fs::write(san.machine.path(&file), sealed).unwrap();
        let source: Source = format!("scsi:0:0:0:{lun}").parse().unwrap();
        let volume: VolumeId = volume.parse().unwrap();
        desired.insert(volume, &AttachRequest::new(source)).unwrap();
    }
    (san, desired)
}

/// There is only one test, because it measures the whole process.
#[test]
fn a_thousand_attached_volumes_wake_no_thread_while_idle_and_fit_in_32_mib() {
    const IDLE: Duration = Duration::from_secs(3);
    let (san, desired) = machine();
    let engine = Arc::new(Engine::start(san.machine.roots()).unwrap());
    let journal = engine.open_journal(soon()).unwrap();
    let last = desired.iter().last().unwrap().0.clone();
    let resync = Duration::from_secs(3600);
    let options = Options::default().resync(resync).trust();
    let reconciler = Reconciler::new(engine, journal, options);
    reconciler.set(desired);
    let (before, after, woken, memory) = std::thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let attached = reconciler.wait_attached(&last, soon());
        // The volume is known as attached a moment before the plan without work, which also
        // wakes the workers.
        let deadline = soon();
        // Look twice: a thread that was seen asleep could have been woken by the next one.
        let sleep = || all_others_sleep() && all_others_sleep();
        let is_idle = || reconciler.counters().plans > 0 && sleep();
        while !is_idle() && !deadline.has_passed() {
            std::thread::yield_now();
        }
        let before = reconciler.counters();
        let switches = || {
            getrusage(UsageWho::RUSAGE_SELF)
                .unwrap()
                .voluntary_context_switches()
        };
        let began = switches();
        std::thread::sleep(IDLE);
        let woken = switches() - began;
        let after = reconciler.counters();
        let memory = (status("VmRSS"), status("VmHWM"));
        // Stop it in any case: a running thread would keep the test from ending.
        reconciler.stop();
        running.join().unwrap().unwrap();
        attached.unwrap();
        (before, after, woken, memory)
    });
    println!(
        "{VOLUMES} volumes, idle for {IDLE:?}: {} wake-ups of the loop, {woken} voluntary \
         context switches of the whole process (this sleep is one); {} looks at everything",
        after.wakeups - before.wakeups,
        after.full_refreshes
    );
    assert_eq!(after, before);
    assert!(woken <= 3, "{woken}");
    assert_eq!((after.full_refreshes, after.steps), (1, 0));
    let (resident, peak) = memory;
    println!("resident: {resident} KiB, at its peak {peak} KiB");
    assert!(peak < 32 << 10, "{peak} KiB");
}
