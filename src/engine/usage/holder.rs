//! Tells apart the users of a disk: a prober of udev or multipathd, a flush of lunbd, or another
//! user.

use crate::error::Holder;

impl Holder {
    /// Whether it is a worker of udevd, or a program that its rules run for every
    /// disk: both open it for a moment, to read.
    pub(in crate::engine) fn is_of_udev(&self) -> bool {
        // `60-persistent-storage.rules`; `55-scsi-sg3_id.rules` of sg3-utils.
        let of_rules = ["scsi_id", "ata_id", "sg_inq"];
        // `systemd-udevd`, `(udev-worker)`, eudev's `udevd`. A child of a worker is `(spawn)` until it
        // runs the program of a rule (`udev-event.c`), and has the worker's descriptors.
        let is_its = |command: &str| {
            command.contains("udev") || command == "(spawn)" || of_rules.contains(&command)
        };
        matches!(self, Self::Open { command, writes: false, .. } if is_its(command))
    }

    /// Whether it is a program that opens every new disk to read it, and closes it again.
    pub(super) fn is_transient_prober(&self) -> bool {
        let probers = ["multipathd", "multipath", "blkid", "kpartx"];
        let is_prober = |command: &str| probers.contains(&command);
        let is_its =
            matches!(self, Self::Open { command, writes: false, .. } if is_prober(command));
        self.is_of_udev() || is_its
    }

    /// Whether it is this process, or a `lunbd` command, and does not write: a flush that
    /// hangs has the disk open until the kernel returns.
    pub(in crate::engine) fn is_own_flush(&self) -> bool {
        match self {
            Self::Open {
                pid,
                command,
                writes,
            } => !writes && (*pid == std::process::id() || command == "lunbd"),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(command: &str, writes: bool) -> Holder {
        Holder::Open {
            pid: 1,
            command: command.to_owned(),
            writes,
        }
    }

    #[test]
    fn a_program_that_udevs_rules_run_is_of_udev() {
        for command in ["(udev-worker)", "(spawn)", "systemd-udevd", "scsi_id"] {
            assert!(open(command, false).is_of_udev(), "{command}");
        }
        assert!(!open("qemu", false).is_of_udev());
    }

    #[test]
    fn a_writer_is_no_prober_whatever_its_name() {
        for command in ["(udev-worker)", "multipathd", "blkid", "kpartx"] {
            assert!(open(command, false).is_transient_prober(), "{command}");
            let writer = open(command, true);
            assert!(
                !writer.is_transient_prober() && !writer.is_of_udev(),
                "{command}"
            );
        }
    }
}
