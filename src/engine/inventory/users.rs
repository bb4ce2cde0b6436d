//! The users of all units, read once.

use std::collections::{BTreeSet, HashMap};

use crate::deadline::Deadline;
use crate::engine::inventory::{InventoryUnit, UnitKind};
use crate::engine::usage::NotLookedAt;
use crate::error::Result;
use crate::id::DevNo;
use crate::kernel::Roots;
use crate::kernel::block_tree::BlockTree;
use crate::kernel::mounts::{self, Mount};

/// The mounts and swap areas of the machine, by the disk that they are on.
pub(super) struct MachineUsers<'a> {
    tree: &'a BlockTree,
    mounts: HashMap<String, Vec<Mount>>,
    swaps: HashMap<String, Vec<DevNo>>,
    /// The places where further mounts or swap areas may be.
    pub(super) not_looked_at: Vec<NotLookedAt>,
}

/// The users of one unit.
pub(super) struct UnitUsers {
    holders: Vec<String>,
    mounts: Vec<Mount>,
    swaps: Vec<DevNo>,
}

impl<'a> MachineUsers<'a> {
    /// The lookups of file servers that do not answer end by `deadline`.
    pub(super) fn read(roots: &Roots, tree: &'a BlockTree, deadline: Deadline) -> Result<Self> {
        let mut mounted = HashMap::<String, Vec<Mount>>::new();
        let mounts = mounts::read_mounts(roots, deadline)?;
        for mount in mounts.found {
            if let Some(disk) = tree.disk_of(roots, mount.device)? {
                mounted.entry(disk).or_default().push(mount);
            }
        }
        let mut swapped = HashMap::<String, Vec<DevNo>>::new();
        let swaps = mounts::read_swaps(roots, deadline)?;
        for device in swaps.found {
            if let Some(disk) = tree.disk_of(roots, device)? {
                swapped.entry(disk).or_default().push(device);
            }
        }
        Ok(Self {
            tree,
            mounts: mounted,
            swaps: swapped,
            not_looked_at: NotLookedAt::of_paths([mounts.unknown, swaps.unknown].concat()),
        })
    }

    /// The users of the unit with these disks and this map.
    pub(super) fn of<'b>(
        &'b self,
        disks: impl IntoIterator<Item = &'b str>,
        map: Option<&'b str>,
    ) -> UnitUsers {
        let own: BTreeSet<&str> = disks.into_iter().chain(map).collect();
        let holders = self.tree.all_above(&own);
        let on = || own.union(&holders).copied();
        let mounts = on().filter_map(|name| self.mounts.get(name));
        let swaps = on().filter_map(|name| self.swaps.get(name));
        UnitUsers {
            mounts: mounts.flatten().cloned().collect(),
            swaps: swaps.flatten().copied().collect(),
            holders: holders.into_iter().map(str::to_owned).collect(),
        }
    }
}

impl UnitUsers {
    pub(super) fn unit(self, kind: UnitKind, size: Option<u64>) -> InventoryUnit {
        InventoryUnit {
            kind,
            size,
            holders: self.holders,
            mounts: self.mounts,
            swaps: self.swaps,
        }
    }
}
