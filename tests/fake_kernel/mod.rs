//! A fake kernel with SCSI hosts and a fake udevd, which serve the engine from a directory.
//!
//! [`FakeKernel`] serves one machine below a temporary directory. It runs in the test's own
//! process, and engines reach it through a socket in that directory. So a process with an
//! engine can be killed while the kernel continues, as a real kernel does. The files below the
//! directory are what sysfs, devtmpfs and udev would show.
//!
//! The suite in `tests/behaviour` runs on this kernel.

pub(crate) mod access;
mod array;
mod attributes;
mod commands;
mod device;
mod disk;
mod process_table;
mod removal;
mod scan;
mod server;
mod udevd;
mod uevents;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tempfile::TempDir;

pub(crate) use array::{Address, Unit};
use device::Device;
use uevents::Uevents;

/// A machine that runs until this is dropped.
pub(crate) struct FakeKernel {
    directory: TempDir,
    kernel: Arc<Kernel>,
    server: server::Server,
}

/// The state that the kernel's threads share.
pub(crate) struct Kernel {
    /// For the kernel's own threads.
    own: Weak<Kernel>,
    root: PathBuf,
    state: Mutex<State>,
    /// Signals a change of the state.
    changed: Condvar,
    uevents: Uevents,
}

/// The array behind the hosts, and the kernel's knowledge of it.
#[derive(Default)]
pub(crate) struct State {
    /// The units that the array presents now.
    pub(crate) units: BTreeMap<Address, Unit>,
    /// The devices that the kernel has scanned and not deleted.
    devices: BTreeMap<Address, Device>,
    /// The target refuses INQUIRY for LUNs that it does not have, as LIO does.
    pub(crate) refuses_inquiry: bool,
    /// From now on commands get no answer.
    pub(crate) swallows: bool,
    /// The lost commands, until the kernel gives them up.
    pub(crate) swallowed: BTreeSet<u64>,
    commands: u64,
    /// Hosts that a scan or a delete holds.
    busy: BTreeSet<u32>,
    lives: u64,
    /// The acts so far, in order: `scan 0: 0 0 7`, `flush 0:0:0:7`.
    acts: Vec<String>,
    process_table: process_table::ProcessTable,
    udevd_is_stopped: bool,
    /// How many events udevd is handling.
    udevd_has: usize,
}

impl FakeKernel {
    /// A machine with this many hosts. Each host has one target, which presents no unit yet.
    pub(crate) fn with_hosts(hosts: u32) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.unwrap();
        let root = directory.path().to_owned();
        lay_out(&root);
        for host in 0..hosts {
            scan::lay_out_host(&root, host);
        }
        let kernel = Arc::new_cyclic(|own| Kernel {
            own: own.clone(),
            root,
            state: Mutex::default(),
            changed: Condvar::new(),
            uevents: Uevents::start(own.clone()),
        });
        let server = server::Server::start(&kernel);
        Self {
            directory,
            kernel,
            server,
        }
    }

    /// The machine's directory.
    pub(crate) fn root(&self) -> &Path {
        self.directory.path()
    }

    /// The kernel, for tests that change or inspect the array.
    pub(crate) fn kernel(&self) -> &Arc<Kernel> {
        &self.kernel
    }
}

impl Drop for FakeKernel {
    fn drop(&mut self) {
        let mut state = self.kernel.state();
        state.swallows = false;
        state.swallowed.clear();
        state.udevd_is_stopped = false;
        drop(state);
        self.kernel.changed.notify_all();
        self.server.stop(self.directory.path());
    }
}

impl Kernel {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    /// Changes what the array presents, or what hangs.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let done = change(&mut self.state());
        self.changed.notify_all();
        done
    }

    /// Waits while `holds` is true.
    fn wait_while<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        mut holds: impl FnMut(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        self.changed.wait_while(&mut state, |state| holds(state));
        state
    }

    /// Sends a command to a device. It returns at once, or when the kernel has given up on an
    /// answer. Also returns whether the command was answered.
    fn is_answered<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> (MutexGuard<'a, State>, bool) {
        if !state.swallows {
            return (state, true);
        }
        state.commands += 1;
        let own = state.commands;
        state.swallowed.insert(own);
        (
            self.wait_while(state, |state| state.swallowed.contains(&own)),
            false,
        )
    }

    /// Waits until the kernel's own threads and udevd have finished.
    pub(crate) fn settle(&self) {
        drop(self.wait_while(self.state(), |state| {
            let probes = state.devices.values().any(|device| !device.is_probed);
            probes || state.udevd_has > 0
        }));
    }

    /// The acts so far, in order.
    pub(crate) fn acts(&self) -> Vec<String> {
        self.state().acts.clone()
    }
}

/// Writes a file, and creates its directories.
fn write(path: &Path, text: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    if path.exists() {
        fs::write(path, text).unwrap();
    } else {
        replace(path, text);
    }
}

/// Replaces a file atomically, so that no reader sees half of it.
fn replace(path: &Path, text: impl AsRef<[u8]>) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

fn link(link: &Path, to: &Path) {
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    symlink(relative(link, to), link).unwrap();
}

/// A relative link target as sysfs writes it: the way up and then the way down.
fn relative(link: &Path, to: &Path) -> PathBuf {
    let from: Vec<_> = link.parent().unwrap().components().collect();
    let to: Vec<_> = to.components().collect();
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let mut path: PathBuf = std::iter::repeat_n("..", from.len() - common).collect();
    path.extend(&to[common..]);
    path
}

/// Creates the directories that every machine has.
fn lay_out(root: &Path) {
    for folder in [
        "sys/class/scsi_host",
        "sys/class/block",
        "sys/bus/scsi/devices",
        "sys/bus/scsi/drivers/sd",
        "sys/block",
        "sys/dev/block",
        "dev/disk/by-id",
        "dev/disk/by-diskseq",
        "run/udev/data",
        "proc/self",
    ] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    for (file, text) in [
        ("proc/self/mountinfo", ""),
        ("proc/self/status", "CapEff:\t000001ffffffffff\n"),
        ("proc/sys/kernel/osrelease", "6.12.0-fake\n"),
        ("proc/sys/net/core/rmem_max", "212992\n"),
        ("proc/swaps", "Filename Type Size Used Priority\n"),
    ] {
        write(&root.join(file), text);
    }
    // Each read of it must return a new value.
    let random = root.join("proc/sys/kernel/random");
    fs::create_dir_all(&random).unwrap();
    for file in ["uuid", "boot_id"] {
        let real = Path::new("/proc/sys/kernel/random").join(file);
        symlink(real, random.join(file)).unwrap();
    }
}
