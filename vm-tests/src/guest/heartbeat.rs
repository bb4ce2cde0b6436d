//! A heartbeat of OCFS2 on a disk.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::lio::{mount_configfs, remove_dir, write};

const CLUSTER: &str = "/sys/kernel/config/cluster/lunbd";

/// A region in which the kernel writes its heartbeat. Dropping it ends the heartbeat.
#[derive(Debug)]
pub struct Heartbeat {
    node: PathBuf,
    region: PathBuf,
}

impl Heartbeat {
    /// Starts a heartbeat on this disk, which has sectors of 512 bytes. It returns when the
    /// kernel has seen its own heartbeat three times, which takes about six seconds.
    #[must_use]
    pub fn on(disk: &Path) -> Self {
        mount_configfs();
        super::need_module("ocfs2_nodemanager");
        let cluster = Path::new(CLUSTER);
        let node = cluster.join("node/this");
        let region = cluster.join("heartbeat/REGION");
        for directory in [cluster, &node, &region] {
            let made = fs::create_dir(directory);
            made.unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        }
        let heartbeat = Self { node, region };
        let settings = [
            ("ipv4_port", "7777"),
            ("ipv4_address", "127.0.0.1"),
            ("num", "0"),
            ("local", "1"),
        ];
        for (name, value) in settings {
            write(&heartbeat.node.join(name), value);
        }
        for (name, value) in [
            ("block_bytes", "512"),
            ("start_block", "1"),
            ("blocks", "8"),
        ] {
            write(&heartbeat.region.join(name), value);
        }
        let opened: File = OpenOptions::new()
            .read(true)
            .write(true)
            .open(disk)
            .expect("the disk");
        // The kernel opens the device itself, by the number of the device behind this descriptor.
        write(
            &heartbeat.region.join("dev"),
            &opened.as_raw_fd().to_string(),
        );
        heartbeat
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        remove_dir(&self.region);
        remove_dir(&self.node);
        remove_dir(Path::new(CLUSTER));
    }
}
