//! Whether a failure of a SCSI detach goes away by itself.

use std::error::Error as _;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::detach::remove_map::refuse_users_of_map;
use crate::engine::detach::run::DetachRun;
use crate::engine::unit::paths::paths_of;
use crate::engine::usage::claim::FlushPolicy;
use crate::engine::usage::{Extent, Removal, Usage, users_of_each};
use crate::error::{Error, ErrorKind, Stage};
use crate::kernel::blockdev::BlockDevice;

impl DetachRun<'_> {
    /// Whether a failure may be transient. A failed flush is not: a second one would
    /// succeed and prove nothing.
    pub(super) fn is_transient(&mut self, error: &Error, deadline: Deadline) -> bool {
        match (error.stage(), error.kind()) {
            (Some(Stage::Flush), _) => false,
            (_, ErrorKind::Vanished) => true,
            (Some(Stage::Claim), ErrorKind::Quarantined) => self.timed_out,
            (Some(Stage::Claim | Stage::RemoveMap), ErrorKind::InUse) => {
                match self.only_transient_users(is_dead_disk(error), deadline) {
                    Some(is_transient) => {
                        self.holder_vanished = false;
                        is_transient
                    }
                    // The holder has released the device since, or cannot be seen at all.
                    None => !std::mem::replace(&mut self.holder_vanished, true),
                }
            }
            _ => false,
        }
    }

    /// Whether the unit's disks are held only by its map, even one that is being removed,
    /// or by a process that probes disks; `None` where no holder is visible. multipathd opens a
    /// disk without a claim, so it is the holder only of a disk that `is_dead`.
    fn only_transient_users(&self, is_dead: bool, deadline: Deadline) -> Option<bool> {
        let roots = self.engine.roots();
        let look = || {
            let at_once = Deadline::after(Duration::ZERO);
            let paths = paths_of(
                self.engine,
                &self.unit,
                &self.named_devices,
                Vec::new(),
                at_once,
            )?;
            let map = self.map_of(&paths)?;
            if let Some(map) = &map {
                let below = map.paths()?;
                let policy = FlushPolicy::Require;
                let checked = refuse_users_of_map(self.engine, map, &below, policy, deadline);
                return Ok(Some(checked.is_ok()));
            }
            let disks = paths.iter().filter_map(|path| path.disk.as_ref());
            let disks: Vec<&BlockDevice> = disks.collect();
            let all = users_of_each(self.engine, &disks, Extent::All, deadline)?;
            // The paths of a map whose removal failed are still open.
            let removal = Removal::Map {
                beside_own_flush: !self.open_paths.is_empty(),
            };
            let mut is_held = false;
            for users in all {
                match users.usage_for(roots, removal) {
                    Usage::Busy(_) => return Ok(Some(false)),
                    Usage::Transient => is_held |= is_dead || users.has_stacked(),
                    Usage::Free => {}
                }
            }
            Ok::<_, Error>(is_held.then_some(true))
        };
        look().unwrap_or(Some(false))
    }
}

/// Whether the kernel refused a claim because the disk can no longer be opened. Then every
/// process that still has it open counts as a user.
fn is_dead_disk(refused: &Error) -> bool {
    let cause = refused.source().and_then(|cause| cause.downcast_ref());
    cause.is_some_and(|cause: &Error| cause.kind() == ErrorKind::Vanished)
}
