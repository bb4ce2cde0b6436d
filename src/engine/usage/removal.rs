//! Decides which users prevent a removal.

use crate::engine::usage::{Holder, Users, not_looked_at};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::Roots;
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::Map;

/// What is about to be removed, and how, which decides which users prevent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Removal {
    /// The disk is flushed and removed: a process that only reads loses nothing.
    FlushedDisk,
    /// The map is removed, which the kernel refuses while a process has it open.
    Map {
        /// Whether to go on beside a flush of our own, which has the map open without writing.
        allow_own_flush: bool,
    },
    /// The disk is removed without a flush, since another unit or none answers: data that
    /// a process with an open file has written would be lost.
    UnflushedDisk,
}

/// Whether the users of a device prevent its removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) enum Usage {
    /// No user prevents it.
    Free,
    /// The users that prevent it go away by themselves: udevd, multipathd, our own flush, a
    /// map that is being removed.
    Transient,
    /// These users prevent it.
    Busy(Vec<Holder>),
}

impl Users {
    /// Whether the users prevent this removal.
    pub(in crate::engine) fn usage_for(&self, roots: &Roots, removal: Removal) -> Usage {
        let is_being_removed = |user: &Holder| matches!(user, Holder::Stacked { device } if Map::is_being_removed(roots, device));
        self.usage_with(&is_being_removed, removal)
    }

    fn usage_with(&self, is_being_removed: &dyn Fn(&Holder) -> bool, removal: Removal) -> Usage {
        let is_transient = |user: &Holder| match removal {
            Removal::UnflushedDisk => user.is_of_udev() || is_being_removed(user),
            Removal::Map {
                allow_own_flush: true,
            } if user.is_own_flush() => true,
            _ => user.is_transient_prober() || is_being_removed(user),
        };
        let is_harmless = |user: &&Holder| {
            let reads = matches!(user, Holder::Open { writes: false, .. });
            removal == Removal::FlushedDisk && reads && !user.is_transient_prober()
        };
        let mut transient = false;
        let mut busy = Vec::new();
        for user in self.found.iter().filter(|user| !is_harmless(user)) {
            if is_transient(user) {
                transient = true;
            } else {
                busy.push(user.clone());
            }
        }
        match (busy.is_empty(), transient) {
            (true, false) => Usage::Free,
            (true, true) => Usage::Transient,
            (false, _) => Usage::Busy(busy),
        }
    }

    /// # Errors
    /// `InUse`, naming the users that prevent the removal.
    pub(in crate::engine) fn refuse_busy(
        &self,
        roots: &Roots,
        disk: &BlockDevice,
        removal: Removal,
    ) -> Result<()> {
        match self.usage_for(roots, removal) {
            Usage::Busy(busy) => Err(in_use_error(disk, &busy)),
            Usage::Free | Usage::Transient => Ok(()),
        }
    }

    /// For a removal that cannot be undone and that no caller requested for this very disk.
    ///
    /// # Errors
    /// `NotPermitted`, naming what could not be looked at.
    pub(in crate::engine) fn refuse_unless_all_seen(&self, disk: &BlockDevice) -> Result<()> {
        if self.not_looked_at.is_empty() {
            return Ok(());
        }
        let message = format!(
            "the users of {} cannot all be seen: {}; it was left unchanged: run in the host's \
             PID namespace, with its /proc, /dev and configfs (see `lunbd doctor`)",
            disk.name(),
            not_looked_at::list(&self.not_looked_at)
        );
        Err(Error::new(ErrorKind::NotPermitted, message).at(Stage::Claim))
    }

    /// Whether no user but workers of udevd is seen.
    pub(in crate::engine) fn has_only_udev(&self) -> bool {
        self.found.iter().all(Holder::is_of_udev)
    }

    /// Whether another block device is stacked on it.
    pub(in crate::engine) fn has_stacked(&self) -> bool {
        let is_stacked = |user: &Holder| matches!(user, Holder::Stacked { .. });
        self.found.iter().any(is_stacked)
    }

    /// Whether a worker of udevd has it open.
    #[cfg(feature = "journal")]
    pub(in crate::engine) fn has_udev(&self) -> bool {
        self.found.iter().any(Holder::is_of_udev)
    }

    /// Whether only this process, or a `lunbd` command, has the disk open. If no user is
    /// seen, another process has it.
    pub(in crate::engine) fn has_only_own_flush(&self) -> bool {
        !self.found.is_empty() && self.found.iter().all(Holder::is_own_flush)
    }

    /// Removes these stacked devices, whose users the caller reads separately.
    pub(in crate::engine) fn remove_stacked(&mut self, stacked: &[&str]) {
        let is_one = |user: &Holder| matches!(user, Holder::Stacked { device } if stacked.contains(&&**device));
        self.found.retain(|user| !is_one(user));
    }
}

/// The error that names the users.
pub(in crate::engine) fn in_use_error(disk: &BlockDevice, users: &[Holder]) -> Error {
    in_use_error_of(disk.name(), users)
}

/// The error that names the users of the device with this name.
pub(super) fn in_use_error_of(device: &str, users: &[Holder]) -> Error {
    let by = if users.is_empty() {
        "claimed exclusively by a process that /proc does not show".to_owned()
    } else {
        let names: Vec<String> = users.iter().map(ToString::to_string).collect();
        names.join(", ")
    };
    let message = format!("{device} is in use: {by}");
    Error::new(ErrorKind::InUse, message)
        .at(Stage::Claim)
        .with_holders(users)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(pid: u32, command: &str, writes: bool) -> Holder {
        Holder::Open {
            pid,
            command: command.to_owned(),
            writes,
        }
    }

    fn users(found: &[Holder]) -> Users {
        Users {
            found: found.to_vec(),
            not_looked_at: Vec::new(),
        }
    }

    fn usage_of(user: &Holder, removal: Removal) -> Usage {
        users(std::slice::from_ref(user)).usage_with(&|_| false, removal)
    }

    const MAP: Removal = Removal::Map {
        allow_own_flush: false,
    };

    #[test]
    fn the_users_that_prevent_a_removal_depend_on_how_the_device_is_removed() {
        let mount = Holder::Mount {
            path: "/mnt".into(),
            pid: None,
        };
        let device = "loop0".to_owned();
        let volume = "iblock_0/a".to_owned();
        let user = "o2hb c/R1".to_owned();
        let always = [
            mount,
            Holder::Loop { device },
            Holder::Export { volume },
            Holder::Kernel { user },
        ];
        for user in always.into_iter().chain([open(7, "qemu", true)]) {
            for removal in [Removal::FlushedDisk, MAP, Removal::UnflushedDisk] {
                assert_eq!(usage_of(&user, removal), Usage::Busy(vec![user.clone()]));
            }
        }
        let reader = open(7, "dd", false);
        assert_eq!(usage_of(&reader, Removal::FlushedDisk), Usage::Free);
        let busy = Usage::Busy(vec![reader.clone()]);
        assert_eq!(usage_of(&reader, MAP), busy);
        assert_eq!(usage_of(&reader, Removal::UnflushedDisk), busy);
        let multipathd = open(7, "multipathd", false);
        assert_eq!(
            usage_of(&multipathd, Removal::FlushedDisk),
            Usage::Transient
        );
        assert_eq!(usage_of(&multipathd, MAP), Usage::Transient);
        let busy = Usage::Busy(vec![multipathd.clone()]);
        assert_eq!(usage_of(&multipathd, Removal::UnflushedDisk), busy);
        let udevd = open(7, "(udev-worker)", false);
        for removal in [Removal::FlushedDisk, MAP, Removal::UnflushedDisk] {
            assert_eq!(usage_of(&udevd, removal), Usage::Transient);
        }
    }

    #[test]
    fn a_map_that_is_being_removed_is_no_user_of_its_paths() {
        let device = "dm-0".to_owned();
        let stacked = Holder::Stacked { device };
        let users = users(std::slice::from_ref(&stacked));
        let going = users.usage_with(&|user| *user == stacked, Removal::FlushedDisk);
        assert_eq!(going, Usage::Transient);
        let kept = users.usage_with(&|_| false, Removal::FlushedDisk);
        assert_eq!(kept, Usage::Busy(vec![stacked]));
    }

    #[test]
    fn only_a_caller_that_abandons_unwritten_data_continues_beside_our_own_flush() {
        let us = std::process::id();
        let flush = open(us, "agent", false);
        let abandoning = Removal::Map {
            allow_own_flush: true,
        };
        assert_eq!(usage_of(&flush, abandoning), Usage::Transient);
        assert_eq!(usage_of(&flush, MAP), Usage::Busy(vec![flush.clone()]));
        let writer = open(us, "agent", true);
        let busy = Usage::Busy(vec![writer.clone()]);
        assert_eq!(usage_of(&writer, abandoning), busy);
    }

    #[test]
    fn a_disk_that_an_unseen_process_has_claimed_is_not_taken_for_our_own_flush() {
        assert!(!users(&[]).has_only_own_flush());
        let ours = open(std::process::id(), "agent", false);
        let both = [ours.clone(), open(1, "lunbd", false)];
        assert!(users(&both).has_only_own_flush());
        let with_another = [ours, open(1, "qemu", false)];
        assert!(!users(&with_another).has_only_own_flush());
    }
}
