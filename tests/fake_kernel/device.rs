//! A SCSI device that a scan has found: its directory, and the links to it.

use std::fs;
use std::path::{Path, PathBuf};

use super::array::{Address, Unit};
use super::disk::Disk;
use super::{Kernel, link, write};

/// The kernel's data about a device.
#[derive(Debug, Clone)]
pub(super) struct Device {
    pub(super) dir: PathBuf,
    /// The unit as the last scan or rescan saw it.
    pub(super) was: Unit,
    pub(super) state: String,
    pub(super) disk: Option<Disk>,
    /// Its driver has finished its probe, or it needs no driver.
    pub(super) is_probed: bool,
    /// How many commands have failed.
    pub(super) errors: u64,
}

/// The classes in which a SCSI device has one class device each, in the order of their events.
const CLASSES: [&str; 3] = ["scsi_device", "scsi_generic", "bsg"];

impl Kernel {
    /// What a scan does when a unit answers (`drivers/scsi/scsi_scan.c`, `scsi_add_lun`). The
    /// disk driver follows on a separate thread.
    pub(super) fn add_device(&self, address: Address) {
        let unit = self.state().units.get(&address).cloned();
        let Some(unit) = unit else {
            return;
        };
        let target = self.target_dir(address);
        if !target.exists() {
            fs::create_dir_all(&target).unwrap();
            let name = target.file_name().unwrap();
            link(&self.path("sys/bus/scsi/devices").join(name), &target);
            self.announce("add", &self.devpath(&target), ("scsi", "scsi_target"), &[]);
        }
        let dir = target.join(address.to_string());
        lay_out(&dir, &unit);
        let is_disk = unit.kind == 0;
        let device = Device {
            dir: dir.clone(),
            was: unit,
            state: "running".to_owned(),
            disk: None,
            is_probed: !is_disk,
            errors: 0,
        };
        self.change(|state| state.devices.insert(address, device));
        let devpath = self.devpath(&dir);
        // From Linux 6.12 on this event comes before the device has its parent.
        let reset = [("SDEV_UA", "POWER_ON_RESET_OCCURRED".to_owned())];
        self.announce(
            "change",
            &format!("/{address}"),
            ("scsi", "scsi_device"),
            &reset,
        );
        let bus = self.path("sys/bus/scsi/devices");
        link(&bus.join(address.to_string()), &dir);
        self.announce("add", &devpath, ("scsi", "scsi_device"), &[]);
        for class in CLASSES {
            let name = class_name(class, address);
            fs::create_dir_all(dir.join(class).join(&name)).unwrap();
            self.announce(
                "add",
                &format!("{devpath}/{class}/{name}"),
                (class, ""),
                &[],
            );
        }
        if is_disk {
            self.start_probe(address);
        }
    }

    pub(super) fn target_dir(&self, address: Address) -> PathBuf {
        let Address {
            host,
            channel,
            target,
            ..
        } = address;
        self.path(&format!(
            "sys/devices/pseudo_0/adapter{host}/host{host}/target{host}:{channel}:{target}"
        ))
    }

    /// The path of a directory of sysfs as events name it.
    pub(super) fn devpath(&self, dir: &Path) -> String {
        let below = dir.strip_prefix(self.path("sys")).unwrap();
        format!("/{}", below.display())
    }

    /// Sends the removal events of the class devices, which come first.
    pub(super) fn remove_classes(&self, dir: &Path, address: Address) {
        let devpath = self.devpath(dir);
        for class in ["bsg", "scsi_generic", "scsi_device"] {
            let name = class_name(class, address);
            self.announce(
                "remove",
                &format!("{devpath}/{class}/{name}"),
                (class, ""),
                &[],
            );
            fs::remove_dir_all(dir.join(class)).unwrap();
        }
    }

    pub(super) fn count_error(&self, address: Address) {
        self.change(|state| {
            if let Some(device) = state.devices.get_mut(&address) {
                device.errors += 1;
                super::replace(
                    &device.dir.join("ioerr_cnt"),
                    format!("{:#x}\n", device.errors),
                );
            }
        });
    }

    /// The addresses of the kernel's devices, in order.
    pub(crate) fn devices(&self) -> Vec<String> {
        let state = self.state();
        state.devices.keys().map(ToString::to_string).collect()
    }

    /// Starts the probe of a disk, which outlives the scan that found it.
    fn start_probe(&self, address: Address) {
        let own = self.own.clone();
        std::thread::spawn(move || {
            if let Some(kernel) = own.upgrade() {
                kernel.add_disk(address);
            }
        });
    }
}

fn class_name(class: &str, address: Address) -> String {
    match class {
        "scsi_generic" => format!("sg{}", address.lun),
        _ => address.to_string(),
    }
}

/// The attributes that the kernel fills from the unit's answers.
pub(super) fn lay_out(dir: &Path, unit: &Unit) {
    let wwid = format!("naa.{:016x}\n", unit.naa);
    for (file, text) in [
        ("type", format!("{}\n", unit.kind)),
        ("vendor", "lunbd   \n".to_owned()),
        ("model", format!("{:<16}\n", unit.product)),
        ("state", "running\n".to_owned()),
        ("wwid", wwid),
        ("ioerr_cnt", "0x0\n".to_owned()),
        ("delete", String::new()),
        ("rescan", String::new()),
        ("uevent", String::new()),
    ] {
        write(&dir.join(file), text);
    }
    write(&dir.join("inquiry"), unit.standard_inquiry());
    write(&dir.join("vpd_pg83"), unit.page_83());
    write(&dir.join("vpd_pg80"), unit.page_80());
}
