//! A SCSI target of the kernel's `scsi_debug` driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::kmod::{DeleteModuleFlags, delete_module};

use super::scsi_disk::{disk_of, openable_disk_of};

/// The parameters of a [`ScsiDebug`] target.
#[derive(Debug, Clone)]
pub struct ScsiDebugOptions {
    parameters: Vec<(String, String)>,
}

impl ScsiDebugOptions {
    /// The LUNs of each target, 0 to `count - 1`. Over 256 the driver reports flat addresses.
    #[must_use]
    pub fn luns(self, count: u32) -> Self {
        self.parameter("max_luns", count)
    }

    /// The number of targets of each host.
    #[must_use]
    pub fn targets(self, count: u32) -> Self {
        self.parameter("num_tgts", count)
    }

    /// The number of hosts.
    #[must_use]
    pub fn hosts(self, count: u32) -> Self {
        self.parameter("add_host", count)
    }

    /// The size of the store. All LUNs share it unless `per_host_store` is set.
    #[must_use]
    pub fn size_mib(self, mib: u32) -> Self {
        self.parameter("dev_size_mb", mib)
    }

    /// The number of hosts that present the same units, like several paths to one target. A LUN
    /// has one identity and one store on all of them.
    #[must_use]
    pub fn paths(self, count: u32) -> Self {
        self.hosts(count).parameter("vpd_use_hostno", 0)
    }

    /// Any other module parameter.
    #[must_use]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "callers pass numbers and literals"
    )]
    pub fn parameter(mut self, name: &str, value: impl ToString) -> Self {
        self.parameters.retain(|(known, _)| known != name);
        self.parameters.push((name.to_owned(), value.to_string()));
        self
    }

    /// Loads the module. When this returns its hosts exist; its devices do not, because the
    /// guest runs with `scsi_mod.scan=manual`.
    #[must_use]
    pub fn load(self) -> ScsiDebug {
        super::enter();
        assert!(
            !Path::new("/sys/module/scsi_debug").exists(),
            "scsi_debug is loaded already"
        );
        let parameters: Vec<String> = self
            .parameters
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        super::modprobe(
            "scsi_debug",
            &parameters.iter().map(String::as_str).collect::<Vec<_>>(),
        );
        let target = ScsiDebug {
            hosts: scsi_debug_hosts(),
        };
        assert!(!target.hosts.is_empty(), "scsi_debug made no host");
        target
    }
}

/// A loaded `scsi_debug`. Dropping it unloads the module, with every host and device.
#[derive(Debug)]
pub struct ScsiDebug {
    hosts: Vec<u32>,
}

impl ScsiDebug {
    /// One host, one target, 8 MiB.
    #[must_use]
    pub fn options() -> ScsiDebugOptions {
        ScsiDebugOptions {
            parameters: Vec::new(),
        }
        .hosts(1)
        .targets(1)
        .size_mib(8)
    }

    /// A target with this many LUNs.
    #[must_use]
    pub fn with_luns(count: u32) -> Self {
        Self::options().luns(count).load()
    }

    /// Two hosts that serve one unit, LUN 1, and its address on each. `scsi_debug` would give a
    /// third host the state standby.
    #[must_use]
    pub fn two_paths() -> (Self, Vec<String>) {
        Self::two_paths_of(8)
    }

    /// The same with a unit of this size in MiB.
    #[must_use]
    pub fn two_paths_of(mib: u32) -> (Self, Vec<String>) {
        let target = Self::options().paths(3).luns(2).size_mib(mib).load();
        let serves = |host: &&u32| **host % 3 != 2;
        let source = |host: &u32| format!("scsi:{host}:0:0:1");
        let sources = target.hosts().iter().filter(serves).map(source).collect();
        (target, sources)
    }

    /// The number of the first host.
    #[must_use]
    pub fn host(&self) -> u32 {
        self.hosts[0]
    }

    /// The numbers of all its hosts, ascending.
    #[must_use]
    pub fn hosts(&self) -> &[u32] {
        &self.hosts
    }

    /// The H:C:T:L names of its hosts' present SCSI devices, sorted.
    #[must_use]
    pub fn devices(&self) -> Vec<String> {
        let mut found: Vec<String> = super::entries("/sys/bus/scsi/devices")
            .into_iter()
            .filter(|name| {
                name.split_once(':')
                    .and_then(|(host, _)| host.parse().ok())
                    .is_some_and(|host: u32| self.hosts.contains(&host))
            })
            .collect();
        found.sort();
        found
    }

    /// Writes one line to the first host's `scan`: `"0 0 7"`, or `"- - -"`.
    pub fn scan(&self, line: &str) {
        Self::scan_on(self.host(), line);
    }

    /// The same for another host of [`ScsiDebug::hosts`].
    pub fn scan_on(host: u32, line: &str) {
        let path = format!("/sys/class/scsi_host/host{host}/scan");
        fs::write(&path, line).unwrap_or_else(|error| panic!("{path}: {error}"));
    }

    /// The name below `/sys/block` of the disk of LUN `lun` of target 0 on the first host, if
    /// it has one.
    #[must_use]
    pub fn disk(&self, lun: u64) -> Option<String> {
        Self::disk_on(self.host(), lun)
    }

    /// Waits until the LUN has a disk that can be opened.
    #[allow(
        clippy::must_use_candidate,
        reason = "most want the wait and not the name"
    )]
    pub fn wait_for_disk(&self, lun: u64) -> String {
        openable_disk_of(&device_dir(self.host(), lun))
    }

    /// The same for another host of [`ScsiDebug::hosts`].
    #[must_use]
    pub fn disk_on(host: u32, lun: u64) -> Option<String> {
        disk_of(&device_dir(host, lun))
    }

    /// The sysfs directory of LUN `lun` of target 0 on the first host.
    #[must_use]
    pub fn device_dir(&self, lun: u64) -> PathBuf {
        device_dir(self.host(), lun)
    }

    /// Sets one of the driver's run-time attributes, such as `opts`,
    /// `virtual_gb` or `every_nth`.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "callers pass numbers and literals"
    )]
    pub fn set(&self, attribute: &str, value: impl ToString) {
        let path = format!("/sys/bus/pseudo/drivers/scsi_debug/{attribute}");
        fs::write(&path, value.to_string()).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

impl Drop for ScsiDebug {
    fn drop(&mut self) {
        // Faults that a test requested would fail the commands of the removal.
        for attribute in ["opts", "every_nth"] {
            let _not_in_every_kernel = fs::write(
                format!("/sys/bus/pseudo/drivers/scsi_debug/{attribute}"),
                "0",
            );
        }
        // Delete each device: a delete waits until the disk's probe ends. To unload the driver
        // at once drops its commands, which then take 30 s to time out.
        for device in self.devices() {
            let _gone_already = fs::write(format!("/sys/bus/scsi/devices/{device}/delete"), "1");
        }
        // The last close of a deleted disk runs code of the module after it has released its
        // reference: 6.1 oopsed when udevd's probe closed a disk while the module went. So
        // udevd must finish first.
        super::udevd::settle_if_it_can();
        let start = Instant::now();
        loop {
            match delete_module(c"scsi_debug", DeleteModuleFlags::O_NONBLOCK) {
                Ok(()) | Err(Errno::ENOENT) => return,
                Err(_) if start.elapsed() < Duration::from_secs(60) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                // A panic while the test's own panic unwinds would hide it. pid 1 sees the
                // module and fails the test.
                Err(errno) => {
                    eprintln!("scsi_debug stays loaded: {errno}");
                    return;
                }
            }
        }
    }
}

fn device_dir(host: u32, lun: u64) -> PathBuf {
    PathBuf::from(format!("/sys/bus/scsi/devices/{host}:0:0:{lun}"))
}

fn scsi_debug_hosts() -> Vec<u32> {
    let mut hosts: Vec<u32> = super::entries("/sys/class/scsi_host")
        .into_iter()
        .filter(|host| {
            fs::read_to_string(format!("/sys/class/scsi_host/{host}/proc_name"))
                .is_ok_and(|name| name.trim() == "scsi_debug")
        })
        .filter_map(|host| host.strip_prefix("host")?.parse().ok())
        .collect();
    hosts.sort_unstable();
    hosts
}
