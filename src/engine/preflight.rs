//! What this machine lacks, and how to mend it.

mod check;
mod container;
mod drivers;
mod iscsi_port;

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
pub use crate::engine::preflight::check::{Check, Finding};
use crate::engine::preflight::container::{
    check_journal, check_locks, check_multipath, check_network_namespace, check_nodes, check_users,
};
use crate::engine::preflight::drivers::{
    check_initiator_name, check_iscsi, check_nbd, check_nbd_tls, check_scsi,
};
use crate::engine::preflight::iscsi_port::check_iscsi_port;
use crate::error::Result;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::machine::{self, Capabilities};
use crate::kernel::{sysfs, user_namespace};
use crate::uevent::{self, Mode};

impl Engine {
    /// Checks everything on which attach and detach depend. It changes nothing, except for the
    /// following. It makes the kernel send one marked event for a virtual block device, to see
    /// whether udev answers. It makes the kernel try its TLS, for which the kernel may load a
    /// module. It takes a lock in `/run/lunbd` for a moment, and creates that directory if it is
    /// missing.
    #[must_use]
    pub fn preflight(&self, deadline: Deadline) -> Vec<Check> {
        type CheckFn = fn(&Engine, Deadline) -> Result<Check>;
        let checks: [(&'static str, CheckFn); 17] = [
            ("kernel", check_kernel),
            ("privileges", check_privileges),
            ("sysfs", check_sysfs),
            // A udevd that had no time to answer would be reported as missing.
            ("udev", check_udev),
            ("locks", check_locks),
            ("journal", check_journal),
            ("users", check_users),
            ("network namespace", |engine, _| {
                Ok(check_network_namespace(engine))
            }),
            ("scsi", check_scsi),
            ("multipath", check_multipath),
            ("iscsi", check_iscsi),
            ("iscsi port", check_iscsi_port),
            ("initiator name", |_, _| Ok(check_initiator_name())),
            ("nbd", check_nbd),
            ("nbd tls", |_, deadline| Ok(check_nbd_tls(deadline))),
            ("device nodes", check_nodes),
            ("receive buffer", check_receive_buffer),
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
}

fn check_kernel(engine: &Engine, _: Deadline) -> Result<Check> {
    let version = machine::kernel_version(engine.roots())?;
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

fn check_privileges(engine: &Engine, _: Deadline) -> Result<Check> {
    let held = Capabilities::over_the_machine(engine.roots())?;
    if !user_namespace::is_initial(engine.roots()) {
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

fn check_sysfs(engine: &Engine, _: Deadline) -> Result<Check> {
    let path = &engine.roots().sysfs;
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

fn check_udev(engine: &Engine, deadline: Deadline) -> Result<Check> {
    match engine.hub().mode() {
        Mode::Udev => probe_udev(engine, deadline),
        Mode::KernelOnly => {
            // What was found when the hub started may have been mended since.
            let (why, remedy) = match uevent::udev_unreachable_reason(engine.roots()) {
                Some(reason) => (reason.to_string(), reason.remedy()),
                None => (
                    "lunbd received no udev event when it started".to_owned(),
                    "start this process again",
                ),
            };
            let seen =
                format!("kernel events only: there are no by-id links to wait for, since {why}");
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
fn probe_udev(engine: &Engine, deadline: Deadline) -> Result<Check> {
    const UDEV_LIMIT: Duration = Duration::from_secs(5);
    let roots = engine.roots();
    let devices = BlockDevice::all(roots)?;
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
    let mut watch = engine.hub().watch(device.name());
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

fn check_receive_buffer(engine: &Engine, _: Deadline) -> Result<Check> {
    const LARGE_BUFFER: usize = 16 << 20;
    if Capabilities::over_the_machine(engine.roots())?.net_admin() {
        let seen = "as large as wanted (CAP_NET_ADMIN)";
        return Ok(Check::good("receive buffer", seen));
    }
    let largest = machine::largest_receive_buffer(engine.roots())?;
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
