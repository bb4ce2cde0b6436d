//! SCSI disks behind iSCSI sessions, multipath maps and mounts, laid out in a [`Machine`] as
//! the kernel does it: each session is a host.

use std::fs;
use std::os::unix::fs::symlink;

use super::Machine;

pub(crate) const TARGET: &str = "iqn.2003-01.org.lunbd:array";

pub(crate) struct San {
    pub(crate) machine: Machine,
    disks: u32,
    maps: u32,
    mountinfo: String,
}

/// `sda`, `sdz`, `sdaa`, as `drivers/scsi/sd.c` counts.
fn sd_name(mut index: u32) -> String {
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

/// A page 83h like LIO's: NAA, T10, and the number of the port, which does not name the unit.
fn page_83(unit: u32) -> Vec<u8> {
    let mut naa = vec![1, 3, 0, 16, 0x60, 0x01, 0x40, 0x51];
    naa.extend([0; 8]);
    naa.extend(unit.to_be_bytes());
    let t10 = format!("LIO-ORG {:<8}:{unit:08}", "volume");
    let mut page = naa;
    page.extend([2, 1, 0, u8::try_from(t10.len()).unwrap()]);
    page.extend(t10.as_bytes());
    page.extend([1, 0x14, 0, 4, 0, 0, 0, 1]);
    let length = u16::try_from(page.len()).unwrap().to_be_bytes();
    [&[0, 0x83, length[0], length[1]], page.as_slice()].concat()
}

impl San {
    pub(crate) fn new() -> Self {
        let machine = Machine::new();
        for folder in [
            "sys/block",
            "sys/dev/block",
            "sys/class/iscsi_session",
            "sys/class/iscsi_connection",
        ] {
            fs::create_dir_all(machine.path(folder)).unwrap();
        }
        machine.write("proc/self/mountinfo", "");
        Self {
            machine,
            disks: 0,
            maps: 0,
            mountinfo: String::new(),
        }
    }

    fn link(&self, link: &str, to: &str) {
        symlink(to, self.machine.path(link)).unwrap();
    }

    /// A session with the same number as its host.
    pub(crate) fn session(&self, host: u32) {
        let dir = format!("devices/platform/host{host}/session{host}");
        let class = format!("{dir}/iscsi_session/session{host}");
        let connection = format!("{dir}/connection{host}:0/iscsi_connection/connection{host}:0");
        self.machine
            .write(&format!("sys/{class}/targetname"), &format!("{TARGET}\n"));
        let address = format!("10.0.{}.{}\n", host / 250, host % 250);
        for (attribute, text) in [
            ("persistent_address", &*address),
            ("persistent_port", "3260\n"),
        ] {
            self.machine
                .write(&format!("sys/{connection}/{attribute}"), text);
        }
        let link = format!("sys/class/iscsi_session/session{host}");
        self.link(&link, &format!("../../{class}"));
        let link = format!("sys/class/iscsi_connection/connection{host}:0");
        self.link(&link, &format!("../../{connection}"));
    }

    /// The directory, below `sys/`, of the device at `HOST:0:0:LUN`.
    pub(crate) fn device_dir(host: u32, lun: u32) -> String {
        format!("devices/platform/host{host}/session{host}/target{host}:0:0/{host}:0:0:{lun}")
    }

    /// A disk of 1 MiB that reports to be this unit, if it reports any. Returns its kernel
    /// name.
    pub(crate) fn disk(&mut self, host: u32, lun: u32, unit: Option<u32>) -> String {
        let index = self.disks;
        self.disks += 1;
        let device = Self::device_dir(host, lun);
        let name = sd_name(index);
        let block = format!("{device}/block/{name}");
        for folder in [&device, &block] {
            fs::create_dir_all(self.machine.path(&format!("sys/{folder}"))).unwrap();
        }
        let write = |dir: &str, file: &str, bytes: &[u8]| {
            fs::write(self.machine.path(&format!("sys/{dir}/{file}")), bytes).unwrap();
        };
        if let Some(unit) = unit {
            write(&device, "vpd_pg83", &page_83(unit));
            let serial = format!("{unit:08}");
            let page = [b"\0\x80\0\x08", serial.as_bytes()].concat();
            write(&device, "vpd_pg80", &page);
        }
        for (file, text) in [
            ("type", "0\n"),
            ("state", "running\n"),
            ("vendor", "LIO-ORG \n"),
            ("model", "volume          \n"),
        ] {
            write(&device, file, text.as_bytes());
        }
        let devno = format!("8:{}", index * 16);
        for (file, text) in [
            ("dev", &*format!("{devno}\n")),
            ("size", "2048\n"),
            ("ro", "0\n"),
            ("removable", "0\n"),
            ("diskseq", &*format!("{}\n", index + 1)),
            (
                "uevent",
                &*format!(
                    "MAJOR=8\nMINOR={}\nDEVNAME={name}\nDEVTYPE=disk\nDISKSEQ={}\n",
                    index * 16,
                    index + 1
                ),
            ),
        ] {
            write(&block, file, text.as_bytes());
        }
        for folder in ["holders", "slaves"] {
            let folder = format!("sys/{block}/{folder}");
            fs::create_dir(self.machine.path(&folder)).unwrap();
        }
        self.link(
            &format!("sys/{block}/device"),
            &format!("../../../{host}:0:0:{lun}"),
        );
        let scsi = format!("sys/bus/scsi/devices/{host}:0:0:{lun}");
        self.link(&scsi, &format!("../../../{device}"));
        self.link(&format!("sys/block/{name}"), &format!("../{block}"));
        self.link(&format!("sys/dev/block/{devno}"), &format!("../../{block}"));
        name
    }

    /// A device-mapper device on these disks. Returns its number.
    pub(crate) fn stack(&mut self, uuid: &str, name: &str, below: &[&str]) -> String {
        let number = self.maps;
        self.maps += 1;
        let dm = format!("dm-{number}");
        let block = format!("devices/virtual/block/{dm}");
        let devno = format!("254:{number}");
        for (file, text) in [
            ("dev", &*devno),
            ("size", "2048"),
            ("ro", "0"),
            ("removable", "0"),
            ("dm/uuid", uuid),
            ("dm/name", name),
        ] {
            self.machine
                .write(&format!("sys/{block}/{file}"), &format!("{text}\n"));
        }
        let folder = self.machine.path(&format!("sys/{block}/slaves"));
        fs::create_dir(&folder).unwrap();
        for disk in below {
            let dir = fs::read_link(self.machine.path(&format!("sys/block/{disk}"))).unwrap();
            let dir = dir.strip_prefix("..").unwrap().to_str().unwrap();
            let slave = format!("sys/{block}/slaves/{disk}");
            self.link(&slave, &format!("../../../../../{dir}"));
            let depth = "../".repeat(dir.split('/').count() + 1);
            self.link(
                &format!("sys/{dir}/holders/{dm}"),
                &format!("{depth}{block}"),
            );
        }
        fs::create_dir(self.machine.path(&format!("sys/{block}/holders"))).unwrap();
        self.link(&format!("sys/block/{dm}"), &format!("../{block}"));
        self.link(&format!("sys/dev/block/{devno}"), &format!("../../{block}"));
        devno
    }

    pub(crate) fn map(&mut self, unit: u32, below: &[&str]) -> String {
        let uuid = format!("mpath-360014051{unit:024x}");
        self.stack(&uuid, &format!("mpath{unit}"), below)
    }

    pub(crate) fn mount(&mut self, devno: &str, path: &str) {
        let line = format!("36 35 {devno} / {path} rw shared:1 - ext4 /dev/x rw\n");
        self.mountinfo.push_str(&line);
    }

    /// Call this after all mounts.
    pub(crate) fn write_mounts(&self) {
        self.machine.write("proc/self/mountinfo", &self.mountinfo);
    }

    /// 10,000 disks in 5,000 units of two paths, over 100 sessions. Every tenth unit has a map,
    /// every twentieth is mounted, and every hundredth has an offline path.
    pub(crate) fn of_ten_thousand() -> Self {
        let mut san = Self::new();
        for host in 0..100 {
            san.session(host);
        }
        for unit in 0..5000 {
            let (host, lun) = (unit % 50, unit / 50);
            let paths = [host, 50 + host].map(|host| san.disk(host, lun, Some(unit)));
            if unit % 10 == 0 {
                let devno = san.map(unit, &paths.each_ref().map(String::as_str));
                if unit % 20 == 0 {
                    san.mount(&devno, &format!("/srv/{unit}"));
                }
            }
            if unit % 100 == 0 {
                let state = format!("sys/{}/state", Self::device_dir(50 + host, lun));
                san.machine.write(&state, "offline\n");
            }
        }
        san.write_mounts();
        san
    }
}
