//! The state of the guest that a test must leave as it found it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use vm_tests::guest::{entries, udevd};

/// One readable line for each thing that is compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot(BTreeSet<String>);

impl Snapshot {
    pub(crate) fn take() -> Self {
        let mut seen = BTreeSet::new();
        seen.extend(
            entries("/sys/bus/scsi/devices")
                .into_iter()
                .map(|name| format!("SCSI {name}")),
        );
        seen.extend(
            entries("/sys/class/scsi_host")
                .into_iter()
                .map(|name| format!("SCSI host {name}")),
        );
        for name in entries("/sys/block") {
            let block = Path::new("/sys/block").join(&name);
            // Loop and NBD nodes come with their modules and stay, so they count only while
            // they have a size.
            let mapped = block.join("dm").exists();
            if mapped || read(&block.join("size")).is_some_and(|size| size != "0") {
                seen.insert(format!("block device {name}"));
            }
            if block.join("pid").exists() {
                seen.insert(format!("connected {name}"));
            }
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        seen.extend(mounts.lines().filter_map(|mount| {
            let mut fields = mount.split(' ');
            let (what, on) = (fields.next()?, fields.next()?);
            // The mount of configfs does not count; its contents do, see below.
            (what != "configfs").then(|| format!("mount {what} on {on}"))
        }));
        seen.extend(target_objects());
        for (class, what) in [
            ("iscsi_session", "iSCSI"),
            ("fc_remote_ports", "FC"),
            ("net", "network interface"),
        ] {
            let names = entries(Path::new("/sys/class").join(class));
            seen.extend(names.into_iter().map(|name| format!("{what} {name}")));
        }
        seen.extend(
            processes()
                .into_iter()
                .map(|(pid, comm)| format!("process {comm} ({pid})")),
        );
        if Path::new("/sys/module/scsi_debug").exists() {
            seen.insert("module scsi_debug".to_owned());
        }
        if udevd::pid().is_some() && Path::new("/run/udev/control").exists() {
            seen.insert("udevd".to_owned());
        }
        Self(seen)
    }

    /// What `self` has more and less than `before`, in words. Empty when the guest is as it
    /// was.
    pub(crate) fn difference(&self, before: &Self) -> Vec<String> {
        let left = self
            .0
            .difference(&before.0)
            .map(|thing| format!("left {thing}"));
        let lost = before
            .0
            .difference(&self.0)
            .map(|thing| format!("took away {thing}"));
        left.chain(lost).collect()
    }
}

/// Subsystems of nvmet, and targets and volumes of LIO. The directories of LIO's fabrics and
/// backstores stay, as modules do, so only their contents count.
fn target_objects() -> Vec<String> {
    let root = Path::new("/sys/kernel/config/target");
    let mut objects = Vec::new();
    for group in entries(root) {
        for name in entries(root.join(&group)) {
            let theirs = matches!(name.as_str(), "alua" | "discovery_auth");
            if !theirs && root.join(&group).join(&name).is_dir() {
                objects.push(format!("LIO {group}/{name}"));
            }
        }
    }
    let subsystems = entries("/sys/kernel/config/nvmet/subsystems").into_iter();
    objects.extend(subsystems.map(|name| format!("nvmet {name}")));
    objects
}

/// Userspace processes besides pid 1, udevd and its workers.
fn processes() -> Vec<(i32, String)> {
    entries("/proc")
        .into_iter()
        .filter_map(|entry| {
            let pid: i32 = entry.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (comm, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            let parent: i32 = rest.split_whitespace().nth(1)?.parse().ok()?;
            // Kernel threads are children of kthreadd, which is pid 2.
            let kernel = pid == 2 || parent == 2;
            let udev = matches!(comm, "systemd-udevd" | "(udev-worker)");
            (pid != 1 && !kernel && !udev).then(|| (pid, comm.to_owned()))
        })
        .collect()
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path)
        .ok()
        .map(|text| text.trim().to_owned())
}
