//! Each kind of user, against each way to remove a device.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lunbd::engine::{ReapOutcome, ReapRequest};
use lunbd::{AttachRequest, Attachment, Deadline, DetachTarget, Engine, Error, ErrorKind, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::disk_users::{DiskUser, Nodes};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::partition_maps::PartitionMaps;
use vm_tests::guest::queueing_map::QueueingMap;
use vm_tests::guest::{self, ScsiDebug, partitioned, udevd};

const LIMIT: Duration = Duration::from_secs(60);
/// A place in the first partition after ext4's own data.
const WITHIN: usize = partitioned::FIRST + (6 << 20);

/// Each refusal names the user, and changes nothing.
const REFUSED: &str = "refused";
/// Nothing is lost.
const ALLOWED: &str = "allowed";
/// The page of the crate's documentation with the table.
const GUIDE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../src/guide/scsi.md"));

/// The result for each user, in the order of [`DiskUser::ALL`].
type Column = Vec<(DiskUser, &'static str)>;
/// A way to remove a device: its name, and the function that tries it with each user.
type Way = (&'static str, fn() -> Column);

fn attach(engine: &Engine, source: &str) -> Attachment {
    let request = AttachRequest::new(source.parse::<Source>().unwrap());
    engine.attach(&request, soon()).unwrap()
}

/// The disk once its partitions are there.
fn nodes(disk: &Path) -> Nodes {
    let name = disk.display().to_string();
    let between = if name.ends_with(|c: char| c.is_ascii_digit()) {
        "p"
    } else {
        ""
    };
    let partition = |number| PathBuf::from(format!("{name}{between}{number}"));
    let nodes = Nodes {
        disk: disk.to_owned(),
        first: partition(1),
        second: partition(2),
    };
    guest::wait_until("its partitions", LIMIT, || {
        (nodes.first.exists() && nodes.second.exists()).then_some(())
    });
    udevd::settle();
    nodes
}

fn partitioned_disk(attachment: &Attachment) -> Nodes {
    partitioned::write_to(&attachment.node);
    guest::run(&["blockdev", "--rereadpt", attachment.node.to_str().unwrap()]);
    nodes(&attachment.node)
}

/// Requires that each of these users causes a refusal that names it, and that the device stays.
fn refused(
    column: &mut Column,
    users: impl IntoIterator<Item = DiskUser>,
    (nodes, udevd_runs): (&Nodes, bool),
    act: &dyn Fn() -> Option<Error>,
) {
    for user in users {
        // After a writer's close udevd makes the kernel read the partition table again, and the
        // partitions are gone for a moment.
        if udevd_runs {
            udevd::settle();
        }
        let held = user.begin(nodes);
        let error = act().unwrap_or_else(|| panic!("{user:?} was not refused"));
        assert_eq!(error.kind(), ErrorKind::InUse, "{user:?}: {error}");
        let text = error.to_string();
        assert!(user.is_named_in(&text), "{user:?}: {text}");
        assert!(nodes.disk.exists(), "{user:?}");
        drop(held);
        column.push((user, REFUSED));
    }
}

fn but_readers() -> impl Iterator<Item = DiskUser> {
    let all = DiskUser::ALL.into_iter();
    all.filter(|user| *user != DiskUser::Reader)
}

/// Leaves data in the page cache. A reader prevents its writeback.
fn write_within(disk: &Path) -> Vec<u8> {
    let data = vec![0x3c; 64 << 10];
    let mut writer = OpenOptions::new().write(true).open(disk).unwrap();
    writer.seek(SeekFrom::Start(WITHIN as u64)).unwrap();
    writer.write_all(&data).unwrap();
    data
}

fn read_within(path: &Path, length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    let mut file = File::open(path).unwrap();
    file.seek(SeekFrom::Start(WITHIN as u64)).unwrap();
    file.read_exact(&mut data).unwrap();
    data
}

fn detach_scsi() -> Column {
    let target = ScsiDebug::options().luns(3).size_mib(16).load();
    let engine = engine();
    let at = |lun: u32| format!("scsi:{}:0:0:{lun}", target.host());
    let detach = |lun| engine.detach(at(lun).parse::<Source>().unwrap(), soon());
    let nodes = partitioned_disk(&attach(&engine, &at(1)));
    let mut column = Column::new();
    let act = || detach(1).err().map(Error::from);
    refused(&mut column, but_readers(), (&nodes, true), &act);
    let reader = DiskUser::Reader.begin(&nodes);
    let data = write_within(&nodes.disk);
    assert!(detach(1).unwrap().safe_to_unmap);
    drop(reader);
    // All LUNs share one store.
    let beside = attach(&engine, &at(2)).node;
    assert!(read_within(&beside, data.len()) == data, "it is lost");
    detach(2).unwrap();
    column.push((DiskUser::Reader, ALLOWED));
    column
}

fn detach_map() -> Column {
    let (target, sources) = ScsiDebug::two_paths_of(16);
    let engine = engine();
    let disks: Vec<PathBuf> = sources
        .iter()
        .map(|source| attach(&engine, source).paths().last().unwrap().node.clone())
        .collect();
    partitioned::write_to(&disks[0]);
    udevd::settle();
    let udev = udevd::stopped();
    let map = QueueingMap::over(&disks);
    let disk = map.node();
    let act = || {
        let target = DetachTarget::Device(disk.clone());
        engine.detach(target, soon()).err().map(Error::from)
    };
    let mut column = Column::new();
    for user in DiskUser::ALL {
        if user == DiskUser::WriterOfQueueingMap {
            let writer = OpenOptions::new().write(true).open(&disk).unwrap();
            map.set_paths(false);
            let error = act().expect("a refusal");
            assert!(user.is_named_in(&error.to_string()), "{error}");
            assert!(map.queues());
            map.set_paths(true);
            drop(writer);
            column.push((user, REFUSED));
            continue;
        }
        let (parts, nodes) = if user.uses_partition() {
            let (parts, nodes) = PartitionMaps::of(&disk);
            (Some(parts), nodes)
        } else {
            let nodes = Nodes {
                disk: disk.clone(),
                first: PathBuf::new(),
                second: PathBuf::new(),
            };
            (None, nodes)
        };
        refused(&mut column, [user], (&nodes, false), &act);
        drop(parts);
    }
    assert_eq!(target.devices().len(), 2);
    drop((map, udev));
    column
}

fn replace() -> Column {
    let target = ScsiDebug::options().luns(4).hosts(2).size_mib(16).load();
    target.set("vpd_use_hostno", 1);
    let engine = engine();
    let source = format!("scsi:{}:0:0:3", target.hosts()[1]);
    let nodes = partitioned_disk(&attach(&engine, &source));
    target.set("vpd_use_hostno", 0);
    let request = AttachRequest::new(source.parse::<Source>().unwrap());
    let act = || engine.attach(&request, soon()).err();
    let mut column = Column::new();
    refused(&mut column, DiskUser::ALL, (&nodes, true), &act);
    udevd::settle();
    assert!(engine.attach(&request, soon()).unwrap().changed);
    engine
        .detach(source.parse::<Source>().unwrap(), soon())
        .unwrap();
    column
}

fn reap() -> Column {
    let target = ScsiDebug::options().luns(4).size_mib(16).load();
    let engine = engine();
    let at = |lun: u32| format!("scsi:{}:0:0:{lun}", target.host());
    attach(&engine, &at(0));
    let nodes = partitioned_disk(&attach(&engine, &at(3)));
    let act = || {
        target.set("max_luns", 2);
        let reaping = engine.reap(&ReapRequest::default(), soon()).unwrap();
        target.set("max_luns", 4);
        let [stale_lun] = <[_; 1]>::try_from(reaping.stale_luns).expect("one stale LUN");
        match stale_lun.outcome {
            ReapOutcome::Skipped(error) => Some(error),
            _ => None,
        }
    };
    let mut column = Column::new();
    refused(&mut column, DiskUser::ALL, (&nodes, true), &act);
    udevd::settle();
    assert!(act().is_none(), "nobody uses it");
    column
}

fn detach_nbd() -> Column {
    let _module = NbdModule::load(4);
    let store = Store::sparse(16 << 20);
    partitioned::write_to(store.path());
    let server = NbdServer::qemu_nbd(At::unix(), "disk", store.path(), &[]);
    let engine = engine();
    let disk = attach(&engine, &server.uri("disk")).node;
    let nodes = nodes(&disk);
    let detach = |limit| {
        let target = DetachTarget::Device(disk.clone());
        engine.detach(target, Deadline::after(limit))
    };
    let mut column = Column::new();
    let act = || detach(LIMIT).err().map(Error::from);
    for user in but_readers() {
        if matches!(
            user,
            DiskUser::WriterOfGeneric | DiskUser::WriterOfQueueingMap
        ) {
            // An NBD device has neither of these users.
            column.push((user, "-"));
        } else {
            refused(&mut column, [user], (&nodes, true), &act);
        }
    }
    let reader = DiskUser::Reader.begin(&nodes);
    let data = write_within(&disk);
    udevd::settle();
    // The kernel disconnects at once, and frees the index at the last close.
    let error = detach(Duration::from_secs(25)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    drop(reader);
    assert!(read_within(store.path(), data.len()) == data, "it is lost");
    let pid = Path::new("/sys/block").join(disk.file_name().unwrap());
    let pid = pid.join("pid");
    guest::wait_until("the device to be free", LIMIT, || {
        (!pid.exists()).then_some(())
    });
    column.push((DiskUser::Reader, ALLOWED));
    column
}

/// The table as it must be in the guide.
fn table(heads: &[&str], columns: &[Column]) -> String {
    let mut lines = vec![
        format!("| user | {} |", heads.join(" | ")),
        format!("|---|{}", "---|".repeat(heads.len())),
    ];
    for (row, user) in DiskUser::ALL.into_iter().enumerate() {
        let cells = columns.iter().map(|column| {
            assert_eq!(column[row].0, user);
            column[row].1
        });
        let cells: Vec<&str> = cells.collect();
        lines.push(format!("| {} | {} |", user.title(), cells.join(" | ")));
    }
    lines.join("\n")
}

#[test]
fn each_way_to_remove_a_device_refuses_each_user_by_name_or_loses_nothing() {
    guest::time_limit(Duration::from_mins(20));
    let ways: [Way; 5] = [
        ("detach SCSI", detach_scsi),
        ("detach map", detach_map),
        ("replace", replace),
        ("reap", reap),
        ("detach NBD", detach_nbd),
    ];
    let mut heads = Vec::new();
    let mut columns = Vec::new();
    for (head, way) in ways {
        let begun = std::time::Instant::now();
        let column = way();
        guest::tell(&format!("{head}: {:?}", begun.elapsed()));
        heads.push(head);
        columns.push(column);
    }
    let table = table(&heads, &columns);
    table.lines().for_each(guest::tell);
    assert!(GUIDE.contains(&table), "the guide has another table");
}
