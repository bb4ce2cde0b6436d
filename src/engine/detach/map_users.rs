//! The users of a multipath map that a detach is about to remove.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::usage::claim::FlushPolicy;
use crate::engine::usage::{Extent, NotLookedAt, Removal, users_of_each};
use crate::error::Result;
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::Map;

/// Looks for users of the map, of the maps of its partitions and of the disks `below`
/// it before anything changes. Returns the places that could not be looked at.
///
/// # Errors
/// `InUse`, which names the users.
pub(super) fn refuse_users_of_map(
    engine: &Engine,
    map: &Map,
    below: &[BlockDevice],
    policy: FlushPolicy,
    deadline: Deadline,
) -> Result<Vec<NotLookedAt>> {
    let parts = map.partition_maps()?;
    let maps = || std::iter::once(map).chain(&parts).map(Map::disk);
    let disks: Vec<&BlockDevice> = maps().chain(below).collect();
    let all = users_of_each(engine, &disks, Extent::All, deadline)?;
    let own: Vec<&str> = maps().map(BlockDevice::name).collect();
    let mut not_looked_at = Vec::new();
    for (place, (disk, mut users)) in disks.iter().zip(all).enumerate() {
        users.remove_stacked(&own);
        let removal = if place < own.len() {
            let allow_own_flush = policy == FlushPolicy::Abandon;
            Removal::Map { allow_own_flush }
        } else {
            Removal::FlushedDisk
        };
        users.refuse_busy(engine.roots(), disk, removal)?;
        not_looked_at = users.not_looked_at;
    }
    Ok(not_looked_at)
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::error::ErrorKind;
    use crate::kernel::Roots;

    pub(in crate::engine::detach) fn map_below(roots: &Roots) -> Map {
        let dir = roots.sysfs.join("block/dm-0");
        fs::create_dir_all(dir.join("dm")).unwrap();
        let uuid = "mpath-35000c500a1b2c3d4";
        for (file, text) in [("dev", "253:0"), ("dm/uuid", uuid), ("dm/name", "m")] {
            fs::write(dir.join(file), format!("{text}\n")).unwrap();
        }
        Map::all(roots).unwrap().remove(0)
    }

    #[test]
    fn a_map_is_refused_to_its_users_before_a_claim() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        fs::create_dir_all(roots.proc.join("self")).unwrap();
        let mount = "36 1 253:0 / /mnt rw - ext4 /dev/dm-0 rw\n";
        fs::write(roots.proc.join("self/mountinfo"), mount).unwrap();
        let map = map_below(roots);
        let soon = Deadline::after(Duration::from_secs(30));
        let refused = refuse_users_of_map(&engine, &map, &[], FlushPolicy::Require, soon);
        // A claim would fail with another error, since the map has no node here.
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InUse);
    }
}
