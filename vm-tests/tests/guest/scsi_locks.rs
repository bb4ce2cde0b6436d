//! The engine's locks between processes, and another user of the machine.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use lunbd::id::Lun;
use lunbd::{AttachRequest, Deadline};
use vm_tests::guest::agent::{at, detach, engine};
use vm_tests::guest::{self, ScsiDebug};

const DIRECTORY: &str = "/run/lunbd";
const NOBODY: u32 = 65_534;
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn another_user_cannot_take_a_lock_that_a_killed_process_left_and_hold_up_an_attach() {
    let target = ScsiDebug::with_luns(2);
    let hctl = at(&target, Lun::from_kernel(1));
    let lock = format!("{DIRECTORY}/scsi-{hctl}.lock");
    // An earlier version left the directory like this.
    fs::create_dir_all(DIRECTORY).unwrap();
    fs::set_permissions(DIRECTORY, Permissions::from_mode(0o755)).unwrap();
    fs::write(&lock, "1").unwrap();
    fs::set_permissions(&lock, Permissions::from_mode(0o644)).unwrap();
    let engine = engine();
    // The process holds the lock for as long as its input is open.
    let mut other = Command::new("flock")
        .args(["--nonblock", &lock, "cat"])
        .stdin(Stdio::piped())
        .uid(NOBODY)
        .gid(NOBODY)
        .spawn()
        .unwrap();
    guest::wait_until("the other user to have tried", LIMIT, || {
        let was_refused = other.try_wait().unwrap().is_some();
        let mut ours = Command::new("flock");
        let ours = ours.args(["--nonblock", &lock, "true"]).status().unwrap();
        (was_refused || !ours.success()).then_some(())
    });
    let limit = Deadline::after(Duration::from_secs(10));
    let attached = engine.attach(&AttachRequest::new(hctl), limit);
    drop(other.stdin.take());
    other.wait().unwrap();
    attached.unwrap();
    detach(&engine, &target, 1).unwrap();
    let mode = fs::metadata(DIRECTORY).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    assert!(!fs::exists(&lock).unwrap());
}
