//! A multipath map that queues I/O and that no multipathd manages, as on a machine whose
//! multipathd was killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The map fails I/O without a path when this is dropped.
#[derive(Debug)]
#[must_use = "the map fails I/O as soon as this is dropped"]
pub struct FailsWhenDropped(());

impl Drop for FailsWhenDropped {
    fn drop(&mut self) {
        fail_if_no_path();
    }
}

/// The map; dropping it removes it.
#[derive(Debug)]
pub struct QueueingMap {
    paths: Vec<String>,
    table: String,
}

const NAME: &str = "queueing";

impl QueueingMap {
    /// The map of a unit over its disks, with the uuid that multipathd would give it. The
    /// caller must have stopped udevd: its probe of a new map makes paths of `scsi_debug` fail.
    #[must_use]
    pub fn over(disks: &[PathBuf]) -> Self {
        super::need_module("dm_multipath");
        super::need_module("dm_round_robin");
        let first = disks.first().expect("a path");
        let paths: Vec<_> = disks.iter().map(|disk| attribute(disk, "dev")).collect();
        let members: Vec<_> = paths.iter().map(|path| format!("{path} 1000")).collect();
        let table = format!(
            "0 {} multipath 1 queue_if_no_path 0 1 1 round-robin 0 {} 1 {}",
            attribute(first, "size"),
            paths.len(),
            members.join(" ")
        );
        let wwid = attribute(first, "device/wwid");
        let name = wwid.strip_prefix("naa.").expect("a registered name");
        super::create_map(NAME, Some(&format!("mpath-3{name}")), &table);
        Self { paths, table }
    }

    /// Marks all its paths as failed, or as active again.
    pub fn set_paths(&self, active: bool) {
        let word = if active {
            "reinstate_path"
        } else {
            "fail_path"
        };
        for path in &self.paths {
            tell(&format!("{word} {path}"));
        }
    }

    /// Loads a table without paths, which does not queue, as multipathd does when the paths are
    /// gone; or the first table again.
    pub fn set_table(&self, has_paths: bool) {
        let without_paths = format!("0 {} multipath 0 0 0 0", attribute(&self.node(), "size"));
        let table = if has_paths {
            &self.table
        } else {
            &without_paths
        };
        super::run(&["dmsetup", "reload", NAME, "--table", table]);
        super::run(&["dmsetup", "resume", "--noudevsync", NAME]);
    }

    /// Keeps a failed test from waiting for ever in the last close of the map. The result is
    /// dropped before a file that was opened earlier.
    pub fn fails_when_dropped(&self) -> FailsWhenDropped {
        FailsWhenDropped(())
    }

    /// `/dev/dm-N`.
    #[must_use]
    pub fn node(&self) -> PathBuf {
        super::node_of_map(NAME)
    }

    /// Whether the map queues I/O without a path.
    #[must_use]
    pub fn queues(&self) -> bool {
        super::multipathd::queues(NAME)
    }
}

fn fail_if_no_path() {
    let message = ["message", NAME, "0", "fail_if_no_path"];
    let _gone_already = Command::new("dmsetup").args(message).output();
}

fn tell(message: &str) {
    super::run(&["dmsetup", "message", NAME, "0", message]);
}

fn attribute(disk: &Path, name: &str) -> String {
    let block = Path::new("/sys/block").join(disk.file_name().expect("a node"));
    let text = fs::read_to_string(block.join(name)).expect("an attribute");
    text.trim().to_owned()
}

impl Drop for QueueingMap {
    fn drop(&mut self) {
        fail_if_no_path();
        let remove = ["remove", "--noudevsync", "--retry", NAME];
        let _gone_already = Command::new("dmsetup").args(remove).output();
    }
}
