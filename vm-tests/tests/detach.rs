//! Detach, as an agent links it.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test panics to fail"
)]

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use lunbd::engine::Flush;
use lunbd::error::Stage;
use lunbd::{AttachRequest, DetachTarget, ErrorKind};
use vm_tests::guest::agent::{attach, detach, engine, soon, unit};
use vm_tests::guest::{self, ScsiDebug};

#[test]
fn a_detached_disk_is_gone_from_sysfs_from_dev_and_from_udev() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let attachment = attach(&engine, &target, 1);
    let detachment = detach(&engine, &target, 1).unwrap();
    assert!(detachment.changed);
    assert_eq!(detachment.node.as_ref(), Some(&attachment.node));
    assert_eq!(detachment.diskseq, attachment.diskseq);
    assert_eq!(detachment.flush, Some(Flush::Done));
    assert_eq!(target.devices(), [] as [&str; 0]);
    assert!(!attachment.node.exists());
    for link in &attachment.links {
        assert!(link.symlink_metadata().is_err(), "{}", link.display());
    }
    let record = format!("/run/udev/data/b{}", attachment.devno);
    assert!(!Path::new(&record).exists());
}

#[test]
fn what_is_gone_already_is_detached_and_unchanged() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let detachment = detach(&engine, &target, 1).unwrap();
    assert!(!detachment.changed);
    attach(&engine, &target, 1);
    assert!(detach(&engine, &target, 1).unwrap().changed);
    assert!(!detach(&engine, &target, 1).unwrap().changed);
}

#[test]
fn data_written_without_a_sync_is_there_after_the_next_attach() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let mut data = vec![0; 4 << 20];
    File::open("/dev/urandom")
        .unwrap()
        .read_exact(&mut data)
        .unwrap();
    let node = attach(&engine, &target, 1).node;
    let mut disk = OpenOptions::new().write(true).open(&node).unwrap();
    disk.write_all(&data).unwrap();
    drop(disk);
    detach(&engine, &target, 1).unwrap();
    let node = attach(&engine, &target, 1).node;
    let mut back = vec![0; data.len()];
    File::open(&node).unwrap().read_exact(&mut back).unwrap();
    assert!(back == data, "what was written is not what is read");
    detach(&engine, &target, 1).unwrap();
}

struct Mounted(&'static str);

impl Mounted {
    fn on(node: &Path, path: &'static str) -> Self {
        fs::create_dir_all(path).unwrap();
        guest::run(&["mount", node.to_str().unwrap(), path]);
        Self(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
        let _ = fs::remove_dir(self.0);
    }
}

#[test]
fn a_mounted_disk_is_refused_with_the_mounts_path_and_its_filesystem_is_unharmed() {
    let (engine, target) = (engine(), ScsiDebug::options().luns(2).size_mib(16).load());
    let node = attach(&engine, &target, 1).node;
    guest::run(&["mkfs.ext4", "-q", "-F", node.to_str().unwrap()]);
    let mounted = Mounted::on(&node, "/tmp/a mount");
    fs::write("/tmp/a mount/file", "before").unwrap();

    let error = detach(&engine, &target, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.stage(), Some(Stage::Claim));
    assert!(
        error.to_string().contains("mounted on /tmp/a mount"),
        "{error}"
    );

    fs::write("/tmp/a mount/after", "after").unwrap();
    assert_eq!(fs::read_to_string("/tmp/a mount/file").unwrap(), "before");
    drop(mounted);
    guest::run(&["e2fsck", "-fn", node.to_str().unwrap()]);
    assert!(detach(&engine, &target, 1).unwrap().changed);
}

#[test]
fn a_mount_in_another_mount_namespace_is_refused_and_its_process_is_named() {
    let (engine, target) = (engine(), ScsiDebug::options().luns(2).size_mib(16).load());
    let node = attach(&engine, &target, 1).node;
    guest::run(&["mkfs.ext4", "-q", "-F", node.to_str().unwrap()]);
    fs::create_dir_all("/tmp/apart").unwrap();
    let script = format!(
        "mount {} /tmp/apart && echo mounted && read line",
        node.display()
    );
    let mut apart = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 7];
    apart
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut said)
        .unwrap();
    assert!(
        !fs::read_to_string("/proc/self/mounts")
            .unwrap()
            .contains("/tmp/apart")
    );

    let error = detach(&engine, &target, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    let named = format!(
        "mounted on /tmp/apart in the mount namespace of process {}",
        apart.id()
    );
    assert!(error.to_string().contains(&named), "{error}");

    drop(apart.stdin.take());
    apart.wait().unwrap();
    guest::wait_until(
        "the other namespace to be gone",
        Duration::from_secs(60),
        || detach(&engine, &target, 1).ok(),
    );
    fs::remove_dir("/tmp/apart").unwrap();
}

#[test]
fn a_disk_whose_partition_is_mounted_is_refused_and_a_partition_is_no_disk() {
    let (engine, target) = (engine(), ScsiDebug::options().luns(2).size_mib(16).load());
    let node = attach(&engine, &target, 1).node;
    let mut sfdisk = Command::new("sfdisk")
        .arg("--quiet")
        .arg(&node)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    sfdisk
        .stdin
        .take()
        .unwrap()
        .write_all(b"label: gpt\nsize=8M\n")
        .unwrap();
    assert!(sfdisk.wait().unwrap().success());
    detach(&engine, &target, 1).unwrap();

    // The attach returns with the partition settled too.
    let attachment = attach(&engine, &target, 1);
    let partition = format!("{}1", attachment.node.display());
    assert!(attachment.links.iter().all(|link| link.exists()));
    let by_partition = guest::run(&[
        "udevadm",
        "info",
        "--query=property",
        "--property=ID_PART_ENTRY_NUMBER",
        "--value",
        &partition,
    ]);
    assert_eq!(by_partition.trim(), "1");

    let target_of_path: DetachTarget = partition.parse().unwrap();
    let error = engine.detach(target_of_path, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("name the whole disk"), "{error}");

    guest::run(&["mkfs.ext4", "-q", "-F", &partition]);
    let mounted = Mounted::on(Path::new(&partition), "/tmp/partition");
    let error = detach(&engine, &target, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(
        error.to_string().contains("mounted on /tmp/partition"),
        "{error}"
    );
    drop(mounted);
    detach(&engine, &target, 1).unwrap();
}

#[test]
fn a_disk_under_a_device_mapper_map_is_refused_with_the_maps_name() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    guest::modprobe("dm_mod", &[]);
    let table = format!("0 2048 linear {} 0", node.display());
    guest::run(&[
        "dmsetup",
        "create",
        "--noudevsync",
        "held",
        "--table",
        &table,
    ]);
    let error = detach(&engine, &target, 1).unwrap_err();
    // It has the map open for longer than `--retry` tries on a slow machine.
    guest::udevd::settle();
    guest::run(&["dmsetup", "remove", "--noudevsync", "--retry", "held"]);
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.to_string().contains("held by dm-"), "{error}");
    detach(&engine, &target, 1).unwrap();
}

#[test]
fn a_disk_that_is_swapped_on_is_refused() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    let node = node.to_str().unwrap();
    guest::run(&["mkswap", node]);
    guest::run(&["swapon", node]);
    let error = detach(&engine, &target, 1).unwrap_err();
    guest::run(&["swapoff", node]);
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.to_string().contains("swapped on"), "{error}");
    detach(&engine, &target, 1).unwrap();
}

#[test]
fn a_disk_that_a_process_has_claimed_is_refused_and_the_process_is_named() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    let holder = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_EXCL)
        .open(&node)
        .unwrap();
    let error = detach(&engine, &target, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    let named = format!("open in process {} (", std::process::id());
    assert!(error.to_string().contains(&named), "{error}");
    drop(holder);
    detach(&engine, &target, 1).unwrap();
}

#[test]
fn a_process_that_only_reads_does_not_hold_a_detach_up() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    let _reader = File::open(&node).unwrap();
    assert!(detach(&engine, &target, 1).unwrap().changed);
}

#[test]
fn a_disk_is_detached_by_its_node_and_by_a_link_to_it() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(3));
    let by_node = attach(&engine, &target, 1);
    let by_link = attach(&engine, &target, 2);
    for path in [&by_node.node, &by_link.links[0]] {
        let named = DetachTarget::Device(path.clone());
        assert!(engine.detach(named.clone(), soon()).unwrap().changed);
        // A path that leads nowhere proves nothing.
        let error = engine.detach(named.clone(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn an_offline_disk_that_nobody_has_open_is_detached_and_said_to_be_unflushed() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    attach(&engine, &target, 1);
    guest::udevd::settle();
    fs::write(target.device_dir(1).join("state"), "offline\n").unwrap();
    let detachment = detach(&engine, &target, 1).unwrap();
    assert!(
        matches!(detachment.flush, Some(Flush::Unreachable(_))),
        "{detachment:?}"
    );
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn an_attach_of_an_offline_disk_says_its_state_and_leaves_it() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    attach(&engine, &target, 1);
    fs::write(target.device_dir(1).join("state"), "offline\n").unwrap();
    let error = engine
        .attach(&AttachRequest::new(unit(&target, 1)), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady);
    assert!(error.to_string().contains("in state offline"), "{error}");
    assert_eq!(target.devices().len(), 1);
    fs::write(target.device_dir(1).join("state"), "running\n").unwrap();
    detach(&engine, &target, 1).unwrap();
}

#[test]
fn two_hundred_rounds_leak_no_device_no_descriptor_and_no_thread() {
    if guest::series() != "6.1" {
        guest::skip("counted on one kernel, for the run's time");
    }
    guest::time_limit(Duration::from_mins(30));
    let (engine, target) = (engine(), ScsiDebug::with_luns(256));
    let count = |of: &str| guest::entries(format!("/proc/self/{of}")).len();
    let round = |lun| {
        assert!(attach(&engine, &target, lun).changed);
        assert!(detach(&engine, &target, lun).unwrap().changed);
    };
    round(0);
    let before = (count("fd"), count("task"));
    for lun in 0..200 {
        round(lun);
    }
    // A worker's thread ends a moment after it has answered.
    guest::wait_until(
        "as many descriptors and threads as before",
        Duration::from_secs(60),
        || (count("fd") <= before.0 && count("task") <= before.1).then_some(()),
    );
    assert_eq!(target.devices(), [] as [&str; 0]);
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
    assert_eq!(engine.hub().counters().overruns, 0);
}

#[test]
fn a_file_opened_with_direct_io_reads_what_the_page_cache_wrote() {
    // The flush reaches the device: O_DIRECT goes past the cache.
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    let mut disk = OpenOptions::new().write(true).open(&node).unwrap();
    disk.write_all(&[0x5a; 4096]).unwrap();
    detach(&engine, &target, 1).unwrap();
    let node = attach(&engine, &target, 1).node;
    let mut page = memmap2::MmapMut::map_anon(4096).unwrap();
    let mut direct = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(&node)
        .unwrap();
    direct.read_exact(&mut page).unwrap();
    assert!(page.iter().all(|&byte| byte == 0x5a));
    detach(&engine, &target, 1).unwrap();
}
