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

/// One life of the SCSI device at an address. When it is deleted and another
/// comes at the same address, that is another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiDevice {
    hctl: Hctl,
    dir: PathBuf,
    /// kernfs gives each directory an inode number of its own.
    inode: u64,
}

/// Makes sure that the host exists.
///
/// # Errors
/// `NoSuchHost`, naming the hosts that there are.
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

/// The SCSI hosts, but those of one driver.
///
/// # Errors
/// Where they cannot be listed.
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
    /// The device at this address; `None` where there is none.
    pub fn find(roots: &Roots, hctl: Hctl) -> Result<Option<Self>> {
        let link = roots.sysfs.join("bus/scsi/devices").join(hctl.to_string());
        match sysfs::follow(&link)? {
            Some(dir) => Ok(Self::at(hctl, dir)),
            None => Ok(None),
        }
    }

    /// The device below this disk; `None` where the disk is gone.
    ///
    /// # Errors
    /// `NotSupported` where the disk is not a SCSI disk.
    pub fn of_disk(disk: &BlockDevice) -> Result<Option<Self>> {
        let Some(dir) = sysfs::follow(&disk.dir().join("device"))? else {
            // One that goes loses its number first, and then this link
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
            // Hosts and targets are listed there too.
            if let Ok(hctl) = name.parse()
                && let Some(dir) = sysfs::follow(&bus.join(name))?
            {
                devices.extend(Self::at(hctl, dir));
            }
        }
        devices.sort_by_key(|device| device.hctl);
        Ok(devices)
    }

    /// The devices of units that may have one of the wanted names, by the strongest
    /// name in the kernel's copies, in the order of their addresses. Those of which the
    /// kernel has read no name are among them. One of another name costs three system
    /// calls.
    pub(crate) fn all_that_may_be(
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

    /// The devices that the kernel is taking away, by whosever hand: they are off
    /// the bus, and their disk's last write and SYNCHRONIZE CACHE are still to come
    /// (`drivers/base/core.c`, `device_del`). Who they are cannot be read any more.
    /// One that is just coming looks the same, until it [is on the
    /// bus](Self::is_on_bus).
    pub(crate) fn leaving(roots: &Roots) -> Result<Vec<Self>> {
        let bus = roots.sysfs.join("bus/scsi/devices");
        let on_bus: BTreeSet<String> = sysfs::names(&bus)?.into_iter().collect();
        let mut leaving = Vec::new();
        for target in on_bus.iter().filter(|name| name.starts_with("target")) {
            let Some(target) = sysfs::follow(&bus.join(target))? else {
                continue;
            };
            for name in sysfs::names(&target)? {
                if let Ok(hctl) = name.parse::<Hctl>()
                    && !on_bus.contains(&name)
                    && !bus.join(&name).exists()
                {
                    leaving.extend(Self::at(hctl, target.join(name)));
                }
            }
        }
        Ok(leaving)
    }

    /// How many commands have come back with an error, refusals included, since
    /// the device was scanned (`drivers/scsi/scsi_lib.c`, `ioerr_cnt`); `None`
    /// where it cannot be read.
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

    /// Those of [`siblings`](Self::siblings) whose unit may have the wanted name,
    /// as [`all_that_may_be`](Self::all_that_may_be).
    pub(crate) fn siblings_that_may_be(&self, wanted: &Wwid) -> Result<Vec<Self>> {
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

    /// Whether the bus lists this life of the device: from a moment after its
    /// directory has come until its removal begins, and never again after that
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

    /// The kernel's state; `None` where the device is gone.
    pub fn state(&self) -> Result<Option<State>> {
        let word = sysfs::read_if_there(&self.dir.join("state"))?;
        Ok(word.map(|word| {
            let Ok(state) = word.parse();
            state
        }))
    }

    /// Whether the kernel is taking it away, or has.
    pub(crate) fn is_being_deleted(&self) -> Result<bool> {
        let state = self.state()?;
        Ok(state.is_none_or(|state| matches!(state, State::Cancel | State::Deleted)))
    }

    /// Makes sure that the kernel lets it serve I/O.
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

    /// The peripheral qualifier of the INQUIRY data that the kernel read when it scanned
    /// the device (SPC-5, 6.7.2). 0 says that a unit is connected there. No driver serves
    /// a device of another (`drivers/scsi/scsi_sysfs.c`, `scsi_bus_match`), so it has no
    /// disk. 0 too where the kernel shows no such data.
    pub(crate) fn qualifier(&self) -> Result<u8> {
        match sysfs::read_bytes(&self.dir.join("inquiry")) {
            Ok(data) => Ok(data.first().map_or(0, |first| first >> 5)),
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Whether the INQUIRY data that the kernel read when it scanned the device says that
    /// the unit has target port groups (the TPGS field, SPC-5, 6.7.2): whether it has ALUA
    /// access states. `false` too where the kernel shows no such data.
    pub(crate) fn has_port_groups(&self) -> Result<bool> {
        const TPGS: u8 = 0x30;
        match sysfs::read_bytes(&self.dir.join("inquiry")) {
            Ok(data) => Ok(data.get(5).is_some_and(|flags| flags & TPGS != 0)),
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the kernel's ALUA handler has last seen the device's target port in
    /// transition. A look that costs no command: `false` too where no handler is attached.
    pub(crate) fn was_in_transition(&self) -> Result<bool> {
        match sysfs::read_if_there(&self.dir.join("access_state")) {
            // EINVAL where its handler knows no such state.
            Err(error) if error.kind() == ErrorKind::Refused => Ok(false),
            state => Ok(state?.as_deref() == Some("transitioning")),
        }
    }

    /// Whether the disk driver serves this type of device: direct access, RBC
    /// and zoned (`drivers/scsi/sd.c`, `sd_probe`).
    pub fn is_disk(&self) -> Result<bool> {
        Ok(matches!(self.peripheral_type()?, 0x00 | 0x07 | 0x0e | 0x14))
    }

    /// The kernel's cached name for it: as old as the last scan or rescan, and
    /// no proof of identity.
    pub fn cached_wwid(&self) -> Result<Option<String>> {
        match sysfs::read_if_there(&self.dir.join("wwid")) {
            // ENXIO where it has none, EINVAL where page 83h is malformed.
            Err(error) if error.kind() == ErrorKind::Refused => Ok(None),
            result => result,
        }
    }

    /// The names in the kernel's copies of pages 83h and 80h: as old as the last
    /// scan or rescan, and no proof of identity. Empty where the kernel has read
    /// neither.
    pub fn cached_identity(&self) -> Result<Identity> {
        Identity::read(self)
    }

    /// Its block device; `None` where the driver has not brought it yet, and
    /// where this life of the device is gone.
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

    /// One line on what can be seen, for the error of a timeout.
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

/// The kernel's copies.
impl Pages for ScsiDevice {
    fn vpd(&self, code: u8) -> Result<Option<Vec<u8>>> {
        match sysfs::read_bytes(&self.dir.join(format!("vpd_pg{code:x}"))) {
            Ok(page) => Ok(Some(page)),
            // Absent where the device had no such page when it was added, EINVAL
            // where it has lost it since.
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
