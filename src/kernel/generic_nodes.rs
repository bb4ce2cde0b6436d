//! The character devices of a SCSI device, through which a process sends it commands past
//! the block device: `/dev/sg*`, `/dev/bsg/*`, and those of tapes and their changers.

use std::path::Path;

use super::sysfs;
use crate::error::{Error, Result};
use crate::id::DevNo;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GenericNode {
    /// The device's name below `/dev`: `sg0`, `bsg/0:0:0:1`.
    pub(crate) name: String,
    /// The character device number.
    pub(crate) number: DevNo,
}

/// The classes, each with the directory of its nodes below `/dev` (`drivers/scsi/sg.c`,
/// `scsi_bsg.c`, `st.c`, `ch.c`).
const CLASSES: [(&str, &str); 4] = [
    ("scsi_generic", ""),
    ("bsg", "bsg/"),
    ("scsi_tape", ""),
    ("scsi_changer", ""),
];

/// The generic devices of the SCSI device at this directory of sysfs; none if there is no
/// such device.
pub(crate) fn read_generic_nodes(device: &Path) -> Result<Vec<GenericNode>> {
    let mut nodes = Vec::new();
    let exists = device.try_exists();
    if !exists.map_err(|error| Error::io("cannot examine", device, &error))? {
        return Ok(nodes);
    }
    for (class, directory) in CLASSES {
        let class = device.join(class);
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
    fn a_device_has_the_nodes_of_each_class() {
        let device = tempfile::tempdir().unwrap();
        assert_eq!(read_generic_nodes(device.path()).unwrap(), []);
        for (place, number) in [
            ("scsi_generic/sg3", "21:3"),
            ("bsg/0:0:0:1", "248:5"),
            ("scsi_tape/nst0", "9:128"),
        ] {
            let directory = device.path().join(place);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("dev"), format!("{number}\n")).unwrap();
        }
        let nodes = read_generic_nodes(device.path()).unwrap();
        let nodes: Vec<_> = nodes
            .iter()
            .map(|node| (&*node.name, node.number.to_string()))
            .collect();
        let expected = [("sg3", "21:3"), ("bsg/0:0:0:1", "248:5"), ("nst0", "9:128")];
        assert_eq!(
            nodes,
            expected.map(|(name, number)| (name, number.to_owned()))
        );
    }
}
