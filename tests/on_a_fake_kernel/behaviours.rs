//! The suite of `tests/behaviour`, on the kernel of `tests/fake_kernel`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::behaviour;
use crate::behaviour::machine::{Held, Machine, Seen};
use crate::behaviour::minimum::Minimum;
use crate::fake_kernel::{Address, FakeKernel, Kernel, Unit, access};
use lunbd::Engine;
use lunbd::kernel::OpenMode;
use lunbd::scsi::StuckCall;

/// A machine whose array presents the units that the suite requests.
struct Fake {
    fake: FakeKernel,
    hosts: u32,
}

impl Fake {
    fn presenting(hosts: u32, units: impl Fn(u32) -> Vec<Unit>) -> Arc<Self> {
        let fake = FakeKernel::with_hosts(hosts);
        fake.kernel().change(|state| {
            for host in 0..hosts {
                for (lun, unit) in (0..).zip(units(host)) {
                    state.units.insert(Address::of(host, lun), unit);
                }
            }
        });
        Arc::new(Self { fake, hosts })
    }

    fn kernel(&self) -> &Arc<Kernel> {
        self.fake.kernel()
    }
}

fn disk(host: u32, lun: u32) -> Unit {
    let number = u64::from(host) << 16 | u64::from(lun);
    Unit {
        bytes: 16 << 20,
        ..Unit::disk(number)
    }
}

/// Runs an undo function on drop.
struct Undo<F: FnMut()>(F);

impl<F: FnMut()> Drop for Undo<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Machine for Fake {
    fn with(hosts: u32, luns: u32) -> Arc<Self> {
        Self::presenting(hosts, |host| (0..luns).map(|lun| disk(host, lun)).collect())
    }

    fn with_a_tape() -> Arc<Self> {
        Self::presenting(1, |_| {
            vec![Unit {
                kind: 1,
                ..Unit::disk(0)
            }]
        })
    }

    fn with_two_paths() -> Arc<Self> {
        Self::presenting(2, |_| (0..2).map(|lun| disk(0, lun)).collect())
    }

    fn skip(reason: &str) -> ! {
        panic!("this kernel can do all: {reason}")
    }

    fn hosts(&self) -> Vec<u32> {
        (0..self.hosts).collect()
    }

    fn engine(&self) -> Arc<Engine> {
        access::engine(self.fake.root())
    }

    fn journal(&self) -> PathBuf {
        self.fake.root().join("journal")
    }

    fn give_to_others(&self) {
        let last = self.hosts - 1;
        self.kernel().change(|state| {
            for (address, unit) in &mut state.units {
                if address.host == last {
                    unit.naa += 1 << 24;
                    unit.serial.push('b');
                }
            }
        });
    }

    fn grow(&self) -> u64 {
        let mut size = 0;
        self.kernel().change(|state| {
            let largest = state.units.values().map(|unit| unit.bytes).max();
            size = ((largest.unwrap_or(0) >> 30) + 1) << 30;
            state.units.values_mut().for_each(|unit| unit.bytes = size);
        });
        size
    }

    fn hang(&self) {
        self.kernel().change(|state| state.swallows = true);
    }

    fn answer_again(&self) {
        self.kernel().change(|state| state.swallows = false);
    }

    fn wait_until_given_up(&self, engine: &Engine) {
        self.kernel().change(|state| state.swallowed.clear());
        behaviour::machine::wait_until("the calls to return", || engine.stuck_calls().is_empty());
    }

    fn require_stack(&self, call: &StuckCall) {
        assert_eq!(call.stack, [] as [&str; 0], "its /proc has no thread");
    }

    fn fail_writes(&self, fail: bool) {
        self.kernel().change(|state| {
            state
                .units
                .values_mut()
                .for_each(|unit| unit.fails_writes = fail);
        });
    }

    fn write(&self, node: &Path) -> Held {
        self.kernel().write_to(node);
        Box::new(())
    }

    fn mount(&self, node: &Path, place: &'static str) -> Held {
        let (file, devno) = self.claimed(node);
        self.kernel().enter_mount(&devno, place);
        let kernel = Arc::clone(self.kernel());
        Box::new((Undo(move || kernel.leave_mount(&devno)), file))
    }

    fn open(&self, node: &Path, claim: bool) -> Held {
        let roots = access::roots(self.fake.root());
        let mode = if claim {
            OpenMode::Exclusive
        } else {
            OpenMode::Shared
        };
        let (file, _) = roots.devices.open(node, mode).unwrap();
        Box::new((self.enter_opener(node, false), file))
    }

    fn has_stored(&self, _node: &Path) -> bool {
        self.kernel()
            .change(|state| state.units.values().all(|unit| !unit.is_dirty))
    }

    fn open_to_write(&self, node: &Path) -> Held {
        Box::new(self.enter_opener(node, true))
    }

    fn open_in_multipathd(&self, node: &Path) -> Held {
        // No process of this machine has this number.
        let pid = 4_194_305;
        let kernel = Arc::clone(self.kernel());
        let number = kernel.enter_opener_of((pid, "multipathd\n"), node, false);
        Box::new(Undo(move || kernel.leave_opener_of(pid, number)))
    }

    fn stop_udevd(&self) -> Held {
        self.kernel().stop_udevd(true);
        let kernel = Arc::clone(self.kernel());
        Box::new(Undo(move || kernel.stop_udevd(false)))
    }

    fn settle(&self) {
        self.kernel().settle();
    }

    fn kernel_events(&self, act: &mut dyn FnMut()) -> Vec<Seen> {
        self.kernel().settle();
        let events = self.kernel().listen();
        act();
        self.kernel().settle();
        let of_kernel = events.try_iter().filter(|event| !event.of_udev);
        of_kernel
            .map(|event| Seen {
                is_udevds: event
                    .more
                    .iter()
                    .any(|(key, value)| key == "SYNTH_UUID" && value == "0"),
                kind: (event.action, event.subsystem, event.devtype),
            })
            .collect()
    }

    fn minimum(&self) -> &'static Minimum {
        Minimum::of((6, 12))
    }
}

impl Fake {
    /// Shows this process as an opener until the result is dropped.
    fn enter_opener(&self, node: &Path, writes: bool) -> Undo<impl FnMut() + use<>> {
        let number = self.kernel().enter_opener(node, writes);
        let kernel = Arc::clone(self.kernel());
        Undo(move || kernel.leave_opener(number))
    }

    /// Opens the disk exclusively; also returns its number.
    fn claimed(&self, node: &Path) -> (File, String) {
        let roots = access::roots(self.fake.root());
        let (file, devno) = roots.devices.open(node, OpenMode::Exclusive).unwrap();
        (file, devno.unwrap().to_string())
    }
}

crate::behaviours!(Fake);
