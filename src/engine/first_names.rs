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

/// The file `run/lunbd/names-H:C:T:L`: the instance of the disk, then one name a line.
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
        let mut lines = text.lines();
        if lines.next() != Some(self.instance.as_str()) {
            return Ok(Identity::default());
        }
        let names = lines.filter_map(|name| name.parse::<Wwid>().ok());
        Ok(Identity::of(names))
    }

    /// Writes the names to the file, unless the file has names of this disk already.
    ///
    /// # Errors
    /// Those of writing a file: without the names a later attach could return another unit.
    pub(super) fn write_if_absent(&self, identity: &Identity) -> Result<()> {
        let is_gone = || !self.disk.dir().exists();
        if is_gone()
            || identity.names.is_empty()
            || self.read().is_ok_and(|first| !first.names.is_empty())
        {
            return Ok(());
        }
        let names = identity.names.iter().map(Wwid::to_string);
        let lines: Vec<String> = [self.instance.clone()].into_iter().chain(names).collect();
        let text = lines.join("\n") + "\n";
        self.path.parent().map_or(Ok(()), run_dir::make)?;
        replace(&self.path, text.as_bytes())
            .map_err(|error| Error::io("cannot write", &self.path, &error))
    }
}

/// Writes a record beside its place and renames it: a killed process leaves no half of one.
fn replace(path: &Path, record: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("unwritten");
    fs::write(&beside, record)?;
    fs::rename(&beside, path)
}

/// Removes the record of a device that is about to be deleted.
pub(super) fn forget(roots: &Roots, hctl: Hctl) {
    let _never_written = fs::remove_file(path(roots, hctl));
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
    let path = path(roots, hctl);
    let record = fs::read(&path);
    forget(roots, hctl);
    let deleted = delete();
    let is_refused = |error: &Error| {
        let kinds = [ErrorKind::Quarantined, ErrorKind::NotPermitted];
        error.stage() == Some(Stage::Queue) || kinds.contains(&error.kind())
    };
    if let (Err(error), Ok(record)) = (&deleted, record)
        && is_refused(error)
        && let Err(failure) = replace(&path, &record)
    {
        tracing::error!(%hctl, %failure, "cannot restore the names of a disk that stays");
    }
    deleted
}

/// Removes the records of addresses without a device, which the kernel removed.
pub(super) fn forget_removed(roots: &Roots) {
    for name in sysfs::names(&run_dir::path(roots)).unwrap_or_default() {
        let hctl = name.strip_prefix(PREFIX).and_then(|hctl| hctl.parse().ok());
        if let Some(hctl) = hctl
            && matches!(ScsiDevice::find(roots, hctl), Ok(None))
        {
            forget(roots, hctl);
        }
    }
}

const PREFIX: &str = "names-";

fn path(roots: &Roots, hctl: Hctl) -> PathBuf {
    run_dir::path(roots).join(format!("{PREFIX}{hctl}"))
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
    }
}
