//! An orchestrator's questions about a volume: how large and how full it is.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use lunbd::engine::FileSystem;
use lunbd::{Deadline, ErrorKind};
use nix::mount::{MsFlags, mount, umount};
use serde_json::Value;
use vm_tests::guest::agent::{attach, detach, engine, soon};
use vm_tests::guest::stuck_fuse::StuckFuse;
use vm_tests::guest::{self, ScsiDebug};

const MIB: u64 = 1 << 20;

/// The output of coreutils' stat: blocks, free and available ones, their size, inodes and free
/// inodes.
fn stat(path: &str) -> [u64; 6] {
    let words = guest::run(&["stat", "-f", "-c", "%b %f %a %S %c %d", path]);
    let words: Vec<u64> = words
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    words.try_into().unwrap()
}

#[test]
fn a_volume_says_its_bytes_and_when_mounted_what_statvfs_says() {
    const MOUNT: &str = "/tmp/capacity";
    let (engine, target) = (engine(), ScsiDebug::options().luns(2).size_mib(16).load());
    let attached = attach(&engine, &target, 1);
    let node = attached.node.to_str().unwrap();
    let bare = engine.capacity(&attached.node, soon()).unwrap();
    assert_eq!((bare.bytes, bare.file_systems.len()), (16 * MIB, 0));

    guest::run(&["mkfs.ext4", "-q", "-F", node]);
    fs::create_dir_all(MOUNT).unwrap();
    guest::run(&["mount", "-t", "ext4", node, MOUNT]);
    fs::write(format!("{MOUNT}/file"), vec![7; 3 << 20]).unwrap();
    guest::run(&["sync"]);
    let link = attached.links.first().unwrap_or(&attached.node);
    let full = engine.capacity(link, soon()).unwrap();
    println!("{full:?}");
    let [
        FileSystem {
            device,
            path,
            usage: Some(usage),
            error: None,
            ..
        },
    ] = &*full.file_systems
    else {
        panic!("{full:?}");
    };
    assert_eq!((full.bytes, *device), (16 * MIB, attached.devno));
    assert_eq!(path.to_str(), Some(MOUNT));
    let [blocks, free, available, size, inodes, free_inodes] = stat(MOUNT);
    assert_eq!(usage.total_bytes, blocks * size);
    assert_eq!(usage.used_bytes, (blocks - free) * size);
    assert_eq!(usage.available_bytes, available * size);
    assert_eq!(
        (usage.total_inodes, usage.free_inodes),
        (inodes, free_inodes)
    );
    assert!(usage.used_bytes >= 3 * MIB && usage.used_inodes > 0);

    let listed = guest::lunbd(&["list", "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let shown = &listed["units"][0]["file_systems"][0]["usage"];
    assert_eq!(shown["used_bytes"], usage.used_bytes);
    let table = String::from_utf8(guest::lunbd(&["list"]).stdout).unwrap();
    println!("{table}");
    assert!(table.contains("USED") && table.contains('%'), "{table}");
    guest::run(&["umount", MOUNT]);
    fs::remove_dir(MOUNT).unwrap();
    let bare = engine.capacity(&attached.node, soon()).unwrap();
    assert_eq!(bare.file_systems.len(), 0);

    // The volume reports the file system of a partition too, by either node.
    fs::write("/tmp/layout", "start=2048, size=16384\n").unwrap();
    guest::run(&["sh", "-c", &format!("sfdisk -q {node} < /tmp/layout")]);
    let partition = format!("{node}1");
    guest::udevd::settle();
    guest::run(&["mkfs.ext4", "-q", "-F", &partition]);
    fs::create_dir_all(MOUNT).unwrap();
    guest::run(&["mount", "-t", "ext4", &partition, MOUNT]);
    for asked in [node, &partition] {
        let full = engine.capacity(Path::new(asked), soon()).unwrap();
        let usage = full.file_systems[0].usage.as_ref().unwrap();
        assert_eq!((full.bytes, full.file_systems.len()), (16 * MIB, 1));
        assert!(
            (6 * MIB..=8 * MIB).contains(&usage.total_bytes),
            "{usage:?}"
        );
    }
    guest::run(&["umount", MOUNT]);
    fs::remove_dir(MOUNT).unwrap();
    detach(&engine, &target, 1).unwrap();
    let gone = engine.capacity(&attached.node, soon()).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

#[test]
fn file_servers_that_hang_do_not_delay_the_capacity_of_a_volume_past_its_deadline() {
    let (engine, target) = (engine(), ScsiDebug::options().luns(2).size_mib(16).load());
    let node = attach(&engine, &target, 1).node;
    let fuse = StuckFuse::mount_at("/tmp/stuck");
    let place = |at: usize| format!("/tmp/beside{at}");
    let link = |at: usize| format!("/tmp/link{at}");
    // Without the deadline, a lookup of the first of these takes two seconds, and all take six.
    let sources = 0..4;
    for at in sources.clone() {
        symlink(fuse.path().join("source"), link(at)).unwrap();
        fs::create_dir(place(at)).unwrap();
        let (kind, flags) = (Some("tmpfs"), MsFlags::empty());
        mount(Some(&*link(at)), &*place(at), kind, flags, None::<&str>).unwrap();
    }
    let deadline = Deadline::after(Duration::from_secs(1));
    let answer = engine.capacity(&node, deadline);
    let took = deadline.elapsed();
    // The lookups return from the kernel.
    drop(fuse);
    for at in sources {
        umount(&*place(at)).unwrap();
        fs::remove_dir(place(at)).unwrap();
        fs::remove_file(link(at)).unwrap();
    }
    let answer = answer.unwrap();
    assert_eq!(answer.bytes, 16 * MIB);
    assert!(!answer.not_looked_at.is_empty(), "{answer:?}");
    assert!(took < Duration::from_secs(4), "{took:?}");
    assert!(detach(&engine, &target, 1).unwrap().safe_to_unmap);
}
