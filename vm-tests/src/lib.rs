//! `lunbd` on real kernels, with a real systemd-udevd, in QEMU.
//!
//! `vm-tests/test` builds a guest from Debian's own packages, boots it and runs every test of
//! `vm-tests/tests/guest/` in it. The program `lab` is the host's side, and `init` is pid 1 of
//! the guest. `vm-tests/demo` and `vm-tests/bench` are in a separate package,
//! `vm-tests/benches/`, and boot by `lab story`.
//!
//! # How to add a test
//!
//! Write a `#[test]` with a sentence for a name in a file of `vm-tests/tests/guest/`; a new
//! file also needs its `mod` line in `main.rs` there. All tests are one program; the `guest`
//! feature keeps it from running on a host. Call [`guest::enter`] first: it panics anywhere but
//! in the guest.
//!
//! - Each test is a process of its own and has [`job::DEFAULT_LIMIT_SECS`]
//!   seconds; [`guest::time_limit`] asks for more.
//! - Tests **share a boot**, about 35 of them, so a test leaves the guest as it
//!   found it, except in files whose name starts with `own_boot_`. pid 1 compares SCSI hosts and devices, block devices that have a
//!   size, device-mapper maps, mounts, connected NBD devices, iSCSI sessions, FC
//!   ports, targets and volumes of LIO and nvmet, network interfaces, processes, udevd and
//!   the `scsi_debug` module before and after, and fails the test that left
//!   something, naming it. The guards of [`guest`] clean up when they are
//!   dropped, also when the test panics.
//! - NBD servers are in a boot when a file's name contains `nbd`; iscsid,
//!   multipathd and `sg3-utils` when one contains `iscsi`, `mpath` or `fc`; the
//!   udev rules of `sg3-utils-udev` with `sg3_rules`; lvm2 and its rules with `lvm`.
//! - systemd is pid 1 where a file's name contains `systemd`; udevd is then its service, and
//!   the tests run in another.
//! - After a failure or a time-out the remaining tests continue in a new boot. After a test that
//!   fails only because of a line in the kernel's log, they continue in the same one.
//! - Files whose name starts with `own_boot_` get a boot for each test, and pid 1 does not
//!   check what they leave. Those that start with `own_boot_reset_` also have a disk,
//!   `/dev/vda`, and may reset the machine: it boots again with that disk and runs the test
//!   again.
//! - A test that cannot run on some kernel calls [`guest::skip`] and has a line in
//!   `vm-tests/expected-skips`, or the run fails. The lab does not boot it there.
//! - A run chooses one kernel for each test, by its seed. A file that shows what the kernel
//!   itself does runs on each: `src/bin/lab/choice.rs` lists it.
//! - A line of the kernel's log that reports a defect ([`kernel_log`]) fails the test that ran
//!   then.
//! - A sweep takes a part of its points, and another part with the next seed: see
//!   [`guest::rotation`].
//!
//! `vm-tests/test --vm-only NAME` runs the tests whose `file::name` contains NAME. A failed
//! test's output and kernel log are kept in a file, and the run prints its path.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::missing_panics_doc,
    reason = "a test that cannot go on panics, and what it prints is kept with it"
)]

#[cfg(feature = "guest")]
pub mod guest;
pub mod job;
pub mod kernel_log;
pub mod sweep_row;
