//! The disk driver: a block device for a SCSI disk, and its node.

use std::fs;
use std::path::{Path, PathBuf};

use super::array::Address;
use super::{Kernel, link, write};

/// A disk of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Disk {
    index: u32,
    pub(super) dir: PathBuf,
    /// The sequence number of this instance.
    pub(super) life: u64,
    pub(super) bytes: u64,
}

impl Disk {
    pub(super) fn name(&self) -> String {
        name(self.index)
    }

    /// The major and the minor number (`drivers/scsi/sd.c`, `sd_major`): 16 disks per major, 16
    /// minors per disk.
    pub(super) fn number(&self) -> (u32, u32) {
        let majors = [8, 65, 66, 67, 68, 69, 70, 71];
        let major = majors[usize::try_from(self.index / 16).unwrap() % majors.len()];
        (major, self.index % 16 * 16)
    }

    pub(super) fn devno(&self) -> String {
        let (major, minor) = self.number();
        format!("{major}:{minor}")
    }

    /// The properties of the disk's events.
    pub(super) fn properties(&self) -> Vec<(&'static str, String)> {
        let (major, minor) = self.number();
        vec![
            ("MAJOR", major.to_string()),
            ("MINOR", minor.to_string()),
            ("DEVNAME", self.name()),
            ("DISKSEQ", self.life.to_string()),
        ]
    }
}

/// `sda`, `sdz`, `sdaa` (`sd_format_disk_name`).
fn name(mut index: u32) -> String {
    let mut letters = Vec::new();
    loop {
        letters.push(char::from(b'a' + u8::try_from(index % 26).unwrap()));
        match (index / 26).checked_sub(1) {
            Some(rest) => index = rest,
            None => break,
        }
    }
    let letters: String = letters.iter().rev().collect();
    format!("sd{letters}")
}

impl Kernel {
    /// Probes a disk (`sd_probe`), after the scan that found it.
    pub(super) fn add_disk(&self, address: Address) {
        let mut state = self.state();
        let taken: Vec<u32> = state
            .devices
            .values()
            .filter_map(|device| device.disk.as_ref().map(|disk| disk.index))
            .collect();
        state.lives += 1;
        let life = state.lives;
        let Some(device) = state.devices.get_mut(&address) else {
            return;
        };
        let mut indices = 0..u32::MAX;
        let index = indices.find(|index| !taken.contains(index)).unwrap();
        let scsi = device.dir.clone();
        let disk = Disk {
            index,
            dir: scsi.join("block").join(name(index)),
            life,
            bytes: device.was.bytes,
        };
        device.disk = Some(disk.clone());
        drop(state);
        self.lay_out_disk(&scsi, &disk);
        let devpath = self.devpath(&scsi);
        let class = format!("{devpath}/scsi_disk/{address}");
        fs::create_dir_all(scsi.join(format!("scsi_disk/{address}"))).unwrap();
        self.announce("add", &class, ("scsi_disk", ""), &[]);
        let (major, minor) = disk.number();
        let bdi = format!("/devices/virtual/bdi/{major}:{minor}");
        self.announce("add", &bdi, ("bdi", ""), &[]);
        let block = self.devpath(&disk.dir);
        self.announce("add", &block, ("block", "disk"), &disk.properties());
        link(&scsi.join("driver"), &self.path("sys/bus/scsi/drivers/sd"));
        self.announce("bind", &devpath, ("scsi", "scsi_device"), &[]);
        self.change(|state| {
            if let Some(device) = state.devices.get_mut(&address) {
                device.is_probed = true;
            }
        });
    }

    /// Creates the directory, the links to it, and then the node.
    fn lay_out_disk(&self, scsi: &Path, disk: &Disk) {
        let Disk { dir, .. } = disk;
        let (name, devno) = (disk.name(), disk.devno());
        for (file, text) in [
            ("size", format!("{}\n", disk.bytes / 512)),
            ("ro", "0\n".to_owned()),
            ("inflight", "       0        0\n".to_owned()),
            ("diskseq", format!("{}\n", disk.life)),
            ("uevent", String::new()),
            ("dev", format!("{devno}\n")),
            ("queue/write_cache", "write back\n".to_owned()),
        ] {
            write(&dir.join(file), text);
        }
        fs::create_dir_all(dir.join("holders")).unwrap();
        fs::create_dir_all(dir.join("slaves")).unwrap();
        link(&dir.join("device"), scsi);
        for place in self.links_to_disk(&name, &devno) {
            link(&place, dir);
        }
        let node = self.path("dev").join(&name);
        let text = format!("block {devno} {} {}\n", disk.life, dir.display());
        let new = node.with_extension("new");
        write(&new, text);
        fs::rename(new, node).unwrap();
    }

    pub(super) fn links_to_disk(&self, name: &str, devno: &str) -> [PathBuf; 3] {
        let sys = self.path("sys");
        [
            sys.join("block").join(name),
            sys.join("class/block").join(name),
            sys.join("dev/block").join(devno),
        ]
    }
}
