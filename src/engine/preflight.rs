//! What this machine lacks, and how to mend it.

mod container;
mod iscsi_port;

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::Engine;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::iscsi::{self, ConnectionStatus, IscsiSession};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::machine::{self, Capabilities};
use crate::kernel::{mounts, process, sysfs, user_namespace};
use crate::nbd;
use crate::uevent::{self, Mode};

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Finding {
    /// As it should be.
    Good,
    /// Attach and detach work with restrictions.
    Limited,
    /// Attach or detach will fail.
    Missing,
}

/// One check of the machine.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// The result.
    pub finding: Finding,
    /// What was seen.
    pub seen: String,
    /// How to mend it; empty if there is nothing to mend.
    pub remedy: &'static str,
}

impl Check {
    pub(super) fn good(name: &'static str, seen: impl Into<String>) -> Self {
        Self {
            name,
            finding: Finding::Good,
            seen: seen.into(),
            remedy: "",
        }
    }

    pub(super) fn limited(
        name: &'static str,
        seen: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self {
            name,
            finding: Finding::Limited,
            seen: seen.into(),
            remedy,
        }
    }

    pub(super) fn missing(
        name: &'static str,
        seen: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self {
            name,
            finding: Finding::Missing,
            seen: seen.into(),
            remedy,
        }
    }
}

impl Engine {
    /// Checks everything on which attach and detach depend. It changes nothing, except that
    /// it makes the kernel send one marked event for a virtual block device, to see whether
    /// udev answers, and try its TLS, for which the kernel may load a module.
    #[must_use]
    pub fn preflight(&self, deadline: Deadline) -> Vec<Check> {
        type CheckFn = fn(&Engine, Deadline) -> Result<Check>;
        let checks: [(&'static str, CheckFn); 17] = [
            ("kernel", Self::check_kernel),
            ("privileges", Self::check_privileges),
            ("sysfs", Self::check_sysfs),
            ("locks", Self::check_locks),
            ("journal", Self::check_journal),
            ("users", Self::check_users),
            ("network namespace", |engine, _| {
                Ok(engine.check_network_namespace())
            }),
            ("scsi", Self::check_scsi),
            ("multipath", Self::check_multipath),
            ("iscsi", Self::check_iscsi),
            ("iscsi port", Self::check_iscsi_port),
            ("initiator name", |_, _| Ok(Self::check_initiator_name())),
            ("nbd", Self::check_nbd),
            ("nbd tls", |_, deadline| Ok(check_nbd_tls(deadline))),
            ("device nodes", Self::check_nodes),
            ("udev", Self::check_udev),
            ("receive buffer", Self::check_receive_buffer),
        ];
        checks
            .into_iter()
            .map(|(name, check)| {
                check(self, deadline).unwrap_or_else(|error| {
                    let remedy = "make this readable to lunbd";
                    Check::missing(name, format!("cannot be examined: {error:#}"), remedy)
                })
            })
            .collect()
    }

    fn check_kernel(&self, _: Deadline) -> Result<Check> {
        let version = machine::kernel_version(self.roots())?;
        let seen = format!("Linux {}.{}", version.0, version.1);
        Ok(match version {
            (5, 15..) | (6.., _) => Check::good("kernel", seen),
            (5, 10..) => Check::limited(
                "kernel",
                format!("{seen}: disks have no sequence number"),
                "run Linux 5.15 or later",
            ),
            _ => Check::missing("kernel", seen, "run Linux 5.10 or later"),
        })
    }

    fn check_privileges(&self, _: Deadline) -> Result<Check> {
        let held = Capabilities::over_the_machine(self.roots())?;
        if !user_namespace::is_initial(self.roots()) {
            return Ok(Check::missing(
                "privileges",
                "this process is in a user namespace: it has no capability over the machine",
                "run outside of a user namespace: a container needs the host's",
            ));
        }
        Ok(match (held.sys_admin(), held.net_admin()) {
            (true, true) => Check::good("privileges", "CAP_SYS_ADMIN and CAP_NET_ADMIN"),
            (true, false) => Check::limited(
                "privileges",
                "no CAP_NET_ADMIN: receive buffers stay within net.core.rmem_max",
                "give the process CAP_NET_ADMIN",
            ),
            (false, _) => Check::missing(
                "privileges",
                "no CAP_SYS_ADMIN",
                "run as root, or give the process CAP_SYS_ADMIN and write access to the scan and delete attributes",
            ),
        })
    }

    fn check_sysfs(&self, _: Deadline) -> Result<Check> {
        let path = &self.roots().sysfs;
        let seen = path.display().to_string();
        Ok(if machine::is_read_only(path)? {
            let remedy =
                "mount sysfs read-write: a container needs to be privileged, or the host's /sys";
            Check::missing("sysfs", format!("{seen} is read-only"), remedy)
        } else if let Some(refused) = refused_scan(path)? {
            let remedy = "run as root, or give the process write access to the scan and delete \
                          attributes";
            Check::missing("sysfs", refused, remedy)
        } else {
            Check::good("sysfs", format!("{seen} is writable"))
        })
    }

    fn check_scsi(&self, _: Deadline) -> Result<Check> {
        let sysfs = &self.roots().sysfs;
        let hosts = sysfs::names(&sysfs.join("class/scsi_host"))?;
        if !sysfs.join("bus/scsi/drivers/sd").exists() {
            let remedy = "modprobe sd_mod, if you want SCSI";
            let seen = "the disk driver is not loaded";
            return Ok(Check::limited("scsi", seen, remedy));
        }
        Ok(if hosts.is_empty() {
            let remedy = "load the adapter's driver, or log in to the target";
            Check::limited("scsi", "no SCSI host", remedy)
        } else {
            Check::good("scsi", hosts.join(", "))
        })
    }

    fn check_iscsi(&self, _: Deadline) -> Result<Check> {
        let roots = self.roots();
        if !iscsi::has_driver(roots) {
            let remedy = "modprobe iscsi_tcp, if you want iSCSI";
            let seen = "the module iscsi_tcp is not loaded";
            return Ok(Check::limited("iscsi", seen, remedy));
        }
        let (mut ours, mut others) = (0, 0);
        let (mut incomplete, mut lost) = (Vec::new(), Vec::new());
        for session in IscsiSession::all(roots)? {
            if session.has_no_names()? {
                incomplete.push(session.id().to_string());
                continue;
            }
            let whose = if session.is_lunbd_owned()? {
                ours += 1;
                "of ours"
            } else {
                others += 1;
                "of another"
            };
            let connection_status = match session.connection_status()? {
                Some(ConnectionStatus::Lost) => "is lost and its I/O waits",
                Some(ConnectionStatus::GivenUp) if session.is_at_login()? => {
                    "is being created, or the process that created it died"
                }
                Some(ConnectionStatus::GivenUp) => "was lost for too long and its I/O fails",
                _ => continue,
            };
            let id = session.id();
            lost.push(format!("session {id} {whose} {connection_status}"));
        }
        let daemon = if process::is_running(roots, "iscsid")? {
            "iscsid runs: lunbd uses its sessions and never ends them, and it leaves lunbd's \
             sessions alone"
        } else {
            "iscsid does not run and is not needed: lunbd logs in by itself"
        };
        let mut seen = format!("{ours} sessions of lunbd, {others} of other programs; {daemon}");
        for session in &lost {
            seen = format!("{seen}; {session}");
        }
        if !incomplete.is_empty() {
            // The next login or recovery recognises lunbd's own by the file that its creator left.
            let numbers = incomplete.join(", ");
            let seen = format!("{seen}; incomplete sessions of unknown programs: {numbers}");
            let remedy = "if it stays, the process that created it was killed: it holds no \
                          device; `lunbd recover` destroys one of lunbd's, and the next boot \
                          any other";
            return Ok(Check::limited("iscsi", seen, remedy));
        }
        if !lost.is_empty() {
            let remedy = "the target is unreachable, or no process logs in again: run `lunbd \
                          heal --watch` for lunbd's sessions, and iscsid for its own";
            return Ok(Check::limited("iscsi", seen, remedy));
        }
        Ok(Check::good("iscsi", seen))
    }

    fn check_initiator_name() -> Check {
        match iscsi::initiator_name(Path::new(iscsi::INITIATOR_NAME_FILE)) {
            Ok(name) => Check::good("initiator name", name.to_string()),
            Err(error) => Check::limited(
                "initiator name",
                format!("{error:#}"),
                "run `lunbd initiator-name --create`, if you want iSCSI and the file is missing",
            ),
        }
    }

    fn check_nbd(&self, deadline: Deadline) -> Result<Check> {
        let module = self.roots().sysfs.join("module/nbd");
        let swapped = self.swaps_on_nbd(deadline)?;
        Ok(if !swapped.is_empty() {
            let seen = format!(
                "swap is on {}: if its server goes away, a heal may need memory that the kernel \
                 can only free by swapping, and the machine hangs",
                swapped.join(" and ")
            );
            Check::limited("nbd", seen, "swapoff it, and swap to a local disk")
        } else if sysfs::resolve(&module)?.is_some() {
            Check::good("nbd", "the module is loaded")
        } else {
            let remedy = "modprobe nbd, if you want NBD";
            Check::limited("nbd", "the module is not loaded", remedy)
        })
    }

    /// The NBD devices on which, or on a partition of which, the kernel swaps.
    fn swaps_on_nbd(&self, deadline: Deadline) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for device in mounts::read_swaps(self.roots(), deadline)?.found {
            if let Some(disk) = BlockDevice::of(self.roots(), device)?
                && disk.name().starts_with("nbd")
            {
                names.push(disk.name().to_owned());
            }
        }
        Ok(names)
    }

    fn check_udev(&self, deadline: Deadline) -> Result<Check> {
        match self.hub().mode() {
            Mode::Udev => self.probe_udev(deadline),
            Mode::KernelOnly => {
                // What was found when the hub started may have been mended since.
                let (why, remedy) = match uevent::udev_unreachable_reason(self.roots()) {
                    Some(reason) => (reason.to_string(), reason.remedy()),
                    None => (
                        "lunbd received no udev event when it started".to_owned(),
                        "start this process again",
                    ),
                };
                let seen = format!(
                    "kernel events only: there are no by-id links to wait for, since {why}"
                );
                Ok(Check::limited("udev", seen, remedy))
            }
            Mode::SysfsPoll => Ok(Check::limited(
                "udev",
                "no events reach this process: lunbd polls sysfs every 1 to 50 ms",
                "run outside of a user namespace, on the kernel's own sysfs",
            )),
        }
    }

    /// Asks udev for an answer about a virtual block device.
    fn probe_udev(&self, deadline: Deadline) -> Result<Check> {
        const UDEV_LIMIT: Duration = Duration::from_secs(5);
        let roots = self.roots();
        let devices = self.block_devices()?;
        let virtual_device = devices.iter().find(|device| {
            ["loop", "ram", "nbd", "zram"]
                .iter()
                .any(|kind| device.name().starts_with(kind))
        });
        let Some(device) = virtual_device else {
            return Ok(Check::good(
                "udev",
                "runs (not probed: there is no virtual block device)",
            ));
        };
        let mut watch = self.hub().watch(device.name());
        let limit = deadline.at_most(UDEV_LIMIT);
        Ok(
            match uevent::settle_again(&mut watch, Mode::Udev, roots, device.dir(), limit) {
                Ok(_) => Check::good(
                    "udev",
                    format!("answered after {} ms", limit.elapsed().as_millis()),
                ),
                Err(error) => Check::missing(
                    "udev",
                    format!("udevd does not answer: {error}"),
                    "see whether systemd-udevd is stopped or busy; a container needs the host's network namespace",
                ),
            },
        )
    }

    fn check_receive_buffer(&self, _: Deadline) -> Result<Check> {
        const LARGE_BUFFER: usize = 16 << 20;
        if Capabilities::over_the_machine(self.roots())?.net_admin() {
            let seen = "as large as wanted (CAP_NET_ADMIN)";
            return Ok(Check::good("receive buffer", seen));
        }
        let largest = machine::largest_receive_buffer(self.roots())?;
        Ok(if largest >= LARGE_BUFFER {
            Check::good("receive buffer", format!("up to {largest} bytes"))
        } else {
            Check::limited(
                "receive buffer",
                format!("at most {largest} bytes: a burst of uevents costs a resync"),
                "sysctl net.core.rmem_max=16777216, or give the process CAP_NET_ADMIN",
            )
        })
    }

    pub(super) fn block_devices(&self) -> Result<Vec<BlockDevice>> {
        let class = self.roots().sysfs.join("class/block");
        let mut devices = Vec::new();
        for name in sysfs::names(&class)? {
            if let Some(dir) = sysfs::resolve(&class.join(name))? {
                devices.extend(BlockDevice::at(&dir)?);
            }
        }
        Ok(devices)
    }
}

/// Why this process cannot write to the `scan` file of a SCSI host; `None` if it can, or if there
/// is no host.
fn refused_scan(root: &Path) -> Result<Option<String>> {
    let class = root.join("class/scsi_host");
    let Some(host) = sysfs::names(&class)?.into_iter().next() else {
        return Ok(None);
    };
    let scan = class.join(host).join("scan");
    Ok(match File::options().write(true).open(&scan) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Some(format!("{} cannot be written: {error}", scan.display()))
        }
        _ => None,
    })
}

/// Whether the kernel has TLS for NBD, and which ciphers.
fn check_nbd_tls(deadline: Deadline) -> Check {
    const NAME: &str = "nbd tls";
    match nbd::ciphers_of_kernel(deadline) {
        Ok(ciphers) if ciphers.is_empty() => Check::limited(
            NAME,
            "the kernel's TLS takes no cipher that lunbd offers",
            "modprobe chacha20poly1305, if you want nbds://",
        ),
        Ok(ciphers) => Check::good(NAME, ciphers.join(", ")),
        Err(error) => Check::limited(NAME, error.to_string(), "modprobe tls, if you want nbds://"),
    }
}
