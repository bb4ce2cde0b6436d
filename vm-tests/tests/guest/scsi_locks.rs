//! The engine's locks between processes, and another user of the machine.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use lunbd::AttachRequest;
use lunbd::id::Lun;
use vm_tests::guest::agent::{at, detach, engine, soon};
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
    let attached = engine.attach(&AttachRequest::new(hctl), soon());
    drop(other.stdin.take());
    other.wait().unwrap();
    attached.unwrap();
    detach(&engine, &target, 1).unwrap();
    let mode = fs::metadata(DIRECTORY).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    assert!(!fs::exists(&lock).unwrap());
}

/// Without room there is no record of a failed flush, nor of a killed process.
#[test]
fn without_room_for_its_records_no_command_changes_anything_and_the_error_names_the_directory() {
    fs::create_dir_all(DIRECTORY).unwrap();
    let small = ["-o", "size=64k,mode=700"];
    guest::run(&[&["mount", "-t", "tmpfs"], &small[..], &["tmpfs", DIRECTORY]].concat());
    let target = ScsiDebug::with_luns(2);
    let unit = format!("scsi:{}", at(&target, Lun::from_kernel(1)));
    let filling = format!("{DIRECTORY}/filling");
    let refused = |arguments: &[&str]| {
        // The write ends with an error when the file system is full.
        let _full = fs::write(&filling, vec![0; 1 << 20]);
        let output = guest::lunbd(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains(DIRECTORY) && said.contains("No space"),
            "{said}"
        );
        fs::remove_file(&filling).unwrap();
    };
    refused(&["attach", &unit]);
    assert!(target.disk(1).is_none());
    assert!(guest::lunbd(&["attach", &unit]).status.success());
    refused(&["detach", &unit]);
    assert!(target.disk(1).is_some());
    assert!(guest::lunbd(&["detach", &unit]).status.success());
    guest::run(&["umount", DIRECTORY]);
}
