//! `lunbd` on real kernels, with a real systemd-udevd, in QEMU.
//!
//! `vm-tests/test` builds a guest from Debian's own packages, boots it and runs
//! every test of `vm-tests/tests/` in it; `vm-tests/demo` tells one story in
//! one boot. The programs: `lab` is the host's side, `init` is pid 1 of the
//! guest, `story` is what the demo runs.
//!
//! # How to add a test
//!
//! Write a `#[test]` with a sentence for a name in a file of `vm-tests/tests/`;
//! a new file also needs its `[[test]]` entry with
//! `required-features = ["guest"]` in `vm-tests/Cargo.toml`, which keeps it
//! from running on a host. Call [`guest::enter`] first: it refuses to go on
//! anywhere but in the guest.
//!
//! - Each test is a process of its own and has [`job::DEFAULT_LIMIT_SECS`]
//!   seconds; [`guest::time_limit`] asks for more.
//! - The tests of a kernel **share one boot**, so a test leaves the guest as it
//!   found it. pid 1 compares SCSI hosts and devices, block devices that have a
//!   size, device-mapper maps, mounts, connected NBD devices, iSCSI sessions, FC
//!   ports, LIO's targets and volumes, network interfaces, processes, udevd and
//!   the `scsi_debug` module before and after, and fails the test that left
//!   something, naming it. The guards of [`guest`] clean up when they are
//!   dropped, also when the test panics.
//! - NBD servers are in a boot when a file's name contains `nbd`; iscsid,
//!   multipathd and `sg3-utils` when one contains `iscsi`, `mpath` or `fc`.
//! - After a failure or a time-out the remaining tests go on in a new boot.
//! - Files whose name starts with `own_boot_` get a boot for each test, and
//!   what they leave is not looked at. Those that start with `own_boot_reset_`
//!   have a disk besides, `/dev/vda`, and may reset the machine: it boots again
//!   with that disk and runs the test again.
//! - A test that cannot run on some kernel calls [`guest::skip`]. A skip that
//!   `vm-tests/expected-skips` does not list for that kernel fails the run.
//!
//! `vm-tests/test --vm-only NAME` runs the tests whose `file::name` contains
//! NAME. The output and the kernel log of a failed test are kept in a file
//! whose path is printed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::missing_panics_doc,
    reason = "a test that cannot go on panics, and what it prints is kept with it"
)]

pub mod bench;
pub mod guest;
pub mod job;
pub mod story;
