//! A SCSI device as sysfs shows it.

mod find;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::access_state::AccessState;
use super::identity::{Identity, Pages};
use super::state::State;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Hctl;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, sysfs};

/// One instance of the SCSI device at an address. A later device at the same address is a
/// different `ScsiDevice`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiDevice {
    hctl: Hctl,
    dir: PathBuf,
    /// The inode number of the sysfs directory, which kernfs does not share between
    /// directories.
    inode: u64,
}

impl ScsiDevice {
    pub(super) fn at(hctl: Hctl, dir: PathBuf) -> Option<Self> {
        let inode = fs::metadata(&dir).ok()?.ino();
        Some(Self { hctl, dir, inode })
    }

    /// The address.
    #[must_use]
    pub fn hctl(&self) -> Hctl {
        self.hctl
    }

    /// The directory in sysfs, with no link in the path.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether the bus lists this instance of the device. It does so from a moment after the
    /// directory appears until the removal begins, and never again after that
    /// (`drivers/base/core.c`, `device_add` and `device_del`).
    pub(crate) fn is_on_bus(&self, roots: &Roots) -> bool {
        let link = roots.sysfs.join("bus/scsi/devices");
        fs::metadata(link.join(self.hctl.to_string())).is_ok_and(|meta| meta.ino() == self.inode)
    }

    /// Whether sysfs still shows this instance of the device.
    #[must_use]
    pub fn is_there(&self) -> bool {
        fs::metadata(&self.dir).is_ok_and(|meta| meta.ino() == self.inode)
    }

    /// Whether the read failed because the device is being removed: its attributes go first.
    pub(crate) fn is_vanishing(&self, error: &Error) -> bool {
        error.kind() == ErrorKind::Vanished || !self.is_there()
    }

    /// The kernel's state; `None` if the device is gone.
    pub fn state(&self) -> Result<Option<State>> {
        let word = sysfs::read_if_there(&self.dir.join("state"))?;
        Ok(word.map(|word| {
            let Ok(state) = word.parse();
            state
        }))
    }

    /// Whether the kernel is deleting the device, or has deleted it.
    pub(crate) fn is_being_deleted(&self) -> Result<bool> {
        let state = self.state()?;
        Ok(state.is_none_or(|state| matches!(state, State::Cancel | State::Deleted)))
    }

    /// Fails unless the device's state lets it serve I/O.
    ///
    /// # Errors
    /// `NotReady`, naming the state; `Vanished`.
    pub(crate) fn require_usable(&self, at: Stage) -> Result<()> {
        let hctl = self.hctl;
        match self.state()?.filter(|_| self.is_there()) {
            Some(now) if now.is_usable() => Ok(()),
            Some(now) => {
                let message = format!("{hctl} is in state {now} and serves no I/O");
                let error = Error::new(ErrorKind::NotReady, message);
                Err(error.at(at).with_path(&self.dir))
            }
            None => {
                let message = format!("the SCSI device {hctl} went away");
                Err(Error::new(ErrorKind::Vanished, message).at(at))
            }
        }
    }

    /// The peripheral device type (SPC-5, 6.6.2).
    pub fn peripheral_type(&self) -> Result<u8> {
        sysfs::parse(&self.dir.join("type"))
    }

    /// The peripheral qualifier in the INQUIRY data from the kernel's scan of the device
    /// (SPC-5, 6.7.2). 0 means that a unit is connected. No driver serves a device with
    /// another qualifier (`drivers/scsi/scsi_sysfs.c`, `scsi_bus_match`), so it has no
    /// disk. The result is also 0 if the kernel shows no such data.
    pub(crate) fn qualifier(&self) -> Result<u8> {
        match sysfs::read_bytes(&self.dir.join("inquiry")) {
            Ok(data) => Ok(data.first().map_or(0, |first| first >> 5)),
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Whether the unit has target port groups, and so ALUA access states, by the INQUIRY
    /// data from the kernel's scan of the device (the TPGS field, SPC-5, 6.7.2). `false`
    /// also if the kernel shows no such data.
    pub(crate) fn has_port_groups(&self) -> Result<bool> {
        const TPGS: u8 = 0x30;
        match sysfs::read_bytes(&self.dir.join("inquiry")) {
            Ok(data) => Ok(data.get(5).is_some_and(|flags| flags & TPGS != 0)),
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The state of the device's target port that the kernel's ALUA handler last saw. It refuses
    /// commands by that state. This look sends no command; it is `None` also if no handler is
    /// attached.
    pub(crate) fn known_access_state(&self) -> Result<Option<AccessState>> {
        match sysfs::read_if_there(&self.dir.join("access_state")) {
            // The kernel returns EINVAL if the device's handler knows no such state.
            Err(error) if error.kind() == ErrorKind::Refused => Ok(None),
            name => Ok(name?.as_deref().and_then(AccessState::of_name)),
        }
    }

    /// Whether the kernel's ALUA handler last saw the device's target port in transition.
    pub(crate) fn was_in_transition(&self) -> Result<bool> {
        Ok(self.known_access_state()? == Some(AccessState::Transitioning))
    }

    /// Whether the disk driver serves this type of device: direct access, RBC and zoned
    /// (`drivers/scsi/sd.c`, `sd_probe`).
    pub fn is_disk(&self) -> Result<bool> {
        Ok(matches!(self.peripheral_type()?, 0x00 | 0x07 | 0x0e | 0x14))
    }

    /// The kernel's cached name for the unit. It is as old as the last scan or rescan, and
    /// no proof of identity.
    pub fn cached_wwid(&self) -> Result<Option<String>> {
        match sysfs::read_if_there(&self.dir.join("wwid")) {
            // The kernel returns ENXIO without a name, and EINVAL if page 83h is malformed.
            Err(error) if error.kind() == ErrorKind::Refused => Ok(None),
            result => result,
        }
    }

    /// The names in the kernel's copies of pages 83h and 80h. They are as old as the last
    /// scan or rescan, and no proof of identity. Empty if the kernel has read neither page.
    pub fn cached_identity(&self) -> Result<Identity> {
        Identity::read(self)
    }

    /// The device's disk; `None` if the driver has not created it yet, or if this instance of
    /// the device is gone.
    pub fn disk(&self) -> Result<Option<BlockDevice>> {
        if !self.is_there() {
            return Ok(None);
        }
        let parent = self.dir.join("block");
        match sysfs::names(&parent)?.first() {
            Some(name) => BlockDevice::at(&parent.join(name)),
            None => Ok(None),
        }
    }

    /// One line about the visible state, for the error of a timeout.
    pub(crate) fn describe(&self) -> String {
        if !self.is_there() {
            return "the SCSI device is gone".to_owned();
        }
        let state = self.state().ok().flatten();
        let state = state.as_ref().map_or("unreadable", State::as_str);
        let driver = fs::read_link(self.dir.join("driver")).ok();
        let driver = driver
            .as_deref()
            .and_then(Path::file_name)
            .and_then(|name| name.to_str())
            .unwrap_or("none (is the sd module loaded?)");
        let disk = self.disk().ok().flatten();
        let disk = disk.as_ref().map_or("none", BlockDevice::name);
        let transition = match self.was_in_transition() {
            Ok(true) => ", ALUA access state transitioning",
            _ => "",
        };
        format!("SCSI state={state}, driver {driver}, disk {disk}{transition}")
    }
}

/// Reads the kernel's copies of the pages.
impl Pages for ScsiDevice {
    fn vpd(&self, code: u8) -> Result<Option<Vec<u8>>> {
        match sysfs::read_bytes(&self.dir.join(format!("vpd_pg{code:x}"))) {
            Ok(page) => Ok(Some(page)),
            // The file is absent if the device had no such page when it was added. The
            // kernel returns EINVAL if the device has lost the page since.
            Err(error) if matches!(error.kind(), ErrorKind::Vanished | ErrorKind::Refused) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn product(&self) -> Result<String> {
        let text = |name| sysfs::read(&self.dir.join(name));
        Ok(format!("{:<8}{:<16}", text("vendor")?, text("model")?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_being_deleted_from_its_cancel_until_it_shows_no_state_any_more() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/devices/2:0:0:1");
        fs::create_dir_all(&dir).unwrap();
        let device = ScsiDevice::at("2:0:0:1".parse().unwrap(), dir.clone()).unwrap();
        assert!(device.is_being_deleted().unwrap());
        for (state, expected) in [
            ("running", false),
            ("created", false),
            ("transport-offline", false),
            ("cancel", true),
            ("deleted", true),
        ] {
            fs::write(dir.join("state"), format!("{state}\n")).unwrap();
            assert_eq!(device.is_being_deleted().unwrap(), expected, "{state}");
        }
    }
}
