//! The machine that the suite runs on, and the helpers that are the same on each machine.

use std::any::Any;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lunbd::engine::DetachFailure;
use lunbd::scsi::StuckCall;
use lunbd::{AttachRequest, Attachment, Deadline, Detachment, Engine, Source};

use super::minimum::Minimum;

/// A held resource: dropping it releases the resource.
pub(crate) type Held = Box<dyn Any + Send>;

/// A machine with SCSI hosts. The first target of each host presents disks of 16 MiB with
/// unique identities.
pub(crate) trait Machine: Send + Sync + 'static {
    /// A machine with this many hosts, each with the LUNs 0 to `luns - 1`.
    fn with(hosts: u32, luns: u32) -> Arc<Self>;

    /// A machine with one host and one LUN, which is a tape.
    fn with_a_tape() -> Arc<Self>;

    /// A machine with two hosts that present the same units.
    fn with_two_paths() -> Arc<Self>;

    /// Ends the test if this kernel cannot do what the test needs.
    fn skip(reason: &str) -> !;

    /// The numbers of its hosts, ascending.
    fn hosts(&self) -> Vec<u32>;

    /// An engine on the machine that receives the events of the kernel and of udevd.
    fn engine(&self) -> Arc<Engine>;

    /// The path of a journal's directory, which does not exist yet.
    fn journal(&self) -> PathBuf;

    /// From now on the last host presents other units.
    fn give_to_others(&self);

    /// Grows all units to 1 GiB, or by 1 GiB each further time. Returns their size.
    fn grow(&self) -> u64;

    /// From now on no command is answered.
    fn hang(&self);

    /// Commands are answered again. The commands that hang stay lost.
    fn answer_again(&self);

    /// Waits until the kernel has given up the commands that were lost.
    fn wait_until_given_up(&self, engine: &Engine);

    /// Panics unless the call shows its kernel stack, if the machine has one.
    fn require_stack(&self, call: &StuckCall);

    /// Makes writes fail or succeed from now on.
    fn fail_writes(&self, fail: bool);

    /// Writes to a disk, and keeps the data in its page cache while the result is held. No
    /// process has the disk open for writing then, and udevd handles nothing.
    fn write(&self, node: &Path) -> Held;

    /// Whether the target has stored the data of the last [`Machine::write`]. `node` is a disk
    /// of another unit of the target, which was attached after that.
    fn has_stored(&self, node: &Path) -> bool;

    /// Opens the disk for writing in this process, not exclusively.
    fn open_to_write(&self, node: &Path) -> Held;

    /// Mounts a file system of the disk at `place`.
    fn mount(&self, node: &Path, place: &'static str) -> Held;

    /// Opens the disk in this process, exclusively with `claim`.
    fn open(&self, node: &Path, claim: bool) -> Held;

    /// multipathd has the disk open to check it while the result is held.
    fn open_in_multipathd(&self, node: &Path) -> Held;

    /// udevd handles nothing while the result is held.
    fn stop_udevd(&self) -> Held;

    /// Waits until the kernel and udevd have finished all work.
    fn settle(&self);

    /// The kernel's events while `act` runs, until no more come.
    fn kernel_events(&self, act: &mut dyn FnMut()) -> Vec<Seen>;

    /// The minimum of events that this kernel sends.
    fn minimum(&self) -> &'static Minimum;
}

/// One event of the kernel.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// The action, the subsystem, and the device type or an empty string.
    pub(crate) kind: (String, String, String),
    /// udevd requested the event.
    pub(crate) is_udevds: bool,
}

/// A deadline longer than any call here takes that is not meant to time out.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// The source of a LUN of a host's target.
pub(crate) fn unit(host: u32, lun: u64) -> Source {
    format!("scsi:{host}:0:0:{lun}").parse().unwrap()
}

pub(crate) fn attach(engine: &Engine, source: &Source) -> Attachment {
    let request = AttachRequest::new(source.clone());
    let attached = engine.attach(&request, soon());
    attached.unwrap_or_else(|error| panic!("{source}: {error:#}"))
}

pub(crate) fn detach(engine: &Engine, source: &Source) -> Result<Detachment, DetachFailure> {
    engine.detach(source.clone(), soon())
}

/// The addresses of the SCSI devices that the machine's hosts have, sorted.
pub(crate) fn devices(machine: &impl Machine, engine: &Engine) -> Vec<String> {
    let of_host = |name: &String| {
        let host = name.split_once(':').and_then(|(host, _)| host.parse().ok());
        host.is_some_and(|host: u32| machine.hosts().contains(&host))
    };
    let bus = fs::read_dir(engine.roots().sysfs.join("bus/scsi/devices")).unwrap();
    let names = bus.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut devices: Vec<String> = names.filter(of_host).collect();
    devices.sort();
    devices
}

/// The sysfs directory of a LUN's SCSI device.
pub(crate) fn device_dir(engine: &Engine, source: &Source) -> PathBuf {
    let Source::Scsi(hctl) = source else {
        panic!("{source}");
    };
    let bus = engine.roots().sysfs.join("bus/scsi/devices");
    bus.join(hctl.to_string())
}

/// Writes an attribute as another process would; panics if the kernel refuses.
pub(crate) fn write_attribute(engine: &Engine, path: &Path, text: &str) {
    let written = engine.roots().devices.write_attribute(path, text, &|| true);
    assert!(written.unwrap_or_else(|error| panic!("{}: {error}", path.display())));
}

/// Deletes a device as another process would, if it exists. Returns when it is gone.
pub(crate) fn delete(engine: &Engine, source: &Source) {
    let device = device_dir(engine, source);
    // The link of the bus goes before the disk does. Another process may bring a new device to
    // the same address between two looks, so compare the inodes.
    let dir = fs::canonicalize(&device).unwrap_or_else(|_| device.clone());
    let number = |path: &Path| fs::metadata(path).ok().map(|about| about.ino());
    let before = number(&device);
    let delete = device.join("delete");
    let devices = &engine.roots().devices;
    let _not_there = devices.write_attribute(&delete, "1", &|| true);
    wait_until("the device to be gone", || {
        let stands = |path: &Path| before.is_some() && number(path) == before;
        !stands(&device) && !stands(&dir)
    });
}

/// The directory of a LUN's disk, if it has one.
pub(crate) fn disk_of(engine: &Engine, source: &Source) -> Option<PathBuf> {
    let block = fs::read_dir(device_dir(engine, source).join("block")).ok()?;
    let name = block.flatten().next()?.file_name();
    // The disk's directory exists a moment before its link.
    let link = engine.roots().sysfs.join("block").join(name);
    link.exists().then_some(link)
}

/// Makes the kernel scan a LUN, as another process would. Returns when its disk exists.
pub(crate) fn scan(engine: &Engine, source: &Source) {
    let Source::Scsi(hctl) = source else {
        panic!("{source}");
    };
    let host = engine.roots().sysfs.join("class/scsi_host");
    let file = host.join(format!("host{}/scan", hctl.host));
    let line = format!("{} {} {}", hctl.channel, hctl.target, hctl.lun);
    write_attribute(engine, &file, &line);
    wait_until("the disk", || disk_of(engine, source).is_some());
}

/// The size that the kernel shows for a disk, in bytes.
pub(crate) fn shown_size(engine: &Engine, node: &Path) -> u64 {
    let disk = engine.roots().sysfs.join("block");
    let size = disk.join(node.file_name().unwrap()).join("size");
    let sectors = fs::read_to_string(size).unwrap();
    sectors.trim().parse::<u64>().unwrap() * 512
}

/// Looks again until the condition holds: for events that no notification reports.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    const LIMIT: Duration = Duration::from_mins(2);
    let start = Instant::now();
    loop {
        let is_last = start.elapsed() >= LIMIT;
        if holds() {
            return;
        }
        assert!(!is_last, "{what}: not within {LIMIT:?}");
        thread::park_timeout(Duration::from_millis(5));
    }
}
