//! A machine in a temporary directory: the files that the engine reads and writes below its
//! `Roots`, without a kernel behind them.

// Not every test with a machine uses a SAN.
#[allow(dead_code)]
pub(crate) mod san;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use lunbd::Roots;
use tempfile::TempDir;

pub(crate) struct Machine {
    directory: TempDir,
}

impl Machine {
    pub(crate) fn new() -> Self {
        // In memory if possible: a machine may have 16,000 files.
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let machine = Self {
            directory: directory.unwrap(),
        };
        for folder in [
            "sys/class/scsi_host",
            "sys/bus/scsi/devices",
            "dev",
            "run",
            "proc/self",
        ] {
            fs::create_dir_all(machine.path(folder)).unwrap();
        }
        machine
    }

    pub(crate) fn roots(&self) -> Roots {
        Roots::below(self.directory.path())
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.directory.path().join(below)
    }

    pub(crate) fn write(&self, below: &str, text: &str) {
        let path = self.path(below);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn read(&self, below: &str) -> String {
        fs::read_to_string(self.path(below)).unwrap()
    }

    /// A host whose scan finds nothing.
    pub(crate) fn host(&self, number: u32) {
        let host = format!("sys/class/scsi_host/host{number}");
        self.write(&format!("{host}/scan"), "");
        self.write(&format!("{host}/state"), "running\n");
    }

    /// A disk as the kernel shows it, without the node.
    pub(crate) fn disk(&self, hctl: &str, name: &str) {
        let device = format!("sys/devices/fake/{hctl}");
        for (file, text) in [
            ("type", "0\n"),
            ("state", "running\n"),
            ("wwid", "naa.5000c500a1b2c3d4\n"),
            ("delete", ""),
        ] {
            self.write(&format!("{device}/{file}"), text);
        }
        let block = format!("{device}/block/{name}");
        for (file, text) in [
            ("dev", "8:16\n"),
            ("size", "2048\n"),
            ("ro", "0\n"),
            ("diskseq", "17\n"),
        ] {
            self.write(&format!("{block}/{file}"), text);
        }
        fs::create_dir_all(self.path(&format!("{block}/holders/dm-3"))).unwrap();
        let link = self.path(&format!("sys/bus/scsi/devices/{hctl}"));
        symlink(self.path(&device), link).unwrap();
    }
}
