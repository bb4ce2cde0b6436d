//! A snapshot of all block devices of the machine and of what is stacked on
//! them.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use super::{Roots, sysfs};
use crate::error::Result;
use crate::id::DevNo;

/// The whole disks and the devices that are stacked on them. It is as large as
/// the machine, so a caller makes it once for many questions. A disk costs no
/// system call of its own. A device that may be stacked on another (`dm-N`,
/// `md127`, `loop3`) costs one listing.
#[derive(Debug, Default)]
pub(crate) struct BlockTree {
    /// `/sys/block`.
    folder: PathBuf,
    /// The kernel's names of the disks, sorted.
    disks: Vec<String>,
    /// By the name of a disk: the devices that are stacked on it or on one of
    /// its partitions.
    above: HashMap<String, BTreeSet<String>>,
}

impl BlockTree {
    /// Reads the tree. It leaves out devices that go away meanwhile.
    ///
    /// # Errors
    /// Fails if the list of disks cannot be read.
    pub(crate) fn read(roots: &Roots) -> Result<Self> {
        let folder = roots.sysfs.join("block");
        let mut tree = Self {
            disks: sysfs::names(&folder)?,
            folder,
            above: HashMap::new(),
        };
        // Read the links from the upper devices, which have few of them. The
        // kernel makes `slaves` and `holders` together (block/holder.c,
        // bd_link_disk_holder).
        let may_stack = |name: &&String| !name.starts_with("sd") && !name.starts_with("nbd");
        for name in tree.disks.iter().filter(may_stack) {
            let Some(dir) = tree.dir(name)? else {
                continue;
            };
            let slaves = dir.join("slaves");
            for slave in sysfs::names(&slaves)? {
                let below = if tree.has(&slave) {
                    Some(slave)
                } else {
                    sysfs::follow(&slaves.join(slave))?.and_then(|dir| tree.disk_at(&dir))
                };
                if let Some(below) = below {
                    tree.above.entry(below).or_default().insert(name.clone());
                }
            }
        }
        Ok(tree)
    }

    /// The names of the disks, sorted.
    pub(crate) fn disks(&self) -> impl Iterator<Item = &str> {
        self.disks.iter().map(String::as_str)
    }

    fn has(&self, disk: &str) -> bool {
        let compare = |name: &String| name.as_str().cmp(disk);
        self.disks.binary_search_by(compare).is_ok()
    }

    /// The directory of a disk, with no link in the path; `None` if the disk is
    /// gone. This is one system call.
    ///
    /// # Errors
    /// Fails if the link cannot be read.
    pub(crate) fn dir(&self, disk: &str) -> Result<Option<PathBuf>> {
        sysfs::follow(&self.folder.join(disk))
    }

    /// The devices that are stacked directly on a disk or on one of its
    /// partitions, sorted.
    pub(crate) fn directly_above(&self, disk: &str) -> impl Iterator<Item = &str> {
        let above = self.above.get(disk).into_iter().flatten();
        above.map(String::as_str)
    }

    /// All devices that are stacked on these disks, at any depth, without these
    /// disks.
    pub(crate) fn all_above<'a>(&'a self, disks: &BTreeSet<&'a str>) -> BTreeSet<&'a str> {
        let mut found = BTreeSet::new();
        let mut to_look_at: Vec<&str> = disks.iter().copied().collect();
        while let Some(disk) = to_look_at.pop() {
            for name in self.directly_above(disk) {
                if !disks.contains(name) && found.insert(name) {
                    to_look_at.push(name);
                }
            }
        }
        found
    }

    /// The disk of this number, or the disk whose partition has this number.
    pub(crate) fn disk_of(&self, roots: &Roots, devno: DevNo) -> Result<Option<String>> {
        let link = roots.sysfs.join("dev/block").join(devno.to_string());
        Ok(sysfs::follow(&link)?.and_then(|dir| self.disk_at(&dir)))
    }

    /// The disk at this directory. A partition's directory lies in its disk's.
    fn disk_at(&self, dir: &Path) -> Option<String> {
        let mut names = dir.ancestors().take(2).filter_map(Path::file_name);
        let disk = names.find_map(|name| name.to_str().filter(|name| self.has(name)));
        disk.map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A machine on which `md0` lies on a partition of `sda` and on `sdb`, and
    /// `dm-0` on `md0`.
    fn machine() -> (tempfile::TempDir, Roots) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        for made in [
            "devices/a/block/sda/sda1",
            "devices/b/block/sdb",
            "devices/virtual/block/md0/slaves",
            "devices/virtual/block/dm-0/slaves",
            "block",
            "dev/block",
        ] {
            fs::create_dir_all(root.join("sys").join(made)).unwrap();
        }
        for (link, to) in [
            ("block/sda", "../devices/a/block/sda"),
            ("block/sdb", "../devices/b/block/sdb"),
            ("block/md0", "../devices/virtual/block/md0"),
            ("block/dm-0", "../devices/virtual/block/dm-0"),
            ("block/gone", "../devices/c/block/gone"),
            ("dev/block/8:1", "../../devices/a/block/sda/sda1"),
            (
                "devices/virtual/block/md0/slaves/sda1",
                "../../../../a/block/sda/sda1",
            ),
            (
                "devices/virtual/block/md0/slaves/sdb",
                "../../../../b/block/sdb",
            ),
            ("devices/virtual/block/dm-0/slaves/md0", "../../md0"),
        ] {
            symlink(to, root.join("sys").join(link)).unwrap();
        }
        let roots = Roots::below(root);
        (directory, roots)
    }

    #[test]
    fn what_lies_on_a_partition_lies_on_its_disk_and_so_does_what_lies_on_that() {
        let (_directory, roots) = machine();
        let tree = BlockTree::read(&roots).unwrap();
        assert_eq!(tree.directly_above("sda").collect::<Vec<_>>(), ["md0"]);
        let above = tree.all_above(&BTreeSet::from(["sda", "sdb"]));
        assert_eq!(above, BTreeSet::from(["dm-0", "md0"]));
        assert_eq!(tree.all_above(&above), BTreeSet::new());
        let disk = tree.disk_of(&roots, "8:1".parse().unwrap()).unwrap();
        assert_eq!(disk.as_deref(), Some("sda"));
        assert_eq!(tree.disk_of(&roots, "8:2".parse().unwrap()).unwrap(), None);
        let dir = roots.sysfs.join("devices/a/block/sda");
        assert_eq!(tree.dir("sda").unwrap(), Some(dir));
        assert_eq!(tree.dir("sdz").unwrap(), None);
    }
}
