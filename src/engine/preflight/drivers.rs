//! Checks for the drivers and daemons of each kind of device.

use std::path::Path;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::preflight::Check;
use crate::error::Result;
use crate::iscsi::{self, ConnectionStatus, IscsiSession};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{mounts, process, sysfs};
use crate::nbd;

pub(super) fn check_scsi(engine: &Engine, _: Deadline) -> Result<Check> {
    let sysfs = &engine.roots().sysfs;
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

pub(super) fn check_iscsi(engine: &Engine, _: Deadline) -> Result<Check> {
    let roots = engine.roots();
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
        let remedy = "if such a session stays, its creator was killed, and the session has no \
                      device: `lunbd recover` destroys a session of lunbd, and a reboot removes \
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

pub(super) fn check_initiator_name() -> Check {
    match iscsi::initiator_name(Path::new(iscsi::INITIATOR_NAME_FILE)) {
        Ok(name) => Check::good("initiator name", name.to_string()),
        Err(error) => Check::limited(
            "initiator name",
            format!("{error:#}"),
            "run `lunbd initiator-name --create`, if you want iSCSI and the file is missing",
        ),
    }
}

pub(super) fn check_nbd(engine: &Engine, deadline: Deadline) -> Result<Check> {
    let module = engine.roots().sysfs.join("module/nbd");
    let swapped = swaps_on_nbd(engine, deadline)?;
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
fn swaps_on_nbd(engine: &Engine, deadline: Deadline) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for device in mounts::read_swaps(engine.roots(), deadline)?.found {
        if let Some(disk) = BlockDevice::of(engine.roots(), device)?
            && disk.name().starts_with("nbd")
        {
            names.push(disk.name().to_owned());
        }
    }
    Ok(names)
}

/// Whether the kernel has TLS for NBD, and which ciphers.
pub(super) fn check_nbd_tls(deadline: Deadline) -> Check {
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
