//! What the suite asks of a machine, and what it does on each of them alike.

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

/// Kept until what it holds is to be let go.
pub(crate) type Held = Box<dyn Any + Send>;

/// A machine with SCSI hosts. The first target of each presents disks of 16 MiB with
/// names of their own.
pub(crate) trait Machine: Send + Sync + 'static {
    /// A machine with so many hosts, each with the LUNs 0 to `luns - 1`.
    fn with(hosts: u32, luns: u32) -> Arc<Self>;

    /// As one host with one LUN, which is a tape.
    fn with_a_tape() -> Arc<Self>;

    /// A machine with two hosts that present the same units.
    fn with_two_paths() -> Arc<Self>;

    /// Ends the test where this kernel cannot do what it is about.
    fn skip(reason: &str) -> !;

    /// The numbers of its hosts, ascending.
    fn hosts(&self) -> Vec<u32>;

    /// An engine on it that hears the kernel and udevd.
    fn engine(&self) -> Arc<Engine>;

    /// A directory for a journal, which is not there yet.
    fn journal(&self) -> PathBuf;

    /// From now on the units of the last host are others.
    fn give_to_others(&self);

    /// Has all units be 1 GiB, or 1 GiB larger than the last time; returns their size.
    fn grow(&self) -> u64;

    /// From now on no command is answered.
    fn hang(&self);

    /// Commands are answered again. What hangs already stays lost.
    fn answer_again(&self);

    /// Waits until the kernel has given up the commands that were lost.
    fn wait_until_given_up(&self, engine: &Engine);

    /// Panics unless the call is shown where it is in the kernel, as far as the machine
    /// has one.
    fn require_stack(&self, call: &StuckCall);

    /// From now on writes fail, or they do not.
    fn fail_writes(&self, fail: bool);

    /// Writes to a disk, and leaves that in its page cache for as long as this is held.
    /// Nobody has it open for writing then, and udevd handles nothing.
    fn write(&self, node: &Path) -> Held;

    /// Has this process open the disk for writing, not exclusively.
    fn open_to_write(&self, node: &Path) -> Held;

    /// Mounts a file system of the disk's at `place`.
    fn mount(&self, node: &Path, place: &'static str) -> Held;

    /// Has this process open the disk, with `claim` exclusively.
    fn open(&self, node: &Path, claim: bool) -> Held;

    /// udevd handles nothing for as long as this is held.
    fn stop_udevd(&self) -> Held;

    /// Waits until the kernel and udevd are done with what was begun.
    fn settle(&self);

    /// The kernel's events while `act` runs, and until no more come.
    fn kernel_events(&self, act: &mut dyn FnMut()) -> Vec<Seen>;

    /// Which events this kernel sends at the least.
    fn minimum(&self) -> &'static Minimum;
}

/// One event of the kernel's.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// The action, the subsystem, and the device type or nothing.
    pub(crate) kind: (String, String, String),
    /// udevd has asked for it.
    pub(crate) is_udevds: bool,
}

/// More than anything takes here that is not meant to time out.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// A LUN of the target of a host.
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

/// Where a LUN's SCSI device is in sysfs.
pub(crate) fn device_dir(engine: &Engine, source: &Source) -> PathBuf {
    let Source::Scsi(hctl) = source else {
        panic!("{source}");
    };
    let bus = engine.roots().sysfs.join("bus/scsi/devices");
    bus.join(hctl.to_string())
}

/// Writes an attribute as somebody else would, and panics where that is refused.
pub(crate) fn write_attribute(engine: &Engine, path: &Path, text: &str) {
    let written = engine.roots().devices.write_attribute(path, text, &|| true);
    assert!(written.unwrap_or_else(|error| panic!("{}: {error}", path.display())));
}

/// Deletes a device by another's hand, if it is there, and returns when it is gone.
pub(crate) fn delete(engine: &Engine, source: &Source) {
    let device = device_dir(engine, source);
    // The link of the bus goes before the disk does. Who brings the device back may be
    // quicker than a look: that is another then.
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

/// The directory of the disk of a LUN, where it has one.
pub(crate) fn disk_of(engine: &Engine, source: &Source) -> Option<PathBuf> {
    let block = fs::read_dir(device_dir(engine, source).join("block")).ok()?;
    let name = block.flatten().next()?.file_name();
    // The disk's directory is there a moment before its link.
    let link = engine.roots().sysfs.join("block").join(name);
    link.exists().then_some(link)
}

/// Has the kernel scan a LUN by another's hand, and returns when its disk is there.
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

/// What the kernel shows for a disk, in bytes.
pub(crate) fn shown_size(engine: &Engine, node: &Path) -> u64 {
    let disk = engine.roots().sysfs.join("block");
    let size = disk.join(node.file_name().unwrap()).join("size");
    let sectors = fs::read_to_string(size).unwrap();
    sectors.trim().parse::<u64>().unwrap() * 512
}

/// Looks again until it holds: for causes that nothing tells of.
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
