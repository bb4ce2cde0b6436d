//! The search on a machine that is a directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::kernel::Devices;
use crate::kernel::devices::tests::Named;

fn put(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// A machine without a user of its disk, which has one partition.
struct Machine {
    _root: tempfile::TempDir,
    roots: Roots,
    disk: BlockDevice,
}

impl Machine {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let partition = DevNo { major: 8, minor: 1 };
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named("/dev/sda1", partition))),
            ..Roots::below(root.path())
        };
        let dir = roots.sysfs.join("block/sda");
        put(&dir.join("dev"), "8:0\n");
        put(&dir.join("sda1/dev"), "8:1\n");
        put(&dir.join("sda1/partition"), "1\n");
        put(&roots.proc.join("self/mountinfo"), "");
        let disk = BlockDevice::at(&dir).unwrap().unwrap();
        Self {
            _root: root,
            roots,
            disk,
        }
    }

    /// Lets process 77 have the file at `path` open.
    fn open(&self, path: &str, writes: bool) {
        let process = self.roots.proc.join("77");
        put(&process.join("comm"), "sg_dd\n");
        put(&process.join("task/77/comm"), "sg_dd\n");
        let flags = if writes {
            "flags:\t02\n"
        } else {
            "flags:\t00\n"
        };
        put(&process.join("fdinfo/3"), flags);
        fs::create_dir_all(process.join("fd")).unwrap();
        symlink(path, process.join("fd/3")).unwrap();
    }

    fn users(&self, extent: Extent) -> Users {
        let disks = std::slice::from_ref(&self.disk);
        read(&self.roots, disks, extent, soon()).unwrap().remove(0)
    }
}

/// How a use begins, the user that is reported, and whether an exclusive open excludes it.
type Use = (fn(&Machine), Holder, bool);

#[test]
fn each_user_of_a_partition_is_a_user_of_the_disk() {
    let cases: [Use; 5] = [
        (
            |machine| {
                let line = "36 35 8:1 / /mnt rw - ext4 /dev/sda1 rw\n";
                put(&machine.roots.proc.join("self/mountinfo"), line);
            },
            Holder::Mount {
                path: "/mnt".into(),
                pid: None,
            },
            true,
        ),
        (
            |machine| put(&machine.disk.dir().join("sda1/holders/dm-0"), ""),
            Holder::Stacked {
                device: "dm-0".to_owned(),
            },
            true,
        ),
        (
            |machine| {
                let swaps = "Filename Type Size Used Priority\n/dev/sda1 partition 8 0 -2\n";
                put(&machine.roots.proc.join("swaps"), swaps);
            },
            Holder::Swap {
                device: DevNo { major: 8, minor: 1 },
            },
            true,
        ),
        (
            |machine| {
                let backing = machine.roots.sysfs.join("block/loop0/loop/backing_file");
                put(&backing, "/dev/sda1\n");
            },
            Holder::Loop {
                device: "loop0".to_owned(),
            },
            false,
        ),
        (
            |machine| {
                let target = machine.roots.sysfs.join("kernel/config/target");
                let info = target.join("core/iblock_0/a/info");
                put(&info, "Major: 8 Minor: 1  CLAIMED: IBLOCK\n");
            },
            Holder::Export {
                volume: "iblock_0/a".to_owned(),
            },
            false,
        ),
    ];
    for (begin, holder, is_exclusive) in cases {
        let machine = Machine::new();
        assert_eq!(machine.users(Extent::All).found, []);
        begin(&machine);
        let users = machine.users(Extent::All);
        assert_eq!(users.found, std::slice::from_ref(&holder));
        assert_eq!(users.not_looked_at, []);
        let beside = machine.users(Extent::NotExcludedByClaim).found;
        assert_eq!(beside.is_empty(), is_exclusive, "{holder}");
    }
}

#[test]
fn a_process_that_writes_to_a_disks_character_device_is_a_user_and_one_that_reads_is_none() {
    let of_diskless = |machine: &Machine| {
        let device = machine.disk.dir().join("device");
        read_diskless(&machine.roots, &device, soon())
            .unwrap()
            .found
    };
    for writes in [true, false] {
        let machine = Machine::new();
        // The process has `/dev/null` open, and the disk's node has the number of that.
        let class = machine.disk.dir().join("device/scsi_generic");
        put(&class.join("sg0/dev"), "1:3\n");
        put(&class.join("sg1/dev"), "1:5\n");
        machine.open("/dev/null", writes);
        let holder = Holder::Generic {
            pid: 77,
            command: "sg_dd".to_owned(),
            node: "sg0".to_owned(),
        };
        let expected: Vec<Holder> = writes.then_some(holder).into_iter().collect();
        assert_eq!(machine.users(Extent::NotExcludedByClaim).found, expected);
        assert_eq!(of_diskless(&machine), expected);
    }
}

#[test]
fn each_place_that_cannot_be_looked_at_is_named_whatever_the_disk() {
    let machine = Machine::new();
    let roots = &machine.roots;
    let proc = roots.proc.display();
    let mounts = format!("37 35 0:22 / {proc} rw - proc proc rw,hidepid=2\n");
    put(&roots.proc.join("self/mountinfo"), &mounts);
    let backing = roots.sysfs.join("block/loop0/loop/backing_file");
    put(&backing, "/none/there\n");
    let core = roots.sysfs.join("kernel/config/target/core");
    let info = "File: /none/there  Size: 8388608  Mode: O_DSYNC\n";
    put(&core.join("fileio_0/a/info"), info);
    fs::create_dir_all(roots.sysfs.join("module/nvmet")).unwrap();
    let expected = [
        NotLookedAt::HiddenProcesses,
        NotLookedAt::LoopDevice {
            device: "loop0".to_owned(),
        },
        NotLookedAt::Target {
            module: "nvmet".into(),
        },
        NotLookedAt::TargetVolume {
            volume: "fileio_0/a".to_owned(),
        },
    ];
    let users = machine.users(Extent::All);
    assert_eq!(users.not_looked_at, expected);
    assert_eq!(read_places_not_looked_at(roots, soon()).unwrap(), expected);
    let error = users.refuse_unless_all_seen(&machine.disk).unwrap_err();
    assert!(error.to_string().contains("fileio_0/a"), "{error}");
    let without_hidepid = mounts.replace("hidepid=2", "hidepid=0");
    put(&roots.proc.join("self/mountinfo"), &without_hidepid);
    assert_eq!(machine.users(Extent::All).not_looked_at, expected[1..]);
}

#[test]
fn only_the_process_that_connects_an_nbd_device_by_ioctl_is_no_user_of_it() {
    let root = tempfile::tempdir().unwrap();
    let mut roots = Roots::below(root.path());
    let (us, number) = (std::process::id(), "43:0".parse::<DevNo>().unwrap());
    let dir = roots.sysfs.join("block/nbd0");
    put(&dir.join("dev"), "43:0\n");
    // The number of a thread, such as one of qemu-nbd.
    put(&dir.join("pid"), "78\n");
    let disk = BlockDevice::at(&dir).unwrap().unwrap();
    let mut found_of = |process: u32| {
        let process = roots.proc.join(process.to_string());
        put(&process.join("task/78/comm"), "qemu-nbd\n");
        put(&process.join("fdinfo/3"), "flags:\t02\n");
        let descriptor = process.join("fd/3");
        put(&descriptor, "");
        let path: &'static str = descriptor.to_str().unwrap().to_owned().leak();
        roots.devices = Devices::Other(Arc::new(Named(path, number)));
        let mut search = UserSearch::of_disks(std::slice::from_ref(&disk)).unwrap();
        search.read_processes(&roots, soon()).unwrap();
        search.found.concat().len()
    };
    assert_eq!(found_of(77), 0);
    assert_eq!(found_of(us), 1, "we write");
    put(&dir.join("pid"), "79\n");
    assert_eq!(found_of(77), 1, "another process connected it");
    put(&dir.join("pid"), "78\n");
    put(&dir.join("backend"), "mine\n");
    assert_eq!(found_of(77), 1, "it was connected over netlink");
}
