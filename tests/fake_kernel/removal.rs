//! The removal of a SCSI device, by its `delete` file.

use std::fs;

use nix::errno::Errno;

use super::Kernel;
use super::array::Address;
use super::disk::Disk;

impl Kernel {
    /// Handles a write to `delete` (`drivers/scsi/scsi_sysfs.c`, `__scsi_remove_device`). The
    /// device is gone from sysfs when it returns.
    pub(super) fn delete(&self, address: Address) -> Result<(), Errno> {
        // Wait until the host is free and the probe of the disk has ended.
        let mut state = self.wait_while(self.state(), |state| {
            let device = state.devices.get(&address);
            state.busy.contains(&address.host) || device.is_some_and(|device| !device.is_probed)
        });
        let Some(device) = state.devices.get_mut(&address) else {
            return Err(Errno::ENODEV);
        };
        if device.state == "cancel" {
            return Ok(());
        }
        "cancel".clone_into(&mut device.state);
        let device = device.clone();
        state.acts.push(format!("delete {address}"));
        state.busy.insert(address.host);
        drop(state);
        super::replace(&device.dir.join("state"), "cancel\n");
        let devpath = self.devpath(&device.dir);
        self.remove_classes(&device.dir, address);
        let bus = self.path("sys/bus/scsi/devices");
        fs::remove_file(bus.join(address.to_string())).unwrap();
        if let Some(disk) = &device.disk {
            self.remove_disk(address, disk);
        }
        self.announce("remove", &devpath, ("scsi", "scsi_device"), &[]);
        let is_last = self.change(|state| {
            // Each thread that writes an attribute holds the state too.
            fs::remove_dir_all(&device.dir).unwrap();
            state.devices.remove(&address);
            let of_target = |other: &&Address| {
                (other.host, other.channel, other.target)
                    == (address.host, address.channel, address.target)
            };
            !state.devices.keys().any(|other| of_target(&other))
        });
        if is_last {
            let target = self.target_dir(address);
            fs::remove_file(bus.join(target.file_name().unwrap())).unwrap();
            fs::remove_dir_all(&target).unwrap();
            self.announce(
                "remove",
                &self.devpath(&target),
                ("scsi", "scsi_target"),
                &[],
            );
        }
        // A scan may make the target again now.
        self.change(|state| state.busy.remove(&address.host));
        Ok(())
    }

    /// `sd_remove`: removes the disk, and then the driver's own device.
    fn remove_disk(&self, address: Address, disk: &Disk) {
        let (name, devno) = (disk.name(), disk.devno());
        // Send SYNCHRONIZE CACHE (`sd_shutdown`).
        drop(self.is_answered(self.state()));
        let scsi = disk.dir.parent().and_then(|block| block.parent()).unwrap();
        let devpath = self.devpath(scsi);
        let class = format!("{devpath}/scsi_disk/{address}");
        self.announce("remove", &class, ("scsi_disk", ""), &[]);
        let bdi = format!("/devices/virtual/bdi/{devno}");
        self.announce("remove", &bdi, ("bdi", ""), &[]);
        fs::remove_file(self.path("dev").join(&name)).unwrap();
        fs::remove_file(disk.dir.join("dev")).unwrap();
        let block = self.devpath(&disk.dir);
        self.announce("remove", &block, ("block", "disk"), &disk.properties());
        for place in self.links_to_disk(&name, &devno) {
            fs::remove_file(place).unwrap();
        }
        fs::remove_dir_all(scsi.join("block")).unwrap();
        fs::remove_file(scsi.join("driver")).unwrap();
        self.announce("unbind", &devpath, ("scsi", "scsi_device"), &[]);
    }
}
