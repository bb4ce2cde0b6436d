//! Users of a disk that do not open it exclusively: none of their data is lost.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lunbd::engine::{Flush, NotLookedAt, StageObserver};
use lunbd::error::Stage;
use lunbd::{Deadline, DetachRequest, DetachTarget, ErrorKind};
use nix::mount::{MsFlags, mount, umount};
use vm_tests::guest::agent::{attach, detach, engine, soon, unit};
use vm_tests::guest::direct::stored;
use vm_tests::guest::disk_users::LoopDevice;
use vm_tests::guest::heartbeat::Heartbeat;
use vm_tests::guest::stuck_fuse::StuckFuse;
use vm_tests::guest::unwritten::LazyWriteback;
use vm_tests::guest::{ScsiDebug, partitioned, udevd};

const WRITE_PROTECT: &str = "/sys/module/scsi_debug/parameters/wp";
/// A place in the first partition after ext4's own data.
const WITHIN: usize = 4 << 20;

/// A unit with partitions, LUN 1, and another one that shares its store.
fn partitioned_disk() -> ScsiDebug {
    let target = ScsiDebug::options().luns(3).size_mib(16).load();
    let engine = engine();
    partitioned::write_to(&attach(&engine, &target, 2).node);
    udevd::settle();
    detach(&engine, &target, 2).unwrap();
    target
}

fn first_partition(node: &Path) -> PathBuf {
    PathBuf::from(format!("{}1", node.display()))
}

fn writer(node: &Path) -> File {
    OpenOptions::new().write(true).open(node).unwrap()
}

fn us_writing() -> String {
    format!("open for writing in process {}", std::process::id())
}

#[test]
fn a_plain_writer_of_a_partition_is_refused_by_name_and_what_it_leaves_is_written_back() {
    let _lazy = LazyWriteback::start();
    let (engine, target) = (engine(), partitioned_disk());
    let beside = attach(&engine, &target, 2).node;
    let node = attach(&engine, &target, 1).node;
    let partition = first_partition(&node);
    udevd::settle();
    let data = vec![0xa5; 64 << 10];
    let mut writes = writer(&partition);
    writes.seek(SeekFrom::Start(WITHIN as u64)).unwrap();
    writes.write_all(&data).unwrap();
    let failure = detach(&engine, &target, 1).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Claim), "{failure}");
    assert!(failure.to_string().contains(&us_writing()), "{failure}");
    assert!(node.exists() && !failure.receipt.safe_to_unmap);

    // The writer's close is not the last one, so the kernel writes nothing back.
    let reader = File::open(&partition).unwrap();
    let udev = Mutex::new(Some(udevd::stopped()));
    drop(writes);
    let place = partitioned::FIRST + WITHIN;
    let length = data.len();
    assert!(stored(&beside, place, length) != data, "it is written");
    // The kernel itself writes dirty pages back when it deletes the disk.
    let at_delete = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&at_delete);
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Delete {
            *seen.lock().unwrap() = stored(&beside, place, length);
            drop(udev.lock().unwrap().take());
        }
    });
    let request = DetachRequest::new(unit(&target, 1)).observe(observer);
    let detachment = engine.detach(request, soon()).unwrap();
    assert_eq!(detachment.flush, Some(Flush::Done));
    assert!(detachment.safe_to_unmap);
    assert!(*at_delete.lock().unwrap() == data, "it was not written");
    drop(reader);
}

#[test]
fn what_a_partition_cannot_write_back_ends_the_detach() {
    let _lazy = LazyWriteback::start();
    let (engine, target) = (engine(), partitioned_disk());
    let node = attach(&engine, &target, 1).node;
    let partition = first_partition(&node);
    udevd::settle();
    let reader = File::open(&partition).unwrap();
    let held = udevd::stopped();
    let mut writes = writer(&partition);
    writes.seek(SeekFrom::Start(WITHIN as u64)).unwrap();
    writes.write_all(&vec![0xa5; 64 << 10]).unwrap();
    drop(writes);
    fs::write(WRITE_PROTECT, "1").unwrap();
    let detached = detach(&engine, &target, 1);
    fs::write(WRITE_PROTECT, "0").unwrap();
    drop((held, reader));
    let failure = detached.expect_err("what was written is lost");
    assert_eq!(failure.kind(), ErrorKind::Io, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    assert!(node.exists() && !failure.receipt.safe_to_unmap);
    udevd::settle();
    let abandon = DetachRequest::new(unit(&target, 1)).abandon_unwritten();
    assert!(!engine.detach(abandon, soon()).unwrap().safe_to_unmap);
}

#[test]
fn a_silent_file_server_delays_no_detach() {
    let (engine, target) = (Arc::new(engine()), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    udevd::settle();
    let fuse = StuckFuse::mount_at("/tmp/stuck");
    let open = File::open(fuse.path()).unwrap();
    // A file system without a device, whose source is a path on that file server.
    fs::create_dir_all("/tmp/beside").unwrap();
    let source = fuse.path().join("source");
    let kind = Some("tmpfs");
    mount(
        Some(&source),
        "/tmp/beside",
        kind,
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    let claimed = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_EXCL)
        .open(&node)
        .unwrap();
    let (done, detached) = mpsc::channel();
    let (own, source) = (Arc::clone(&engine), unit(&target, 1));
    std::thread::spawn(move || {
        let deadline = Deadline::after(Duration::from_secs(10));
        done.send(own.detach(source, deadline)).unwrap();
    });
    let refused = detached.recv_timeout(Duration::from_secs(20));
    drop(claimed);
    umount("/tmp/beside").unwrap();
    fs::remove_dir("/tmp/beside").unwrap();
    let failure = refused
        .expect("the detach hangs past its deadline")
        .unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    let us = format!("open in process {}", std::process::id());
    assert!(failure.to_string().contains(&us), "{failure}");
    udevd::settle();
    assert!(detach(&engine, &target, 1).unwrap().safe_to_unmap);
    drop((open, fuse));
}

/// The source of a mount is any text, and a link below it may lead anywhere.
#[test]
fn a_mount_from_a_link_into_a_hung_file_server_is_named_and_delays_no_call() {
    let (engine, target) = (Arc::new(engine()), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    udevd::settle();
    let fuse = StuckFuse::mount_at("/tmp/stuck");
    let link = Path::new("/tmp/link");
    symlink(fuse.path().join("source"), link).unwrap();
    fs::create_dir_all("/tmp/beside").unwrap();
    let kind = Some("tmpfs");
    let flags = MsFlags::empty();
    mount(Some(link), "/tmp/beside", kind, flags, None::<&str>).unwrap();
    let claimed = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_EXCL)
        .open(&node)
        .unwrap();
    let (done, answers) = mpsc::channel();
    let (own, source) = (Arc::clone(&engine), unit(&target, 1));
    std::thread::spawn(move || {
        let refused = own.detach(source, Deadline::after(Duration::from_secs(20)));
        done.send((own.inventory(), refused)).unwrap();
    });
    let answers = answers.recv_timeout(Duration::from_secs(60));
    // The waiting calls return from the kernel.
    drop((claimed, fuse));
    umount("/tmp/beside").unwrap();
    fs::remove_dir("/tmp/beside").unwrap();
    fs::remove_file(link).unwrap();
    let (inventory, refused) = answers.expect("a call hangs past its deadline");
    let path = link.to_owned();
    let unseen = [NotLookedAt::Path { path }];
    assert_eq!(inventory.unwrap().not_looked_at, unseen);
    let failure = refused.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    udevd::settle();
    assert!(detach(&engine, &target, 1).unwrap().safe_to_unmap);
}

#[test]
fn a_loop_device_whose_file_server_hangs_is_named_and_holds_up_no_detach_of_another_disk() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(3));
    for lun in [1, 2] {
        attach(&engine, &target, lun);
    }
    let fuse = StuckFuse::answering_at("/tmp/stuck");
    let device = LoopDevice::on(&fuse.file());
    udevd::settle();
    // No mount shows any more that the backing file is on a file server.
    fuse.detach_mount();
    fuse.hang();
    let deadline = || Deadline::after(Duration::from_secs(60));
    let detached = [1, 2].map(|lun| engine.detach(unit(&target, lun), deadline()));
    // The waiting calls return from the kernel.
    drop(fuse);
    let unseen = NotLookedAt::LoopDevice {
        device: device.name(),
    };
    drop(device);
    for detachment in detached {
        let receipt = detachment.unwrap().receipt.unwrap();
        assert_eq!(receipt.not_looked_at, std::slice::from_ref(&unseen));
    }
}

#[test]
fn a_writer_of_a_generic_node_of_the_disk_is_refused_by_name_and_a_reader_is_not() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    udevd::settle();
    let device = Path::new("/sys/block").join(node.file_name().unwrap());
    let device = device.join("device");
    for (class, directory) in [("scsi_generic", ""), ("bsg", "bsg/")] {
        let mut names = fs::read_dir(device.join(class)).unwrap();
        let name = names.next().unwrap().unwrap().file_name();
        let generic = format!("{directory}{}", name.display());
        let writes = writer(&Path::new("/dev").join(&generic));
        let failure = detach(&engine, &target, 1).unwrap_err();
        drop(writes);
        assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
        let text = failure.to_string();
        assert!(text.contains(&us_writing()), "{text}");
        assert!(text.contains(&format!("as {generic}")), "{text}");
        assert!(node.exists() && !failure.receipt.safe_to_unmap);
    }
    let generic = fs::read_dir(device.join("scsi_generic")).unwrap();
    let mut names = generic.map(|entry| entry.unwrap().file_name());
    let reader = File::open(Path::new("/dev").join(names.next().unwrap())).unwrap();
    assert!(detach(&engine, &target, 1).unwrap().safe_to_unmap);
    drop(reader);
}

#[test]
fn a_writer_of_a_generic_node_of_a_device_without_a_disk_is_refused_by_name() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    attach(&engine, &target, 1);
    udevd::settle();
    // As of a tape or an enclosure, which has no disk either.
    let device = target.device_dir(1);
    let address = device.file_name().unwrap().to_str().unwrap();
    fs::write("/sys/bus/scsi/drivers/sd/unbind", address).unwrap();
    udevd::settle();
    assert!(target.disk(1).is_none());
    for (class, directory) in [("scsi_generic", ""), ("bsg", "bsg/")] {
        let mut names = fs::read_dir(device.join(class)).unwrap();
        let name = names.next().unwrap().unwrap().file_name();
        let generic = format!("{directory}{}", name.display());
        let writes = writer(&Path::new("/dev").join(&generic));
        let failure = detach(&engine, &target, 1).expect_err("its writer loses it");
        drop(writes);
        assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
        let text = failure.to_string();
        assert!(text.contains(&us_writing()), "{text}");
        assert!(text.contains(&format!("as {generic}")), "{text}");
        assert!(device.exists() && !failure.receipt.safe_to_unmap);
    }
    assert!(detach(&engine, &target, 1).unwrap().safe_to_unmap);
}

#[test]
fn a_path_on_a_file_server_that_hangs_holds_up_no_detach_past_its_deadline() {
    let engine = Arc::new(engine());
    let fuse = StuckFuse::mount_at("/tmp/stuck");
    let path = fuse.path().join("link-to-a-disk");
    let (done, detached) = mpsc::channel();
    let own = Arc::clone(&engine);
    std::thread::spawn(move || {
        let deadline = Deadline::after(Duration::from_secs(5));
        done.send(own.detach(DetachTarget::Device(path), deadline))
            .unwrap();
    });
    let refused = detached.recv_timeout(Duration::from_secs(20));
    // The kernel returns from the calls that wait.
    drop(fuse);
    let failure = refused
        .expect("the detach hangs past its deadline")
        .unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Resolve), "{failure}");
    assert!(failure.to_string().contains("/tmp/stuck"), "{failure}");
}

#[test]
fn a_disk_in_which_ocfs2_writes_its_heartbeat_is_refused_by_the_name_of_the_region() {
    let target = ScsiDebug::options().luns(2).size_mib(16).load();
    let engine = engine();
    let node = attach(&engine, &target, 1).node;
    let heartbeat = Heartbeat::on(&node);
    let failure = detach(&engine, &target, 1).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse);
    let text = failure.to_string();
    assert!(
        text.contains("open in the kernel (o2hb lunbd/REGION)"),
        "{text}"
    );
    assert!(node.exists());
    drop(heartbeat);
    assert!(detach(&engine, &target, 1).unwrap().safe_to_unmap);
}
