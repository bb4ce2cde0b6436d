//! Maps of the partitions of a multipath map.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::disk_users::Nodes;
use super::partitioned;

/// The maps of the partitions of a map, as kpartx makes them.
#[derive(Debug)]
pub struct PartitionMaps(());

impl PartitionMaps {
    /// The partition maps of this map, which has the content of [`partitioned`].
    #[must_use]
    pub fn of(map: &Path) -> (Self, Nodes) {
        let name = map
            .file_name()
            .and_then(|name| name.to_str())
            .expect("a node");
        let uuid = fs::read_to_string(format!("/sys/block/{name}/dm/uuid")).expect("a map");
        let make = |number: usize, begin: usize, end: usize| {
            let (begin, length) = (begin / 512, (end - begin) / 512);
            let table = format!("0 {length} linear {} {begin}", map.display());
            let uuid = format!("part{number}-{}", uuid.trim());
            let name = format!("part{number}");
            super::create_map(&name, Some(&uuid), &table);
            super::node_of_map(&name)
        };
        let nodes = Nodes {
            disk: map.to_owned(),
            first: make(1, partitioned::FIRST, partitioned::SECOND),
            second: make(2, partitioned::SECOND, partitioned::LENGTH),
        };
        (Self(()), nodes)
    }
}

impl Drop for PartitionMaps {
    fn drop(&mut self) {
        for name in ["part1", "part2"] {
            let mut remove = Command::new("dmsetup");
            let remove = remove.args(["remove", "--noudevsync", "--retry", name]);
            let _gone_already = remove.status();
        }
    }
}
