//! The names that a disk had when an attach first returned it.
//!
//! After a rescan the kernel's copy of a unit's names is that of the unit that answers now.
//! udev's record keeps the old names until udev handles the disk again, as it does where
//! the rescan found another size. Users of the disk, such as a mounted file system, still
//! have the old unit's data. So an attach writes down the names that it read.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::deadline::Deadline;
use crate::engine::lock::run_dir;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, machine, sysfs};
use crate::scsi::{Identity, ScsiDevice};

/// The file `run/lunbd/names-H:C:T:L`: the instance of the disk, then one name a line. For the
/// strongest name and each unique one there is an empty file `names-H:C:T:L.DIGEST` beside it. So
/// one listing of the folder finds the disks that were first a unit with a wanted name.
pub(super) struct FirstNames {
    path: PathBuf,
    instance: String,
    disk: BlockDevice,
}

impl FirstNames {
    pub(super) fn of(roots: &Roots, hctl: Hctl, disk: &BlockDevice) -> Result<Self> {
        // `/run` of a container may outlive a boot, and sequence numbers begin again.
        let boot = machine::boot_id(roots).unwrap_or_default();
        let (path, instance) = (path(roots, hctl), format!("{} {boot}", disk.instance()?));
        let disk = disk.clone();
        Ok(Self {
            path,
            instance,
            disk,
        })
    }

    /// The names; none if no attach has returned this disk.
    pub(super) fn read(&self) -> Result<Identity> {
        let text = sysfs::read_if_there(&self.path)?.unwrap_or_default();
        if text.lines().next() != Some(self.instance.as_str()) {
            return Ok(Identity::default());
        }
        Ok(names_in(&text))
    }

    /// Writes the names to the file, unless the file has names of this disk already.
    ///
    /// # Errors
    /// Those of writing a file: without the names a later attach could return another unit.
    pub(super) fn write_if_absent(&self, identity: &Identity) -> Result<()> {
        if !self.disk.dir().exists() || identity.names.is_empty() {
            return Ok(());
        }
        let first = self.read().unwrap_or_default();
        let first = if first.names.is_empty() {
            self.write(identity)?;
            identity
        } else {
            &first
        };
        // A process that was killed may have written the names alone.
        for digest in digests(&self.path, first) {
            fs::write(&digest, "").map_err(|error| Error::io("cannot write", &digest, &error))?;
        }
        Ok(())
    }

    fn write(&self, identity: &Identity) -> Result<()> {
        let names = identity.names.iter().map(Wwid::to_string);
        let lines: Vec<String> = [self.instance.clone()].into_iter().chain(names).collect();
        let text = lines.join("\n") + "\n";
        self.path.parent().map_or(Ok(()), run_dir::make)?;
        replace(&self.path, text.as_bytes())
            .map_err(|error| Error::io("cannot write", &self.path, &error))
    }
}

/// The names in the text of a record.
fn names_in(text: &str) -> Identity {
    let names = text.lines().skip(1);
    Identity::of(names.filter_map(|name| name.parse::<Wwid>().ok()))
}

/// The empty files beside the record at `path` that has these names.
fn digests(path: &Path, names: &Identity) -> Vec<PathBuf> {
    let strongest = names.wwid();
    let wanted = names.names.iter();
    let wanted = wanted.filter(|name| name.is_unique() || Some(*name) == strongest);
    wanted
        .map(|name| path.with_extension(digest(name)))
        .collect()
}

fn digest(name: &Wwid) -> String {
    format!("{:016x}", name.digest())
}

/// The devices whose record may have one of these names, if that is unique or the strongest one.
/// Those that are `known` already are left out. It is cheap and proves nothing.
pub(super) fn devices_with(
    roots: &Roots,
    names: &[Wwid],
    known: &[ScsiDevice],
) -> Result<Vec<ScsiDevice>> {
    let wanted: Vec<String> = names.iter().map(digest).collect();
    let mut devices = Vec::new();
    if wanted.is_empty() {
        return Ok(devices);
    }
    for file in sysfs::names(&run_dir::path(roots))? {
        if let Some((hctl, digest)) = address_of(&file)
            && wanted.iter().any(|wanted| wanted == digest)
            && known.iter().all(|known| known.hctl() != hctl)
        {
            devices.extend(ScsiDevice::find(roots, hctl)?);
        }
    }
    devices.dedup();
    Ok(devices)
}

/// The unit that the device's disk was when an attach first returned it, if the kernel's copy
/// is not of that unit any more.
///
/// # Errors
/// If the record, or the instance of the disk, cannot be read.
pub(super) fn earlier_unit(
    roots: &Roots,
    device: &ScsiDevice,
    cached: &Identity,
) -> Result<Option<Identity>> {
    let text = sysfs::read_if_there(&path(roots, device.hctl()))?.unwrap_or_default();
    let names = names_in(&text);
    if names.names.is_empty() || names.compare(cached).is_same() {
        return Ok(None);
    }
    let Some(disk) = device.disk()? else {
        return Ok(None);
    };
    // The record may be of an earlier disk.
    let first = FirstNames::of(roots, device.hctl(), &disk).and_then(|record| record.read());
    match first {
        Err(error) if error.kind() == ErrorKind::Vanished => Ok(None),
        first => Ok(Some(first?).filter(|first| !first.names.is_empty())),
    }
}

/// Writes a record beside its place and renames it: a killed process leaves no half of one.
fn replace(path: &Path, record: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("unwritten");
    fs::write(&beside, record)?;
    fs::rename(&beside, path)
}

/// Removes the record of a device that is about to be deleted, and returns its text.
pub(super) fn forget(roots: &Roots, hctl: Hctl) -> Option<String> {
    let path = path(roots, hctl);
    let text = String::from_utf8(sysfs::read_bytes(&path).ok()?).ok()?;
    for file in digests(&path, &names_in(&text)).iter().chain([&path]) {
        let _another_removed_it = fs::remove_file(file);
    }
    Some(text)
}

/// Removes the record of a device and deletes it. If the delete has not begun, the record stays:
/// the disk may have users later, and another unit may have its address by then.
pub(super) fn forget_if_deleted(
    roots: &Roots,
    hctl: Hctl,
    deadline: Deadline,
    delete: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if deadline.has_passed() {
        return delete();
    }
    let record = forget(roots, hctl);
    let deleted = delete();
    let is_refused = |error: &Error| {
        let kinds = [ErrorKind::Quarantined, ErrorKind::NotPermitted];
        error.stage() == Some(Stage::Queue) || kinds.contains(&error.kind())
    };
    if let (Err(error), Some(record)) = (&deleted, record)
        && is_refused(error)
        && let Err(failure) = restore(&path(roots, hctl), &record)
    {
        tracing::error!(%hctl, %failure, "cannot restore the names of a disk that stays");
    }
    deleted
}

/// Writes a record again as it was.
fn restore(path: &Path, record: &str) -> io::Result<()> {
    replace(path, record.as_bytes())?;
    for digest in digests(path, &names_in(record)) {
        fs::write(digest, "")?;
    }
    Ok(())
}

/// Removes the records of addresses without a device, which the kernel removed.
pub(super) fn forget_removed(roots: &Roots) {
    let folder = run_dir::path(roots);
    for file in sysfs::names(&folder).unwrap_or_default() {
        if let Some((hctl, _)) = address_of(&file)
            && matches!(ScsiDevice::find(roots, hctl), Ok(None))
        {
            let _another_removed_it = fs::remove_file(folder.join(file));
        }
    }
}

const PREFIX: &str = "names-";

fn path(roots: &Roots, hctl: Hctl) -> PathBuf {
    run_dir::path(roots).join(format!("{PREFIX}{hctl}"))
}

/// The address in the name of a record's file, and what follows it.
fn address_of(file: &str) -> Option<(Hctl, &str)> {
    let name = file.strip_prefix(PREFIX)?;
    let (hctl, digest) = name.split_once('.').unwrap_or((name, ""));
    Some((hctl.parse().ok()?, digest))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_names_of_a_disk_whose_delete_did_not_begin_stay() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let hctl: Hctl = "2:0:0:1".parse().unwrap();
        let file = path(&roots, hctl);
        fs::create_dir_all(run_dir::path(&roots)).unwrap();
        let left_by = |deleted: Result<()>| {
            fs::write(&file, "names").unwrap();
            let deadline = Deadline::after(Duration::from_secs(30));
            let _failed = forget_if_deleted(&roots, hctl, deadline, || {
                assert!(!file.exists(), "a killed process leaves no record");
                deleted
            });
            fs::read_to_string(&file).ok()
        };
        let failure = |kind, stage| Err(Error::new(kind, "no").at(stage));
        let stays = Some("names".to_owned());
        assert_eq!(left_by(failure(ErrorKind::TimedOut, Stage::Queue)), stays);
        assert_eq!(
            left_by(failure(ErrorKind::Quarantined, Stage::Delete)),
            stays
        );
        assert_eq!(
            left_by(failure(ErrorKind::NotPermitted, Stage::Delete)),
            stays
        );
        let passed = Deadline::after(Duration::ZERO);
        let late = failure(ErrorKind::TimedOut, Stage::Delete);
        assert!(forget_if_deleted(&roots, hctl, passed, || late).is_err());
        assert!(file.exists());
        assert_eq!(left_by(failure(ErrorKind::TimedOut, Stage::Delete)), None);
        assert_eq!(left_by(Ok(())), None);
    }

    #[test]
    fn the_first_names_hold_for_one_life_of_the_disk_and_end_with_its_device() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let dir = roots.sysfs.join("block/sda");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("dev"), "8:0\n").unwrap();
        let disk = BlockDevice::at(&dir).unwrap().unwrap();
        let hctl: Hctl = "2:0:0:1".parse().unwrap();
        let names = |name: &str| Identity::of([name.parse::<Wwid>().unwrap()]);
        let (first, second) = (names("naa.5000c500a1b2c3d4"), names("naa.5000c500a1b2c3d5"));
        let of_instance = |instance: &str| {
            fs::write(dir.join("diskseq"), instance).unwrap();
            FirstNames::of(&roots, hctl, &disk).unwrap()
        };
        let seventh = of_instance("7\n");
        assert_eq!(seventh.read().unwrap(), Identity::default());
        seventh.write_if_absent(&first).unwrap();
        seventh.write_if_absent(&second).unwrap();
        assert_eq!(seventh.read().unwrap(), first);
        let eighth = of_instance("8\n");
        assert_eq!(eighth.read().unwrap(), Identity::default());
        eighth.write_if_absent(&second).unwrap();
        assert_eq!(eighth.read().unwrap(), second);
        let boot = roots.proc.join("sys/kernel/random");
        fs::create_dir_all(&boot).unwrap();
        fs::write(boot.join("boot_id"), "another\n").unwrap();
        assert_eq!(of_instance("8\n").read().unwrap(), Identity::default());
        let device = roots.sysfs.join("bus/scsi/devices/2:0:0:1");
        fs::create_dir_all(&device).unwrap();
        forget_removed(&roots);
        assert_eq!(eighth.read().unwrap(), second);
        fs::remove_dir(&device).unwrap();
        forget_removed(&roots);
        assert_eq!(eighth.read().unwrap(), Identity::default());
        assert_eq!(fs::read_dir(run_dir::path(&roots)).unwrap().count(), 0);
    }

    #[test]
    fn the_disk_that_was_first_a_unit_is_found_by_each_unique_name_until_its_record_goes() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let hctl: Hctl = "2:0:0:1".parse().unwrap();
        let device = roots.sysfs.join("devices/2:0:0:1");
        let block = device.join("block/sda");
        fs::create_dir_all(&block).unwrap();
        fs::write(block.join("dev"), "8:0\n").unwrap();
        let bus = roots.sysfs.join("bus/scsi/devices");
        fs::create_dir_all(&bus).unwrap();
        std::os::unix::fs::symlink(&device, bus.join("2:0:0:1")).unwrap();
        let device = ScsiDevice::find(&roots, hctl).unwrap().unwrap();
        let disk = device.disk().unwrap().unwrap();
        let name = |name: &str| name.parse::<Wwid>().unwrap();
        let (naa, eui, text) = (
            name("naa.5000c500a1b2c3d4"),
            name("eui.002538a1b2c3d4e5"),
            name("t10.VENDOR_x"),
        );
        let first = Identity::of([naa.clone(), eui.clone(), text.clone()]);
        let record = FirstNames::of(&roots, hctl, &disk).unwrap();
        let found = |name: &Wwid| {
            let found = devices_with(&roots, std::slice::from_ref(name), &[]).unwrap();
            found.len()
        };
        let look = || [&naa, &eui, &text, &name("naa.5000c500a1b2c3d5")].map(found);
        assert_eq!(look(), [0; 4]);
        record.write_if_absent(&first).unwrap();
        assert_eq!(look(), [1, 1, 0, 0]);
        // As if the process had been killed before it wrote the others.
        fs::remove_file(&digests(&record.path, &first)[1]).unwrap();
        record
            .write_if_absent(&Identity::of([text.clone()]))
            .unwrap();
        assert_eq!(look(), [1, 1, 0, 0]);

        let earlier = |cached: &[&Wwid]| {
            let cached = Identity::of(cached.iter().copied().cloned());
            earlier_unit(&roots, &device, &cached).unwrap()
        };
        assert_eq!(earlier(&[&naa]), None);
        assert_eq!(earlier(&[]), Some(first.clone()));
        let other = name("naa.5000c500a1b2c3d5");
        assert_eq!(earlier(&[&other]), Some(first));
        // The record is of an earlier disk.
        fs::write(block.join("diskseq"), "9\n").unwrap();
        assert_eq!(earlier(&[&other]), None);

        let deadline = Deadline::after(Duration::from_secs(30));
        let refuse = || Err(Error::new(ErrorKind::Quarantined, "no"));
        assert!(forget_if_deleted(&roots, hctl, deadline, refuse).is_err());
        assert_eq!(look(), [1, 1, 0, 0]);
        forget(&roots, hctl);
        assert_eq!(look(), [0; 4]);
        // The strongest name of a unit without a unique one.
        let record = FirstNames::of(&roots, hctl, &disk).unwrap();
        record
            .write_if_absent(&Identity::of([text.clone()]))
            .unwrap();
        assert_eq!(look(), [0, 0, 1, 0]);
        forget(&roots, hctl);
        assert_eq!(fs::read_dir(run_dir::path(&roots)).unwrap().count(), 0);
    }
}
