//! The suite of `tests/behaviour`, on a real kernel with `scsi_debug` and udevd.

#[path = "../../../tests/behaviour/mod.rs"]
mod behaviour;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use behaviour::machine::{Held, Machine, Seen};
use behaviour::minimum::Minimum;
use lunbd::Engine;
use lunbd::scsi::StuckCall;
use vm_tests::guest::direct::stored;
use vm_tests::guest::directory::Directory;
use vm_tests::guest::named_reader::NamedReader;
use vm_tests::guest::unwritten::{LazyWriteback, keep_unwritten};
use vm_tests::guest::{self, KernelUevent, ScsiDebug, UeventCounter, udevd};

/// How long an unexpected event could take to arrive.
const QUIET: Duration = Duration::from_secs(2);
/// The kernel gives up an unanswered command after this time. It is longer than everything that
/// must continue meanwhile.
const HUNG_SECS: u32 = 30;

/// How many bytes the machine writes to a disk.
const WRITTEN: usize = 64 << 10;

const INQUIRY_LIMIT: &str = "/sys/module/scsi_mod/parameters/inq_timeout";
const WRITE_PROTECT: &str = "/sys/module/scsi_debug/parameters/wp";

/// The guest with its `scsi_debug`.
struct Guest {
    target: ScsiDebug,
    directory: Directory,
    gigabytes: AtomicU64,
    /// The byte that the next write repeats. All units share one store, so each write differs.
    next_byte: AtomicU8,
    /// The kernel's own limit of an INQUIRY, if the test changed it.
    inquiry_limit: Mutex<Option<String>>,
}

impl Guest {
    fn on(target: ScsiDebug) -> Arc<Self> {
        Arc::new(Self {
            target,
            directory: Directory::new("behaviour"),
            gigabytes: AtomicU64::new(0),
            next_byte: AtomicU8::new(0x5a),
            inquiry_limit: Mutex::default(),
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let limit = self.inquiry_limit.lock().unwrap().take();
        if let Some(limit) = limit {
            let _ = fs::write(INQUIRY_LIMIT, limit);
        }
    }
}

/// Unmounts the file system on drop.
struct Mounted(&'static str);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
        let _ = fs::remove_dir(self.0);
    }
}

impl Machine for Guest {
    fn with(hosts: u32, luns: u32) -> Arc<Self> {
        let options = ScsiDebug::options().hosts(hosts).luns(luns);
        let target = options.size_mib(16).load();
        // The units' names depend on the number of their host.
        target.set("vpd_use_hostno", 1);
        Self::on(target)
    }

    fn with_a_tape() -> Arc<Self> {
        Self::on(ScsiDebug::options().luns(1).parameter("ptype", 1).load())
    }

    fn with_two_paths() -> Arc<Self> {
        let options = ScsiDebug::options().paths(2).luns(2);
        Self::on(options.size_mib(16).load())
    }

    fn skip(reason: &str) -> ! {
        guest::skip(reason)
    }

    fn hosts(&self) -> Vec<u32> {
        self.target.hosts().to_vec()
    }

    fn engine(&self) -> Arc<Engine> {
        Arc::new(guest::agent::engine())
    }

    fn journal(&self) -> PathBuf {
        self.directory.join("journal")
    }

    fn give_to_others(&self) {
        self.target.set("vpd_use_hostno", 0);
    }

    fn grow(&self) -> u64 {
        let gigabytes = self.gigabytes.fetch_add(1, Ordering::Relaxed) + 1;
        self.target.set("virtual_gb", gigabytes);
        gigabytes << 30
    }

    fn hang(&self) {
        let mut before = self.inquiry_limit.lock().unwrap();
        before.get_or_insert_with(|| fs::read_to_string(INQUIRY_LIMIT).unwrap());
        fs::write(INQUIRY_LIMIT, HUNG_SECS.to_string()).unwrap();
        for device in self.target.devices() {
            // A flush gets twice this time (`drivers/scsi/sd.c`, SD_FLUSH_TIMEOUT_MULTIPLIER).
            let limit = format!("/sys/bus/scsi/devices/{device}/timeout");
            fs::write(limit, (HUNG_SECS / 2).to_string()).unwrap();
        }
        // SDEBUG_OPT_TIMEOUT
        self.target.set("every_nth", -1);
        self.target.set("opts", 4);
    }

    fn answer_again(&self) {
        self.target.set("opts", 0);
        self.target.set("every_nth", 0);
    }

    fn wait_until_given_up(&self, engine: &Engine) {
        behaviour::machine::wait_until("the calls to return", || engine.stuck_calls().is_empty());
    }

    fn require_stack(&self, call: &StuckCall) {
        // Here the kernel waits for the answer to a command, or to a request of a disk.
        let waits = ["blk_execute_rq", "submit_bio_wait"];
        let is_shown = call.stack.iter().any(|name| waits.contains(&&**name));
        assert!(is_shown, "{call:?}");
    }

    fn fail_writes(&self, fail: bool) {
        fs::write(WRITE_PROTECT, if fail { "1" } else { "0" }).unwrap();
    }

    fn write(&self, node: &Path) -> Held {
        // The kernel's timer would write the data to the device, and so would the last close.
        let lazy = LazyWriteback::start();
        let reader = keep_unwritten(node);
        let byte = self.next_byte.fetch_add(1, Ordering::Relaxed);
        let mut disk = OpenOptions::new().write(true).open(node).unwrap();
        disk.write_all(&vec![byte; WRITTEN]).unwrap();
        drop(disk);
        udevd::settle();
        Box::new((reader, lazy))
    }

    fn has_stored(&self, node: &Path) -> bool {
        let last = self.next_byte.load(Ordering::Relaxed) - 1;
        stored(node, 0, WRITTEN) == vec![last; WRITTEN]
    }

    fn open_to_write(&self, node: &Path) -> Held {
        Box::new(OpenOptions::new().write(true).open(node).unwrap())
    }

    fn mount(&self, node: &Path, place: &'static str) -> Held {
        let node = node.to_str().unwrap();
        guest::run(&["mkfs.ext4", "-q", "-F", node]);
        fs::create_dir_all(place).unwrap();
        guest::run(&["mount", "-t", "ext4", node, place]);
        Box::new(Mounted(place))
    }

    fn open(&self, node: &Path, claim: bool) -> Held {
        let flags = if claim { nix::libc::O_EXCL } else { 0 };
        let opened: File = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(node)
            .unwrap();
        Box::new(opened)
    }

    fn open_in_multipathd(&self, node: &Path) -> Held {
        Box::new(NamedReader::start("multipathd", node))
    }

    fn stop_udevd(&self) -> Held {
        Box::new(udevd::stopped())
    }

    fn settle(&self) {
        udevd::settle();
    }

    fn kernel_events(&self, act: &mut dyn FnMut()) -> Vec<Seen> {
        let counter = UeventCounter::start();
        act();
        udevd::settle();
        let seen = |event: KernelUevent| {
            let (action, subsystem, devtype) = event.kind();
            Seen {
                kind: (action.to_owned(), subsystem.to_owned(), devtype.to_owned()),
                is_udevds: event.is_udevds(),
            }
        };
        counter.until_quiet(QUIET).into_iter().map(seen).collect()
    }

    fn minimum(&self) -> &'static Minimum {
        Minimum::of(guest::kernel())
    }
}

crate::behaviours!(Guest);
