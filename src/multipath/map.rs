//! A map as sysfs shows it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::errno::Errno;

use crate::error::{Error, ErrorKind, Result};
use crate::id::Wwid;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, sysfs};

/// The prefix of a map's uuid; the uuid of a map of its partition begins with
/// `part1-mpath-`.
const PREFIX: &str = "mpath-";

/// One instance of a multipath map. A later map with the same name, number or even uuid is a
/// different `Map`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    name: String,
    uuid: String,
    disk: BlockDevice,
    /// The inode number of the sysfs directory, which kernfs does not share between
    /// directories.
    inode: u64,
}

impl Map {
    /// The map that has `path`, a whole disk, as a path; `None` if there is none. Other
    /// devices on the disk or on its partitions do not count.
    pub fn of_path(path: &BlockDevice) -> Result<Option<Self>> {
        for holder in path.holders()? {
            let link = path.dir().join("holders").join(holder);
            if let Some(map) = Self::at_link(&link)? {
                return Ok(Some(map));
            }
        }
        Ok(None)
    }

    /// The map that this disk, a `dm-N`, is; `None` if it is no map.
    pub fn of_disk(disk: &BlockDevice) -> Result<Option<Self>> {
        Self::at(disk.dir())
    }

    /// The map of a partition that this disk, a `dm-N`, is; `None` if it is no such map.
    pub(crate) fn of_partition(disk: &BlockDevice) -> Result<Option<Self>> {
        let is_partition = |uuid: &str| {
            let of = uuid
                .split_once('-')
                .filter(|(kind, _)| kind.starts_with("part"));
            of.is_some_and(|(_, of)| of.starts_with(PREFIX))
        };
        Self::with_uuid(disk.dir(), is_partition)
    }

    /// Whether the device-mapper device of this kernel name is gone or being removed.
    /// During its removal it no longer shows its uuid, and it releases the devices below it
    /// in a moment (`drivers/md/dm.c`, `__dm_destroy`). A device that is just being created
    /// does not show its uuid yet (`dm_setup_md_queue`), and looks the same.
    pub(crate) fn is_being_removed(roots: &Roots, name: &str) -> bool {
        if !name.starts_with("dm-") {
            return false;
        }
        match sysfs::follow(&roots.sysfs.join("block").join(name)) {
            Ok(Some(dir)) => matches!(attribute(&dir, "uuid"), Ok(None)),
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// The map of the unit of this name; `None` if there is none. It finds only the name
    /// from which the map was made, which multipathd chooses for a unit with several names.
    pub fn find(roots: &Roots, wwid: &Wwid) -> Result<Option<Self>> {
        Self::of_unit(roots, |name| name == wwid)
    }

    /// The map of a unit with one of the wanted names. It reads one file of each other map.
    pub(crate) fn of_unit(
        roots: &Roots,
        is_wanted: impl Fn(&Wwid) -> bool,
    ) -> Result<Option<Self>> {
        let disks = roots.sysfs.join("block");
        for name in sysfs::names(&disks)? {
            if !name.starts_with("dm-") {
                continue;
            }
            let link = disks.join(name);
            let name = attribute(&link, "uuid")?.and_then(|uuid| uuid.parse().ok());
            if name.is_some_and(|name| is_wanted(&name))
                && let Some(map) = Self::at_link(&link)?
                && map.wwid().is_some_and(|name| is_wanted(&name))
            {
                return Ok(Some(map));
            }
        }
        Ok(None)
    }

    /// All maps, in the order of their kernel names.
    pub fn all(roots: &Roots) -> Result<Vec<Self>> {
        let disks = roots.sysfs.join("block");
        let mut maps = Vec::new();
        for name in sysfs::names(&disks)? {
            if name.starts_with("dm-") {
                maps.extend(Self::at_link(&disks.join(name))?);
            }
        }
        Ok(maps)
    }

    fn at_link(link: &Path) -> Result<Option<Self>> {
        match sysfs::follow(link)? {
            Some(dir) => Self::at(&dir),
            None => Ok(None),
        }
    }

    fn at(dir: &Path) -> Result<Option<Self>> {
        Self::with_uuid(dir, |uuid| uuid.starts_with(PREFIX))
    }

    fn with_uuid(dir: &Path, is_it: impl Fn(&str) -> bool) -> Result<Option<Self>> {
        // The inode is read first, so that the reads below cannot mix in a later instance.
        let Some(inode) = inode_of(dir) else {
            return Ok(None);
        };
        let Some(uuid) = attribute(dir, "uuid")? else {
            return Ok(None);
        };
        if !is_it(&uuid) {
            return Ok(None);
        }
        let Some(name) = attribute(dir, "name")? else {
            return Ok(None);
        };
        let disk = BlockDevice::at(dir)?;
        let map = disk.map(|disk| Self {
            name,
            uuid,
            disk,
            inode,
        });
        Ok(map.filter(Self::is_there))
    }

    /// The name below `/dev/mapper`, which multipathd calls the alias.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The uuid of device-mapper, `mpath-36001405...`.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The name of the unit from which the map was made; `None` if it is of a kind that
    /// this crate does not know.
    #[must_use]
    pub fn wwid(&self) -> Option<Wwid> {
        let of_whole = self.uuid.find(PREFIX).and_then(|at| self.uuid.get(at..));
        of_whole?.parse().ok()
    }

    /// Its block device.
    #[must_use]
    pub fn disk(&self) -> &BlockDevice {
        &self.disk
    }

    /// The disks that lead to the unit now, in any state.
    pub fn paths(&self) -> Result<Vec<BlockDevice>> {
        let slaves = self.disk.dir().join("slaves");
        let mut paths = Vec::new();
        for name in sysfs::names(&slaves)? {
            if let Some(dir) = sysfs::follow(&slaves.join(name))? {
                paths.extend(BlockDevice::at(&dir)?);
            }
        }
        Ok(paths)
    }

    /// The maps of its partitions, which kpartx makes. Their uuids are `partN-` and this
    /// map's uuid.
    pub(crate) fn partition_maps(&self) -> Result<Vec<Self>> {
        let is_partition = |uuid: &str| {
            let (kind, of) = uuid.split_once('-').unwrap_or_default();
            kind.starts_with("part") && of == self.uuid
        };
        let mut maps = Vec::new();
        for holder in self.disk.holders()? {
            let link = self.disk.dir().join("holders").join(holder);
            if let Some(dir) = sysfs::follow(&link)? {
                maps.extend(Self::with_uuid(&dir, is_partition)?);
            }
        }
        Ok(maps)
    }

    /// Whether sysfs still shows this instance of the map.
    #[must_use]
    pub fn is_there(&self) -> bool {
        inode_of(self.disk.dir()) == Some(self.inode)
    }

    /// # Errors
    /// `Vanished` if this instance of the map is over.
    pub(crate) fn require(&self) -> Result<()> {
        if self.is_there() {
            return Ok(());
        }
        let message = format!("the map {self} went away");
        Err(Error::new(ErrorKind::Vanished, message).with_path(self.disk.dir()))
    }

    /// One line about the visible state, for the error of a timeout.
    pub(crate) fn describe(&self) -> String {
        if !self.is_there() {
            return format!("the map {self} is gone");
        }
        let suspended = self.disk.dir().join("dm/suspended");
        let suspended = sysfs::read_if_there(&suspended).ok().flatten();
        let suspended = suspended.as_deref().unwrap_or("unreadable");
        let paths = sysfs::names(&self.disk.dir().join("slaves"));
        let paths = paths.unwrap_or_default().join(" ");
        let disk = self.disk.describe();
        format!("{disk} suspended={suspended} paths={paths}")
    }
}

impl std::fmt::Display for Map {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.disk.name(), self.uuid)
    }
}

/// The attribute of the map in `dir`; `None` if the map is gone or being removed. During a
/// removal a read of an existing attribute fails with `EINVAL`, and a read that began
/// before with `EIO` (`drivers/md/dm-sysfs.c`, `dm_attr_show`, `dm_attr_uuid_show`).
fn attribute(dir: &Path, name: &str) -> Result<Option<String>> {
    let is_removed = |error: &Error| {
        let errno = error.errno().map(Errno::from_raw);
        matches!(errno, Some(Errno::EINVAL | Errno::EIO))
    };
    match sysfs::read_if_there(&dir.join("dm").join(name)) {
        Err(error) if is_removed(&error) => Ok(None),
        answer => answer,
    }
}

fn inode_of(dir: &Path) -> Option<u64> {
    fs::metadata(dir).ok().map(|metadata| metadata.ino())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const UUID: &str = "mpath-360014051234567890abcdef012345678";

    /// A machine where `dm-0` with this uuid has the path `sda`.
    fn machine(uuid: &str) -> (tempfile::TempDir, Roots) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        for (file, text) in [
            ("sys/devices/dm-0/dev", "254:0\n"),
            ("sys/devices/dm-0/dm/uuid", uuid),
            ("sys/devices/dm-0/dm/name", "mpatha\n"),
            ("sys/devices/sda/dev", "8:0\n"),
            ("sys/devices/sda/sda1/dev", "8:1\n"),
            ("sys/devices/sda/sda1/partition", "1\n"),
        ] {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        for (link, to) in [
            ("sys/block/dm-0", "dm-0"),
            ("sys/block/sda", "sda"),
            ("sys/devices/sda/holders/dm-0", "dm-0"),
            ("sys/devices/sda/sda1/holders/dm-7", "dm-0"),
            ("sys/devices/dm-0/slaves/sda", "sda"),
        ] {
            let link = root.join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(root.join("sys/devices").join(to), link).unwrap();
        }
        let roots = Roots::below(root);
        (directory, roots)
    }

    fn disk(roots: &Roots, name: &str) -> BlockDevice {
        let dir = roots.sysfs.join("devices").join(name);
        BlockDevice::at(&dir).unwrap().unwrap()
    }

    #[test]
    fn a_map_is_found_by_its_path_by_itself_and_by_the_units_name() {
        let (_directory, roots) = machine(UUID);
        let map = Map::of_path(&disk(&roots, "sda")).unwrap().unwrap();
        assert_eq!(map.name(), "mpatha");
        assert_eq!(map.uuid(), UUID);
        assert_eq!(map.disk().name(), "dm-0");
        let wwid = "naa.60014051234567890abcdef012345678".parse().unwrap();
        assert_eq!(map.wwid(), Some(wwid));
        let wwid = map.wwid().unwrap();
        assert_eq!(Map::find(&roots, &wwid).unwrap().as_ref(), Some(&map));
        assert_eq!(Map::of_disk(map.disk()).unwrap().as_ref(), Some(&map));
        assert_eq!(Map::all(&roots).unwrap(), std::slice::from_ref(&map));
        let paths = map.paths().unwrap();
        assert_eq!(paths.len(), 1);
        assert_eq!(paths[0].name(), "sda");
    }

    #[test]
    fn other_devices_of_device_mapper_are_no_maps_nor_is_the_holder_of_a_partition() {
        for uuid in ["LVM-x", "part1-mpath-36001405", "CRYPT-LUKS2-x", ""] {
            let (_directory, roots) = machine(uuid);
            assert_eq!(Map::of_path(&disk(&roots, "sda")).unwrap(), None, "{uuid}");
            assert_eq!(Map::all(&roots).unwrap(), [], "{uuid}");
        }
        let (_directory, roots) = machine(UUID);
        // A device on a partition does not hold the disk.
        fs::remove_file(roots.sysfs.join("devices/sda/holders/dm-0")).unwrap();
        assert_eq!(Map::of_path(&disk(&roots, "sda")).unwrap(), None);
        let wwid = "naa.5000c500a1b2c3d4".parse().unwrap();
        assert_eq!(Map::find(&roots, &wwid).unwrap(), None);
    }

    #[test]
    fn a_dm_device_without_a_uuid_counts_as_removed() {
        // Another kind of device exists, though it is no map.
        let (_directory, roots) = machine("LVM-x");
        let is_removed = |name| Map::is_being_removed(&roots, name);
        assert!(!is_removed("dm-0") && !is_removed("sda"));
        fs::remove_file(roots.sysfs.join("devices/dm-0/dm/uuid")).unwrap();
        assert!(is_removed("dm-0") && !is_removed("sda"));
        assert!(is_removed("dm-1") && !is_removed("md127"));
    }

    #[test]
    fn another_life_under_the_same_number_and_uuid_is_another_map() {
        let (directory, roots) = machine(UUID);
        let map = Map::of_path(&disk(&roots, "sda")).unwrap().unwrap();
        assert!(map.is_there());
        let dir = directory.path().join("sys/devices/dm-0");
        // The old directory stays, so that its inode number is not free.
        fs::rename(&dir, directory.path().join("old")).unwrap();
        assert!(!map.is_there());
        assert_eq!(map.describe(), format!("the map dm-0 ({UUID}) is gone"));
        fs::create_dir_all(dir.join("dm")).unwrap();
        for (file, text) in [
            ("dev", "254:0\n"),
            ("dm/uuid", UUID),
            ("dm/name", "mpatha\n"),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
        assert!(!map.is_there());
        let other = Map::of_path(&disk(&roots, "sda")).unwrap().unwrap();
        assert_ne!(map, other);
        assert_eq!(map.require().unwrap_err().kind(), ErrorKind::Vanished);
    }
}
