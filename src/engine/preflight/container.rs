//! Checks for the parts of the machine that a container may lack.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::lock::run_dir;
use crate::engine::preflight::check::Check;
use crate::engine::usage::places_not_looked_at;
use crate::error::Result;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{blockdev, machine, mounts};
use crate::multipath::{Daemon, Map};
use crate::uevent;

/// Checks that the lock directory is the one that the machine's other processes use.
pub(super) fn check_locks(engine: &Engine, _: Deadline) -> Result<Check> {
    let run = &engine.roots().run;
    let seen = run.display().to_string();
    if machine::is_read_only(run)? {
        let remedy = "mount it read-write: the locks between processes are there";
        let seen = format!("{seen} is read-only");
        return Ok(Check::missing("locks", seen, remedy));
    }
    if let Err(error) = DeviceLock::try_take(engine.roots(), "doctor") {
        let remedy = "give the process write access to it, and room in it";
        return Ok(Check::missing("locks", error.to_string(), remedy));
    }
    let remedy = "mount the machine's /run/lunbd at the same path, and run in the machine's PID \
                  namespace, where lunbd can check it";
    let seen = format!("{seen}/lunbd");
    Ok(match run_dir::is_of_first_process(engine.roots()) {
        Some(true) => Check::good("locks", seen),
        Some(false) => Check::limited(
            "locks",
            format!(
                "{seen} is not that of the machine's first process: one outside of this \
                 container may work on the same device"
            ),
            remedy,
        ),
        None => Check::limited(
            "locks",
            format!("this process cannot see whether {seen} is the machine's"),
            remedy,
        ),
    })
}

/// Checks that the default place of a journal is cleared at each boot: an operation that was
/// begun in an earlier boot concerns devices that are gone.
pub(super) fn check_journal(engine: &Engine, _: Deadline) -> Result<Check> {
    let place = engine.roots().run.join("lunbd/journal");
    let seen = place.display().to_string();
    let there = place.ancestors().find(|dir| dir.exists());
    if machine::is_cleared_at_boot(there.unwrap_or(&place))? {
        return Ok(Check::good("journal", format!("a boot clears {seen}")));
    }
    let remedy = "mount the machine's /run/lunbd at the same place, or choose with --journal \
                  a directory of systemd's RuntimeDirectory= with \
                  RuntimeDirectoryPreserve=yes";
    let seen = format!("no boot clears {seen}, and it may end with its container");
    Ok(Check::limited("journal", seen, remedy))
}

/// Checks that this process can see every possible user of a disk.
pub(super) fn check_users(engine: &Engine, deadline: Deadline) -> Result<Check> {
    let places = places_not_looked_at(engine, deadline)?;
    if places.is_empty() {
        let seen = "processes, loop devices and targets of the kernel are all seen";
        return Ok(Check::good("users", seen));
    }
    let places: Vec<String> = places.iter().map(ToString::to_string).collect();
    let seen = format!(
        "cannot see {}; a detach proceeds without them, and nothing is replaced or reaped",
        places.join(", ")
    );
    let remedy = "run in the host's PID namespace with CAP_SYS_PTRACE, the host's /dev, and \
                  configfs mounted on /sys/kernel/config";
    Ok(Check::limited("users", seen, remedy))
}

pub(super) fn check_network_namespace(engine: &Engine) -> Check {
    if uevent::is_in_machines_network_namespace(engine.roots()) {
        return Check::good("network namespace", "the machine's");
    }
    Check::limited(
        "network namespace",
        "not the machine's: iSCSI logins, NBD, udev's events and multipathd are out of \
         reach",
        "run in the host's network namespace",
    )
}

pub(super) fn check_multipath(engine: &Engine, _: Deadline) -> Result<Check> {
    let maps = Map::all(engine.roots())?.len();
    if Daemon::find(engine.roots())?.is_some() {
        return Ok(Check::good(
            "multipath",
            format!("multipathd runs, {maps} maps"),
        ));
    }
    let is_in_machines_namespace = uevent::is_in_machines_network_namespace(engine.roots());
    if maps == 0 && is_in_machines_namespace {
        return Ok(Check::good("multipath", "no multipathd and no maps"));
    }
    let seen = if is_in_machines_namespace {
        format!("{maps} maps and no multipathd: a failed path stays failed")
    } else {
        format!(
            "{maps} maps and no multipathd in this network namespace: one elsewhere gets no \
             notice of paths, and may create a map again that lunbd removes"
        )
    };
    let remedy = "run in the host's network namespace, or start multipathd";
    Ok(Check::limited("multipath", seen, remedy))
}

/// Checks that each device has its node, and that the kernel creates the nodes of new
/// devices.
pub(super) fn check_nodes(engine: &Engine, _: Deadline) -> Result<Check> {
    let remedy = "mount the machine's devtmpfs: a container needs the host's /dev";
    let dev = &engine.roots().dev;
    let kind = mounts::read_type(engine.roots(), dev)?;
    if kind != "devtmpfs" {
        let seen = format!(
            "{} is no devtmpfs: a new device gets no node",
            dev.display()
        );
        return Ok(Check::missing("device nodes", seen, remedy));
    }
    let devices = BlockDevice::all(engine.roots())?;
    let without_node = devices.iter().find(|device| {
        let found = blockdev::devno_at(engine.roots(), &device.node(engine.roots()));
        !found.is_ok_and(|devno| devno == device.devno())
    });
    Ok(match without_node {
        Some(device) => {
            let seen = format!("{} has no node of its number", device.name());
            Check::missing("device nodes", seen, remedy)
        }
        None => Check::good(
            "device nodes",
            format!("each of {} block devices has its node", devices.len()),
        ),
    })
}
