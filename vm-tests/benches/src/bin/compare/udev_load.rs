//! Other devices, whose changes keep udev's queue busy.

use std::fs;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vm_tests::guest::{self, KernelUevent};

/// Changes a second, over all of the disks.
pub(crate) const RATE: u32 = 5;
/// How long udev works on each change without using the processor, as for a disk that is slow
/// to answer a probe.
pub(crate) const EACH: Duration = Duration::from_millis(500);
/// How long the changes go on.
pub(crate) const LASTING: Duration = Duration::from_secs(3);
const RULES: &str = "/run/udev/rules.d/99-slow-disk.rules";
/// This file exists while udevd has something to do.
const QUEUE: &str = "/run/udev/queue";

/// Disks that change on request, and for which no attach waits. The module stays loaded.
pub(crate) struct UdevLoad {
    disks: u32,
}

impl UdevLoad {
    pub(crate) fn new() -> Self {
        let disks = 16;
        guest::modprobe("null_blk", &[&format!("nr_devices={disks}"), "gb=1"]);
        fs::create_dir_all("/run/udev/rules.d").expect("a place for rules");
        let rule = format!(
            "ACTION==\"change\", KERNEL==\"nullb*\", PROGRAM=\"/usr/bin/sleep {}\"\n",
            EACH.as_secs_f64()
        );
        fs::write(RULES, rule).expect(RULES);
        guest::run(&["udevadm", "control", "--reload"]);
        guest::udevd::settle();
        Self { disks }
    }

    /// Starts the changes. The queue is busy when this returns.
    pub(crate) fn begin(&self) -> RunningUdevLoad {
        let disks = self.disks;
        let changes = thread::spawn(move || {
            let start = Instant::now();
            let mut number = 0;
            while start.elapsed() < LASTING {
                let disk = number % disks;
                let uevent = format!("/sys/block/nullb{disk}/uevent");
                fs::write(&uevent, "change").expect(&uevent);
                number += 1;
                let next = Duration::from_secs(1) * number / RATE;
                thread::sleep(next.saturating_sub(start.elapsed()));
            }
        });
        guest::wait_until("udev's queue to be busy", LASTING, || {
            Path::new(QUEUE).exists().then_some(())
        });
        RunningUdevLoad(Some(changes))
    }

    pub(crate) fn caused(event: &KernelUevent) -> bool {
        event.devpath.contains("/nullb")
    }

    /// The part of the load during which udev's queue is busy while nothing else goes on.
    pub(crate) fn busy_part(&self) -> f64 {
        let running_load = self.begin();
        let start = Instant::now();
        let (mut busy, mut looks) = (0_u32, 0_u32);
        while start.elapsed() < LASTING {
            busy += u32::from(Path::new(QUEUE).exists());
            looks += 1;
            thread::sleep(Duration::from_millis(5));
        }
        drop(running_load);
        f64::from(busy) / f64::from(looks)
    }
}

/// The changes under way. Dropping it waits for the last of them.
pub(crate) struct RunningUdevLoad(Option<JoinHandle<()>>);

impl Drop for RunningUdevLoad {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            thread.join().expect("the changes");
        }
    }
}
