//! The users of a multipath map. A refused detach changes nothing.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use lunbd::engine::Multipath;
use lunbd::{AttachRequest, Attachment, DetachTarget, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};

const IQN: &str = "iqn.2026-01.example:in-use";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn scsi_devices() -> Vec<String> {
    let mut names = guest::entries("/sys/bus/scsi/devices");
    names.retain(|name| name.matches(':').count() == 3);
    names
}

/// A map of two paths.
struct Unit {
    engine: Engine,
    attachment: Attachment,
    source: Source,
    multipathd: Multipathd,
    // The fields are dropped in this order.
    _iscsid: Iscsid,
    _target: IscsiTarget,
}

impl Unit {
    fn attach() -> Self {
        let engine = engine();
        let store = Store::ramdisk("a1", 64 * MIB);
        let mut target = IscsiTarget::new(IQN);
        target.map(1, &store);
        let iscsid = Iscsid::start();
        let multipathd = Multipathd::start(NoPath::Queue);
        for portal in &PORTALS[..2] {
            let _session = iscsid.login(portal, IQN, Timeouts::default());
        }
        let source: Source = target.uri(&[0, 1], 1).parse().unwrap();
        let request = AttachRequest::new(source.clone())
            .min_paths(2)
            .multipath(Multipath::Require);
        let attachment = engine.attach(&request, soon()).unwrap();
        Self {
            engine,
            attachment,
            source,
            multipathd,
            _iscsid: iscsid,
            _target: target,
        }
    }

    fn node(&self) -> &str {
        self.attachment.node.to_str().unwrap()
    }

    fn map(&self) -> &str {
        self.node().strip_prefix("/dev/").unwrap()
    }

    /// Requires that a detach, by any name of the unit, is refused with this text and changes
    /// nothing.
    fn is_refused(&self, by: &str) {
        let targets = [
            DetachTarget::Device(self.attachment.node.clone()),
            self.source.clone().into(),
            DetachTarget::Device(self.attachment.paths()[1].node.clone()),
        ];
        let table = || guest::run(&["dmsetup", "table", self.node()]);
        let before = table();
        for target in targets {
            let failure = self.engine.detach(target, soon()).unwrap_err();
            assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
            assert!(failure.to_string().contains(by), "no {by:?}: {failure}");
            let receipt = &failure.receipt;
            assert!(!receipt.safe_to_unmap && !receipt.map.as_ref().unwrap().gone);
            assert!(receipt.paths.iter().all(|path| !path.gone), "{receipt:?}");
        }
        assert_eq!(multipathd::maps(), [self.map()]);
        assert_eq!(scsi_devices().len(), 2);
        assert_eq!(table(), before);
        for path in self.attachment.paths() {
            let name = path.node.file_name().unwrap().to_str().unwrap();
            assert!(self.multipathd.knows(name), "{name}");
        }
    }

    fn goes(&self) {
        let detachment = self.engine.detach(self.source.clone(), soon()).unwrap();
        assert!(detachment.safe_to_unmap, "{detachment:?}");
        assert_eq!(detachment.receipt.unwrap().paths.len(), 2);
        assert_eq!(guest::entries("/dev/mapper"), ["control"]);
        assert_eq!(multipathd::maps(), [] as [&str; 0]);
        assert_eq!(scsi_devices(), [] as [&str; 0]);
    }
}

struct Mounted(&'static str);

impl Mounted {
    fn make(node: &str, at: &'static str) -> Self {
        guest::run(&["mkfs.ext4", "-q", "-F", node]);
        fs::create_dir_all(at).unwrap();
        guest::run(&["mount", "-t", "ext4", node, at]);
        Self(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn each_user_of_a_map_prevents_its_detach_and_an_unused_map_is_removed() {
    let unit = Unit::attach();
    let mounted = Mounted::make(unit.node(), "/tmp/in use");
    unit.is_refused("mounted on /tmp/in use");
    fs::write("/tmp/in use/file", "still written to").unwrap();
    drop(mounted);

    let table = format!("0 2048 linear {} 0", unit.node());
    guest::run(&["dmsetup", "create", "on-top", "--table", &table]);
    let holders = guest::entries(format!("/sys/block/{}/holders", unit.map()));
    assert_eq!(holders.len(), 1, "{holders:?}");
    unit.is_refused(&format!("held by {}", holders[0]));
    guest::udevd::settle();
    guest::run(&["dmsetup", "remove", "--retry", "on-top"]);

    guest::udevd::settle();
    let us = format!("open in process {}", std::process::id());
    let exclusive = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_EXCL)
        .open(unit.node())
        .unwrap();
    unit.is_refused(&us);
    drop(exclusive);
    let shared = File::open(unit.node()).unwrap();
    unit.is_refused(&us);
    drop(shared);
    unit.goes();
}

/// Two partitions and their maps, by kpartx.
fn partitioned(unit: &Unit) -> Vec<String> {
    let mut sfdisk = Command::new("sfdisk")
        .args(["--no-reread", "--no-tell-kernel", "-q", unit.node()])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut table = sfdisk.stdin.take().unwrap();
    table.write_all(b",16MiB\n,16MiB\n").unwrap();
    drop(table);
    assert!(sfdisk.wait().unwrap().success());
    // udev's rule calls kpartx as well, and one of two concurrent calls fails.
    guest::udevd::settle();
    guest::run(&["kpartx", "-a", "-s", "-p", "-part", unit.node()]);
    guest::udevd::settle();
    guest::wait_until("the partitions' maps", LIMIT, || {
        let mut holders = guest::entries(format!("/sys/block/{}/holders", unit.map()));
        holders.sort();
        (holders.len() == 2).then_some(holders)
    })
}

#[test]
fn partition_maps_are_removed_with_their_map_and_all_stay_while_one_is_mounted() {
    let unit = Unit::attach();
    let parts = partitioned(&unit);
    for (mounted, part) in parts.iter().enumerate() {
        let file_system = Mounted::make(&format!("/dev/{part}"), "/tmp/partition");
        unit.is_refused("mounted on /tmp/partition");
        let mut stand = guest::entries(format!("/sys/block/{}/holders", unit.map()));
        stand.sort();
        assert_eq!(stand, parts, "with partition {mounted} mounted");
        drop(file_system);
    }
    // Besides the partitions, another device holds the map.
    let table = format!("0 2048 linear {} 0", unit.node());
    guest::run(&["dmsetup", "create", "on-top", "--table", &table]);
    unit.is_refused("held by");
    for part in &parts {
        assert!(fs::exists(format!("/sys/block/{part}")).unwrap(), "{part}");
    }
    guest::udevd::settle();
    guest::run(&["dmsetup", "remove", "--retry", "on-top"]);
    unit.goes();
}
