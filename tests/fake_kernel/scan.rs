//! SCSI hosts and their `scan` file.

use std::path::Path;

use nix::errno::Errno;

use super::array::Address;
use super::{Kernel, link, write};

/// The address range of a host, as the kernel's drivers declare it.
const MAX_CHANNEL: u64 = 1;
const MAX_TARGET: u64 = 16;

/// Creates a host with its class device and its place on the bus.
pub(super) fn lay_out_host(root: &Path, host: u32) {
    let sys = root.join("sys");
    let device = sys.join(format!("devices/pseudo_0/adapter{host}/host{host}"));
    let class = device.join(format!("scsi_host/host{host}"));
    for (file, text) in [
        ("scan", ""),
        ("state", "running\n"),
        ("proc_name", "fake\n"),
    ] {
        write(&class.join(file), text);
    }
    link(&sys.join(format!("class/scsi_host/host{host}")), &class);
    link(&sys.join(format!("bus/scsi/devices/host{host}")), &device);
}

impl Kernel {
    /// Handles a write of three words to a host's `scan` (`drivers/scsi/scsi_sysfs.c`,
    /// `scsi_scan`). It returns when everything that was found is in sysfs.
    pub(super) fn scan(&self, host: u32, line: &str) -> Result<(), Errno> {
        let mut state = self.state();
        state.acts.push(format!("scan {host}: {}", line.trim()));
        let words: Vec<&str> = line.split_whitespace().collect();
        let [channel, target, lun] = words[..] else {
            return Err(Errno::EINVAL);
        };
        let (channel, target, lun) = (word(channel)?, word(target)?, word(lun)?);
        let beyond = |number: Option<u64>, limit| number.is_some_and(|number| number >= limit);
        if beyond(channel, MAX_CHANNEL) || beyond(target, MAX_TARGET) {
            return Err(Errno::EINVAL);
        }
        // Take the host's mutex (`scan_mutex`).
        state = self.wait_while(state, |state| state.busy.contains(&host));
        state.busy.insert(host);
        // The kernel repeats a command that was not answered.
        (state, _) = self.is_answered(state);
        let is_scanned = |address: &&Address| {
            let matches = |wanted: Option<u64>, found| wanted.is_none_or(|wanted| wanted == found);
            address.host == host
                && matches(channel, address.channel.into())
                && matches(target, address.target.into())
                && matches(lun, address.lun)
        };
        let found: Vec<Address> = state.units.keys().filter(is_scanned).copied().collect();
        drop(state);
        for address in found {
            // An existing device is not examined again.
            if !self.state().devices.contains_key(&address) {
                self.add_device(address);
            }
        }
        self.change(|state| state.busy.remove(&host));
        Ok(())
    }
}

/// Parses a word; `None` is the kernel's wild card.
fn word(word: &str) -> Result<Option<u64>, Errno> {
    if word == "-" {
        return Ok(None);
    }
    word.parse().map(Some).map_err(|_| Errno::EINVAL)
}
