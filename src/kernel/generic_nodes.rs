//! The character devices of a SCSI disk, `/dev/sg*` and `/dev/bsg/*`, through which a
//! process sends it commands past the block device.

use std::path::Path;

use super::sysfs;
use crate::error::Result;
use crate::id::DevNo;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GenericNode {
    /// The device's name below `/dev`: `sg0`, `bsg/0:0:0:1`.
    pub(crate) name: String,
    /// The character device number.
    pub(crate) number: DevNo,
}

/// The generic devices of the disk at this directory of sysfs; none if it is no SCSI
/// disk.
pub(crate) fn read_generic_nodes(disk: &Path) -> Result<Vec<GenericNode>> {
    let mut nodes = Vec::new();
    for (class, directory) in [("scsi_generic", ""), ("bsg", "bsg/")] {
        let class = disk.join("device").join(class);
        for name in sysfs::names(&class)? {
            let number = sysfs::read_if_there(&class.join(&name).join("dev"))?;
            let Some(number) = number.and_then(|number| number.parse().ok()) else {
                continue;
            };
            let name = format!("{directory}{name}");
            nodes.push(GenericNode { name, number });
        }
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_disk_has_the_generic_nodes_of_its_device() {
        let disk = tempfile::tempdir().unwrap();
        assert_eq!(read_generic_nodes(disk.path()).unwrap(), []);
        for (place, number) in [("scsi_generic/sg3", "21:3"), ("bsg/0:0:0:1", "248:5")] {
            let directory = disk.path().join("device").join(place);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("dev"), format!("{number}\n")).unwrap();
        }
        let nodes = read_generic_nodes(disk.path()).unwrap();
        let nodes: Vec<_> = nodes
            .iter()
            .map(|node| (&*node.name, node.number.to_string()))
            .collect();
        let expected = [("sg3", "21:3"), ("bsg/0:0:0:1", "248:5")];
        assert_eq!(
            nodes,
            expected.map(|(name, number)| (name, number.to_owned()))
        );
    }
}
