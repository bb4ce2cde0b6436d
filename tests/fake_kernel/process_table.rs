//! The users of a disk: mounts, and processes that have it open, as `/proc` shows them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::{Kernel, write};

/// The contents of `/proc`.
#[derive(Debug, Default)]
pub(super) struct ProcessTable {
    /// The mount point of each disk, by its number.
    mounts: BTreeMap<String, String>,
    descriptors: u32,
}

impl Kernel {
    /// Enters a mount; the caller must take the claim of its file system.
    pub(crate) fn enter_mount(&self, devno: &str, place: &str) {
        self.change(|state| {
            let mounts = &mut state.process_table.mounts;
            mounts.insert(devno.to_owned(), place.to_owned());
            self.write_mounts(mounts);
        });
    }

    /// Removes the mount again.
    pub(crate) fn leave_mount(&self, devno: &str) {
        self.change(|state| {
            let mounts = &mut state.process_table.mounts;
            mounts.remove(devno);
            self.write_mounts(mounts);
        });
    }

    fn write_mounts(&self, mounts: &BTreeMap<String, String>) {
        let mut text = String::new();
        for (devno, place) in mounts {
            writeln!(text, "36 35 {devno} / {place} rw - ext4 /dev/x rw").unwrap();
        }
        super::replace(&self.path("proc/self/mountinfo"), &text);
    }

    /// Shows that this process has `node` open, for writing or not. Returns the number of the
    /// descriptor.
    pub(crate) fn enter_opener(&self, node: &Path, writes: bool) -> u32 {
        let command = fs::read_to_string("/proc/self/comm").unwrap();
        self.enter_opener_of((std::process::id(), &command), node, writes)
    }

    /// As [`Kernel::enter_opener`], for a process with this number and command.
    pub(crate) fn enter_opener_of(
        &self,
        (pid, command): (u32, &str),
        node: &Path,
        writes: bool,
    ) -> u32 {
        let number = self.change(|state| {
            state.process_table.descriptors += 1;
            state.process_table.descriptors
        });
        let process = self.path(&format!("proc/{pid}"));
        write(&process.join("comm"), command);
        fs::create_dir_all(process.join("fd")).unwrap();
        let flags = if writes { "0100002" } else { "0100000" };
        let info = format!("pos:\t0\nflags:\t{flags}\nmnt_id:\t1\n");
        write(&process.join(format!("fdinfo/{number}")), info);
        symlink(node, process.join(format!("fd/{number}"))).unwrap();
        number
    }

    /// Removes the opener again.
    pub(crate) fn leave_opener(&self, number: u32) {
        self.leave_opener_of(std::process::id(), number);
    }

    /// As [`Kernel::leave_opener`], for the process with this number.
    pub(crate) fn leave_opener_of(&self, pid: u32, number: u32) {
        let process = self.path(&format!("proc/{pid}"));
        fs::remove_file(process.join(format!("fd/{number}"))).unwrap();
    }
}
