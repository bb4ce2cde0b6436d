//! Writes to the attributes that have an effect.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;

use super::array::Address;
use super::{Kernel, replace};

impl Kernel {
    /// Writes to an attribute that the caller has open as `inode`. After the end of its object
    /// the write is refused, even if another object has its name since.
    pub(super) fn write_attribute(&self, path: &Path, inode: u64, text: &str) -> Result<(), Errno> {
        let path = path.canonicalize().map_err(|_| Errno::ENODEV)?;
        let stands = fs::metadata(&path).is_ok_and(|found| found.ino() == inode);
        if !stands {
            return Err(Errno::ENODEV);
        }
        let name = |path: &Path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.unwrap_or_default().to_owned()
        };
        let object = path.parent().ok_or(Errno::ENODEV)?;
        let of = name(object);
        match (name(&path).as_str(), of.parse::<Address>()) {
            ("scan", _) => {
                let host = of.strip_prefix("host").and_then(|host| host.parse().ok());
                self.scan(host.ok_or(Errno::EINVAL)?, text)
            }
            ("delete", Ok(address)) => self.delete(address),
            ("rescan", Ok(address)) => self.rescan(address),
            ("state", Ok(address)) => self.set_state(address, text),
            ("uevent", _) => self.synthesize(object, text),
            _ => Err(Errno::EACCES),
        }
    }

    /// Reads the pages and the size again (`drivers/scsi/scsi_scan.c`, `scsi_rescan_device`).
    /// Does nothing if the device does not run.
    fn rescan(&self, address: Address) -> Result<(), Errno> {
        let (mut state, _) = self.is_answered(self.state());
        state.acts.push(format!("rescan {address}"));
        let unit = state.units.get(&address).cloned();
        let device = state.devices.get_mut(&address).ok_or(Errno::ENODEV)?;
        let Some(unit) = unit.filter(|_| device.state == "running") else {
            return Ok(());
        };
        fs::write(device.dir.join("vpd_pg83"), unit.page_83()).unwrap();
        fs::write(device.dir.join("vpd_pg80"), unit.page_80()).unwrap();
        device.was = unit;
        let Some(disk) = device
            .disk
            .as_mut()
            .filter(|disk| disk.bytes != device.was.bytes)
        else {
            return Ok(());
        };
        disk.bytes = device.was.bytes;
        replace(&disk.dir.join("size"), format!("{}\n", disk.bytes / 512));
        let (devpath, mut more) = (self.devpath(&disk.dir), disk.properties());
        drop(state);
        more.push(("RESIZE", "1".to_owned()));
        self.announce("change", &devpath, ("block", "disk"), &more);
        Ok(())
    }

    /// `store_state_field`: it accepts the words with or without a newline.
    fn set_state(&self, address: Address, text: &str) -> Result<(), Errno> {
        let word = text.trim_end_matches('\n');
        if !matches!(word, "running" | "offline") {
            return Err(Errno::EINVAL);
        }
        let mut state = self.state();
        let device = state.devices.get_mut(&address).ok_or(Errno::ENODEV)?;
        if !matches!(&*device.state, "running" | "offline") {
            return Err(Errno::EINVAL);
        }
        word.clone_into(&mut device.state);
        replace(&device.dir.join("state"), format!("{word}\n"));
        Ok(())
    }

    /// Sends a requested event (`lib/kobject_uevent.c`, `kobject_synth_uevent`).
    fn synthesize(&self, object: &Path, text: &str) -> Result<(), Errno> {
        let mut words = text.split_whitespace();
        let action = words.next().ok_or(Errno::EINVAL)?;
        let mark = words.next().unwrap_or("0");
        let state = self.state();
        let disk = state.devices.values().find_map(|device| {
            let disk = device.disk.as_ref();
            disk.filter(|disk| disk.dir == object)
        });
        let (devpath, mut more) = match disk {
            Some(disk) => (self.devpath(&disk.dir), disk.properties()),
            None => return Err(Errno::ENODEV),
        };
        drop(state);
        more.push(("SYNTH_UUID", mark.to_owned()));
        self.announce(action, &devpath, ("block", "disk"), &more);
        Ok(())
    }
}
