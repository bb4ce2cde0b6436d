//! Whether a failure of a SCSI detach goes away by itself.

use std::error::Error as _;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::detach::map_users::refuse_users_of_map;
use crate::engine::detach::run::DetachRun;
use crate::engine::unit::KnownPath;
use crate::engine::unit::paths::paths_of;
use crate::engine::usage::claim::FlushPolicy;
use crate::engine::usage::{Extent, Removal, Usage, users_of_each};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::ScsiDevice;

impl DetachRun<'_> {
    /// Whether a failure may be transient. A failed flush is not: a second one would
    /// succeed and prove nothing.
    pub(super) fn is_transient(&mut self, error: &Error, deadline: Deadline) -> bool {
        match (error.stage(), error.kind()) {
            (Some(Stage::Flush), _) => false,
            (_, ErrorKind::Vanished) => true,
            (Some(Stage::Claim), ErrorKind::Quarantined) => self.timed_out,
            (Some(Stage::Claim | Stage::RemoveMap), ErrorKind::InUse) => {
                let users = self.only_transient_users(is_dead_disk(error), deadline);
                match users.unwrap_or(Some(false)) {
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
    /// or by a process that probes disks; `None` where no holder is visible. A claim does not
    /// exclude multipathd's open, so multipathd is the holder only of a disk that `is_dead`, or at
    /// which another unit answers: [`claim_replaced`](crate::engine::usage::claim::claim_replaced).
    fn only_transient_users(&mut self, is_dead: bool, deadline: Deadline) -> Result<Option<bool>> {
        let roots = self.engine.roots();
        let at_once = Deadline::after(Duration::ZERO);
        let paths = paths_of(
            self.engine,
            &self.unit,
            &self.named_devices,
            Vec::new(),
            at_once,
        )?;
        if let Some(map) = self.map_of(&paths)? {
            let below = map.paths()?;
            // A flush of this process that waits in the map ends when the map has a path.
            let policy = if self.map_may_have_flush {
                FlushPolicy::Abandon
            } else {
                self.request.flush_policy
            };
            let checked = refuse_users_of_map(self.engine, &map, &below, policy, deadline);
            return Ok(Some(checked.is_ok()));
        }
        let on_disk = |path: KnownPath| path.disk.map(|disk| (path.device, disk));
        let disks: Vec<(ScsiDevice, BlockDevice)> = paths.into_iter().filter_map(on_disk).collect();
        let of_each: Vec<&BlockDevice> = disks.iter().map(|(_, disk)| disk).collect();
        let all = users_of_each(self.engine, &of_each, Extent::All, deadline)?;
        // The paths of a map whose removal failed are still open.
        let removal = Removal::Map {
            allow_own_flush: !self.open_paths.is_empty(),
        };
        let mut is_held = false;
        for ((device, _), users) in disks.iter().zip(all) {
            let is_replaced = self.replaced.iter().any(|(it, _)| it == device);
            match users.usage_for(roots, removal) {
                Usage::Busy(_) => return Ok(Some(false)),
                Usage::Transient => is_held |= is_dead || is_replaced || users.has_stacked(),
                Usage::Free => {}
            }
        }
        Ok(is_held.then_some(true))
    }
}

/// Whether the kernel refused a claim because the disk can no longer be opened. Then every
/// process that still has it open counts as a user.
fn is_dead_disk(refused: &Error) -> bool {
    let cause = refused.source().and_then(|cause| cause.downcast_ref());
    cause.is_some_and(|cause: &Error| cause.kind() == ErrorKind::Vanished)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::engine::Engine;
    use crate::engine::detach::remove_paths::tests::{path, run};
    use crate::engine::detach::{DetachRequest, DetachTarget};
    use crate::engine::unit::PathIdentity;
    use crate::engine::usage::claim::claim_replaced;
    use crate::id::DevNo;
    use crate::kernel::devices::tests::Named;
    use crate::kernel::{Devices, Roots};
    use crate::scsi::Identity;

    /// Lets process 77, which has this name, have its descriptor open for reading.
    fn open(roots: &Roots, command: &str) {
        let process = roots.proc.join("77");
        for dir in ["fd", "fdinfo", "task/77"] {
            fs::create_dir_all(process.join(dir)).unwrap();
        }
        for file in ["comm", "task/77/comm"] {
            fs::write(process.join(file), format!("{command}\n")).unwrap();
        }
        fs::write(process.join("fdinfo/3"), "flags:\t00\n").unwrap();
        fs::write(process.join("fd/3"), "").unwrap();
    }

    #[test]
    fn multipathd_releases_a_path_at_which_another_unit_answers_and_a_reader_need_not() {
        let root = tempfile::tempdir().unwrap();
        let devno = DevNo {
            major: 8,
            minor: 16,
        };
        let descriptor = root.path().join("proc/77/fd/3").display().to_string();
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named(descriptor.leak(), devno))),
            ..Roots::below(root.path())
        };
        fs::create_dir_all(roots.proc.join("self")).unwrap();
        fs::write(roots.proc.join("self/mountinfo"), "").unwrap();
        let engine = Engine::start(roots).unwrap();
        let roots = engine.roots();
        let request =
            DetachRequest::new("unit:naa.5000c500a1b2c3d4".parse::<DetachTarget>().unwrap());
        let one = path(roots, "1:0:0:4", "sdb");
        let disk = one.disk.clone().unwrap();
        let soon = Deadline::after(Duration::from_secs(30));
        let is_transient = |command: &str, is_replaced: bool| {
            let mut run = run(&engine, &request);
            run.named_devices = vec![one.device.clone()];
            if is_replaced {
                let (was, now) = (Identity::default(), Identity::default());
                let replaced = PathIdentity::Replaced { was, now };
                run.replaced.push((one.device.clone(), replaced));
            }
            open(roots, command);
            let mut watch = engine.hub().watch("1:0:0:4");
            let refused = claim_replaced(&engine, &disk, &mut watch, soon).unwrap_err();
            assert_eq!(
                refused.kind(),
                ErrorKind::InUse,
                "{command} {is_replaced}: {refused}"
            );
            // The second refusal, since no holder may be visible after the first.
            [(); 2].map(|()| run.is_transient(&refused, soon))[1]
        };
        assert!(is_transient("multipathd", true));
        assert!(!is_transient("multipathd", false));
        assert!(!is_transient("dd", true));
    }
}
