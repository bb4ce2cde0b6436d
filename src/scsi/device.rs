//! A SCSI device as sysfs shows it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::cached;
use super::identity::{Identity, Pages};
use super::state::State;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, HostNo, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, sysfs};

/// One life of the SCSI device at an address. A later device at the same address is a
/// different `ScsiDevice`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiDevice {
    hctl: Hctl,
    dir: PathBuf,
    /// The inode number of the sysfs directory, which kernfs does not share between
    /// directories.
    inode: u64,
}

/// Fails unless the host exists.
///
/// # Errors
/// `NoSuchHost`, naming the hosts that exist.
pub(crate) fn require_host(roots: &Roots, host: HostNo) -> Result<()> {
    let hosts = roots.sysfs.join("class/scsi_host");
    if hosts.join(format!("host{host}")).exists() {
        return Ok(());
    }
    let there = sysfs::names(&hosts)?;
    let there = if there.is_empty() {
        "no SCSI host at all".to_owned()
    } else {
        there.join(", ")
    };
    let message = format!("there is no SCSI host {host}; this machine has {there}");
    Err(Error::new(ErrorKind::NoSuchHost, message)
        .at(Stage::Resolve)
        .with_path(hosts))
}

/// The SCSI hosts, without those of one driver.
///
/// # Errors
/// Those of listing the hosts.
#[cfg(feature = "journal")]
pub(crate) fn hosts_but_of(roots: &Roots, driver: &str) -> Result<Vec<HostNo>> {
    let class = roots.sysfs.join("class/scsi_host");
    let mut hosts = Vec::new();
    for name in sysfs::names(&class)? {
        let number = name.strip_prefix("host");
        let number: Option<HostNo> = number.and_then(|text| text.parse().ok());
        let of = sysfs::read_if_there(&class.join(&name).join("proc_name"))?;
        if of.as_deref() != Some(driver) {
            hosts.extend(number);
        }
    }
    Ok(hosts)
}

impl ScsiDevice {
    /// The device at this address; `None` if there is none.
    pub fn find(roots: &Roots, hctl: Hctl) -> Result<Option<Self>> {
        let link = roots.sysfs.join("bus/scsi/devices").join(hctl.to_string());
        match sysfs::follow(&link)? {
            Some(dir) => Ok(Self::at(hctl, dir)),
            None => Ok(None),
        }
    }

    /// The device below this disk; `None` if the disk is gone.
    ///
    /// # Errors
    /// `NotSupported` if the disk is not a SCSI disk.
    pub fn of_disk(disk: &BlockDevice) -> Result<Option<Self>> {
        let Some(dir) = sysfs::follow(&disk.dir().join("device"))? else {
            // A disk that is being removed loses its number first, and then this link
            // (`drivers/base/core.c`, `device_del`).
            return match BlockDevice::at(disk.dir())? {
                Some(_) => Err(not_scsi(disk)),
                None => Ok(None),
            };
        };
        let name = dir.file_name().and_then(|name| name.to_str());
        match name.and_then(|name| name.parse().ok()) {
            Some(hctl) => Ok(Self::at(hctl, dir)),
            None => Err(not_scsi(disk)),
        }
    }

    /// All devices, in the order of their addresses.
    pub fn all(roots: &Roots) -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        let bus = roots.sysfs.join("bus/scsi/devices");
        for name in sysfs::names(&bus)? {
            // The bus lists hosts and targets too.
            if let Ok(hctl) = name.parse()
                && let Some(dir) = sysfs::follow(&bus.join(name))?
            {
                devices.extend(Self::at(hctl, dir));
            }
        }
        devices.sort_by_key(|device| device.hctl);
        Ok(devices)
    }

    /// The devices whose units may have a wanted name, by the strongest name in the
    /// kernel's copies, in the order of their addresses. A device of which the kernel has
    /// read no name is one of them. A device of another name costs three system calls.
    pub(crate) fn candidates(
        roots: &Roots,
        is_wanted: impl Fn(&Wwid) -> bool,
    ) -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        let bus = roots.sysfs.join("bus/scsi/devices");
        for hctl in cached::addresses_that_may_be(&bus, is_wanted)? {
            if let Some(dir) = sysfs::follow(&bus.join(hctl.to_string()))? {
                devices.extend(Self::at(hctl, dir));
            }
        }
        Ok(devices)
    }

    /// The devices that the kernel is removing, whichever process asked for it. They are
    /// off the bus, and the last write and the SYNCHRONIZE CACHE of their disk are still to
    /// come (`drivers/base/core.c`, `device_del`). Their identity can no longer be read. A
    /// device that is just being added looks the same, until it
    /// [is on the bus](Self::is_on_bus).
    pub(crate) fn being_removed(roots: &Roots) -> Result<Vec<Self>> {
        let bus = roots.sysfs.join("bus/scsi/devices");
        let on_bus: BTreeSet<String> = sysfs::names(&bus)?.into_iter().collect();
        let mut being_removed = Vec::new();
        for target in on_bus.iter().filter(|name| name.starts_with("target")) {
            let Some(target) = sysfs::follow(&bus.join(target))? else {
                continue;
            };
            for name in sysfs::names(&target)? {
                if let Ok(hctl) = name.parse::<Hctl>()
                    && !on_bus.contains(&name)
                    && !bus.join(&name).exists()
                {
                    being_removed.extend(Self::at(hctl, target.join(name)));
                }
            }
        }
        Ok(being_removed)
    }

    /// How many commands have returned with an error, refusals included, since the device
    /// was scanned (`drivers/scsi/scsi_lib.c`, `ioerr_cnt`); `None` if the count cannot be
    /// read.
    pub(crate) fn failed_commands(&self) -> Option<u64> {
        let count = sysfs::read(&self.dir.join("ioerr_cnt")).ok()?;
        u64::from_str_radix(count.strip_prefix("0x")?, 16).ok()
    }

    /// The other devices of the same target.
    pub(crate) fn siblings(&self) -> Result<Vec<Self>> {
        let Some(target) = self.dir.parent() else {
            return Ok(Vec::new());
        };
        let names = sysfs::names(target)?;
        let others = names.iter().filter_map(|name| name.parse().ok());
        let others = others.filter(|&hctl: &Hctl| hctl != self.hctl);
        Ok(others
            .filter_map(|hctl| Self::at(hctl, target.join(hctl.to_string())))
            .collect())
    }

    /// The [`siblings`](Self::siblings) whose unit may have the wanted name, as in
    /// [`candidates`](Self::candidates).
    pub(crate) fn sibling_candidates(&self, wanted: &Wwid) -> Result<Vec<Self>> {
        let Some(target) = self.dir.parent() else {
            return Ok(Vec::new());
        };
        let found = cached::addresses_that_may_be(target, |name| name == wanted)?;
        let others = found.into_iter().filter(|&hctl| hctl != self.hctl);
        Ok(others
            .filter_map(|hctl| Self::at(hctl, target.join(hctl.to_string())))
            .collect())
    }

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

    /// Whether the bus lists this life of the device. It does so from a moment after the
    /// directory appears until the removal begins, and never again after that
    /// (`drivers/base/core.c`, `device_add` and `device_del`).
    pub(crate) fn is_on_bus(&self, roots: &Roots) -> bool {
        let link = roots.sysfs.join("bus/scsi/devices");
        fs::metadata(link.join(self.hctl.to_string())).is_ok_and(|meta| meta.ino() == self.inode)
    }

    /// Whether sysfs still shows this life of the device.
    #[must_use]
    pub fn is_there(&self) -> bool {
        fs::metadata(&self.dir).is_ok_and(|meta| meta.ino() == self.inode)
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

    /// Whether the kernel's ALUA handler last saw the device's target port in transition.
    /// This check sends no command; it is `false` also if no handler is attached.
    pub(crate) fn was_in_transition(&self) -> Result<bool> {
        match sysfs::read_if_there(&self.dir.join("access_state")) {
            // The kernel returns EINVAL if the device's handler knows no such state.
            Err(error) if error.kind() == ErrorKind::Refused => Ok(false),
            state => Ok(state?.as_deref() == Some("transitioning")),
        }
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

    /// The device's disk; `None` if the driver has not created it yet, or if this life of
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

fn not_scsi(disk: &BlockDevice) -> Error {
    let message = format!("{} is not a SCSI disk", disk.name());
    Error::new(ErrorKind::NotSupported, message).with_path(disk.dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_loses_its_device_is_gone_and_one_that_never_had_one_is_no_scsi_disk() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/devices/virtual/block/dm-0");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("dev"), "253:0\n").unwrap();
        let disk = BlockDevice::at(&dir).unwrap().unwrap();
        let error = ScsiDevice::of_disk(&disk).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
        fs::remove_file(dir.join("dev")).unwrap();
        assert_eq!(ScsiDevice::of_disk(&disk).unwrap(), None);
    }

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
