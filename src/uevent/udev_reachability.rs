//! Decides whether udevd's events reach this process. It checks facts and does not ask
//! udevd, so a slow or stopped udevd is not mistaken for one that cannot be heard.

use std::fmt;
use std::path::Path;

use crate::kernel::{Roots, mounts, namespace, process, sysfs};

/// Why udevd's events do not reach this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UdevUnreachable {
    /// udevd's control socket is missing.
    NotRunning,
    /// libudev listens to nothing.
    LibudevLooksElsewhere,
    /// udevd sends in another network namespace.
    OtherNetworkNamespace,
}

impl fmt::Display for UdevUnreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotRunning => "no udevd runs (it has no control socket below /run/udev)",
            Self::LibudevLooksElsewhere => {
                "libudev listens to nothing, since it looks for udevd at /run/udev/control"
            }
            Self::OtherNetworkNamespace => "udevd sends its events in another network namespace",
        })
    }
}

impl UdevUnreachable {
    /// How to fix the cause.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::NotRunning => "start systemd-udevd; a container needs the host's /run/udev",
            Self::LibudevLooksElsewhere => "mount the host's /run/udev at /run/udev",
            Self::OtherNetworkNamespace => "run in the host's network namespace",
        }
    }
}

/// Why no event of udevd reaches this process; `None` if they do.
pub(crate) fn udev_unreachable_reason(roots: &Roots) -> Option<UdevUnreachable> {
    let control = roots.run.join("udev/control");
    if !control.exists() {
        Some(UdevUnreachable::NotRunning)
    } else if !libudev_listens() {
        Some(UdevUnreachable::LibudevLooksElsewhere)
    } else if !is_in_udevds_network_namespace(roots) {
        Some(UdevUnreachable::OtherNetworkNamespace)
    } else {
        None
    }
}

/// libudev joins no multicast group if udevd's socket is not at its usual place and
/// `/dev` is not the machine's own (`sd-device/device-monitor.c`). It reports no error
/// then.
fn libudev_listens() -> bool {
    let is_devtmpfs = || mounts::read_type(&Roots::default(), Path::new("/dev"));
    Path::new("/run/udev/control").exists() || is_devtmpfs().is_ok_and(|kind| kind == "devtmpfs")
}

/// udevd's multicasts stay in its network namespace (`net/netlink/af_netlink.c`).
fn is_in_udevds_network_namespace(roots: &Roots) -> bool {
    // udevd is in the network namespace of the machine's first process.
    is_in_first_process_network_namespace(roots).unwrap_or_else(|| {
        is_initial_network_namespace(roots) || has_udevd_beside_us(roots, own_network_namespace())
    })
}

/// Whether the network namespace of this process is the machine's.
pub(crate) fn is_in_machines_network_namespace(roots: &Roots) -> bool {
    is_in_first_process_network_namespace(roots)
        .unwrap_or_else(|| is_initial_network_namespace(roots))
}

/// `None` if the machine's first process is not visible. A container shows its own.
fn is_in_first_process_network_namespace(roots: &Roots) -> Option<bool> {
    let shows_machine = process::shows_all_namespaces(roots).unwrap_or(false);
    let first = network_namespace(&roots.proc.join("1")).filter(|_| shows_machine)?;
    Some(own_network_namespace() == Some(first))
}

fn own_network_namespace() -> Option<u64> {
    network_namespace(Path::new("/proc/self"))
}

fn network_namespace(process: &Path) -> Option<u64> {
    namespace::inode(process, "net").ok()
}

/// The kernel shows this setting only in the initial network namespace
/// (`net/core/sysctl_net_core.c`, `net_core_table`).
///
/// In a `/proc` without settings (`subset=pid`) the answer is unknown. The namespace then
/// counts as the initial one, and a wait for udev reports that no answer comes.
fn is_initial_network_namespace(roots: &Roots) -> bool {
    let settings = roots.proc.join("sys");
    !settings.exists() || settings.join("net/core/netdev_max_backlog").exists()
}

/// Whether a udevd of this container runs in our network namespace.
fn has_udevd_beside_us(roots: &Roots, own: Option<u64>) -> bool {
    let is_one = |pid: u32| {
        let process = roots.proc.join(pid.to_string());
        let command = sysfs::read(&process.join("comm"));
        // `udevd` is the name in eudev.
        let is_udevd = command.is_ok_and(|name| name == "systemd-udevd" || name == "udevd");
        is_udevd && own.is_some() && network_namespace(&process) == own
    };
    process::pids(roots).is_ok_and(|pids| pids.into_iter().any(is_one))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_container_that_shows_a_first_process_of_its_own_hears_no_udevd_but_its_own() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let process = |pid: &str| roots.proc.join(pid);
        let own = network_namespace(Path::new("/proc/self")).unwrap();
        fs::create_dir_all(process("sys/net/core")).unwrap();
        for pid in ["1", "7"] {
            fs::create_dir_all(process(pid).join("ns")).unwrap();
            // Any other file means a PID namespace of a container.
            fs::write(process(pid).join("ns/pid"), "").unwrap();
            let ours = "/proc/self/ns/net";
            std::os::unix::fs::symlink(ours, process(pid).join("ns/net")).unwrap();
        }
        fs::write(process("1").join("comm"), "sleep\n").unwrap();
        fs::write(process("7").join("comm"), "agent\n").unwrap();
        assert!(!is_in_udevds_network_namespace(&roots));
        fs::write(process("7").join("comm"), "systemd-udevd\n").unwrap();
        assert!(is_in_udevds_network_namespace(&roots));
        assert!(!has_udevd_beside_us(&roots, Some(own + 1)), "elsewhere");
        fs::remove_file(process("7").join("comm")).unwrap();
        fs::write(process("sys/net/core/netdev_max_backlog"), "1000\n").unwrap();
        assert!(is_in_udevds_network_namespace(&roots));
    }
}
