//! Detaches, as an agent that links the library makes them.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lunbd::engine::{Flush, StageObserver};
use lunbd::error::Stage;
use lunbd::{DetachRequest, DetachTarget, ErrorKind};
use vm_tests::guest::agent::{attach, detach, engine, soon, unit};
use vm_tests::guest::unwritten::LazyWriteback;
use vm_tests::guest::{self, ScsiDebug};

/// The content of the store, which all LUNs share, read past the page cache of each.
fn read_store(by: &Path, length: usize) -> Vec<u8> {
    let mut page = memmap2::MmapMut::map_anon(length).unwrap();
    let mut direct = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(by)
        .unwrap();
    direct.read_exact(&mut page).unwrap();
    page.to_vec()
}

#[test]
fn data_written_without_a_sync_is_on_the_device_before_the_delete() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(3));
    let mut data = vec![0; 1 << 20];
    File::open("/dev/urandom")
        .unwrap()
        .read_exact(&mut data)
        .unwrap();
    let beside = attach(&engine, &target, 2).node;
    let node = attach(&engine, &target, 1).node;
    // The kernel writes back at the last close, so a reader keeps the disk open. The kernel
    // also writes back for udevd, which reads the partition table of a written disk, and by a
    // timer.
    let _lazy = LazyWriteback::start();
    let reader = File::open(&node).unwrap();
    guest::udevd::settle();
    let udev = Mutex::new(Some(guest::udevd::stopped()));
    fs::write(&node, &data).unwrap();
    assert!(
        read_store(&beside, data.len()) != data,
        "it is written already"
    );
    let stored = Arc::new(Mutex::new(Vec::new()));
    let (seen, length) = (Arc::clone(&stored), data.len());
    let observer = StageObserver::new(move |stage| {
        // The kernel itself writes dirty pages back when it deletes the disk.
        if stage == Stage::Delete {
            *seen.lock().unwrap() = read_store(&beside, length);
            drop(udev.lock().unwrap().take());
        }
    });
    let request = DetachRequest::new(unit(&target, 1)).observe(observer);
    let detachment = engine.detach(request, soon()).unwrap();
    assert_eq!(detachment.flush, Some(Flush::Done));
    assert!(*stored.lock().unwrap() == data, "it was not written back");
    drop(reader);
    detach(&engine, &target, 2).unwrap();
}

struct Mounted(&'static str);

impl Mounted {
    fn on(node: &Path, path: &'static str) -> Self {
        fs::create_dir_all(path).unwrap();
        guest::run(&["mount", "-t", "ext4", node.to_str().unwrap(), path]);
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
        "mount -t ext4 {} /tmp/apart && echo mounted && read line",
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

    // The attach returns when udev has settled the partition too.
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
    guest::udevd::settle();
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
    // On a slow machine udev has the map open for longer than `--retry` tries.
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
fn rounds_of_attach_and_detach_leak_no_device_no_descriptor_and_no_thread() {
    guest::sweep_time_limit();
    // Twenty rounds show a leak of one per round.
    let rounds = if guest::sweeps_are_whole() { 200 } else { 20 };
    let (engine, target) = (engine(), ScsiDebug::with_luns(rounds));
    let round = |lun| {
        assert!(attach(&engine, &target, lun).changed);
        assert!(detach(&engine, &target, lun).unwrap().changed);
    };
    // These rounds create what the process keeps: its index of devices has a descriptor.
    for _ in 0..5 {
        round(0);
    }
    let before = guest::descriptors_and_threads();
    for lun in 0..rounds {
        round(lun.into());
    }
    guest::wait_for_no_more_than(&before);
    assert_eq!(target.devices(), [] as [&str; 0]);
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
    assert_eq!(engine.hub().counters().overruns, 0);
}
