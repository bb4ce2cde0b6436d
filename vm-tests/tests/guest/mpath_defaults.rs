//! multipathd as its package configures it, and with each value of `find_multipaths`: an attach
//! over several paths gets its map, or reports why there is none.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use lunbd::engine::{Multipath, Unit};
use lunbd::error::Stage;
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon, writes_and_reads};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::INITIATOR;
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd};

const IQN: &str = "iqn.2026-01.example:defaults";
const LUN: u64 = 1;
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const WWIDS: &str = "/etc/multipath/wwids";
/// The limit for an answer that did not wait for a deadline of 60 s.
const AT_ONCE: Duration = Duration::from_secs(25);

/// A unit behind two portals.
struct Rig {
    engine: Engine,
    target: IscsiTarget,
    store: Store,
}

impl Rig {
    fn new(serial: &str) -> Self {
        Self::of(Store::ramdisk(serial, 8 * MIB))
    }

    fn of(store: Store) -> Self {
        iscsi_tcp::prepare();
        let engine = engine();
        let mut target = IscsiTarget::new(IQN);
        target.map(LUN, &store);
        Self {
            engine,
            target,
            store,
        }
    }

    fn source(&self, portals: &[usize]) -> Source {
        self.target.uri(portals, LUN).parse().unwrap()
    }

    fn request(&self, portals: &[usize]) -> AttachRequest {
        let options = SessionOptions::new(INITIATOR.parse().unwrap());
        AttachRequest::new(self.source(portals)).log_in(options)
    }

    /// Attaches, and requires a path over each of these portals.
    fn attach(&self, portals: &[usize]) -> Attachment {
        let request = self.request(portals).min_paths(portals.len());
        self.engine.attach(&request, soon()).unwrap()
    }

    fn detach(&self) {
        let detachment = self.engine.detach(self.source(&[0, 1]), soon()).unwrap();
        assert!(detachment.safe_to_unmap, "{detachment:?}");
        assert_eq!(multipathd::maps(), [] as [&str; 0]);
        nothing_is_left();
    }

    /// The WWID of the unit in the multipath tools: its NAA name after a 3.
    fn wwid(&self) -> String {
        self.store.wwid().replace("naa.", "3")
    }

    fn is_remembered(&self) -> bool {
        let wwids = fs::read_to_string(WWIDS).unwrap_or_default();
        wwids
            .lines()
            .any(|line| line == format!("/{}/", self.wwid()))
    }
}

/// The name of the map, and the reason why there is none.
fn map_and_why(attachment: &Attachment) -> (Option<&str>, Option<&str>) {
    let Unit::Scsi { map, no_map, .. } = &attachment.unit else {
        panic!("{attachment:?}");
    };
    (map.as_deref(), no_map.as_deref())
}

fn defaults(lines: &str) -> Multipathd {
    Multipathd::start_configured(&format!("defaults {{\n{lines}\n}}\n"))
}

/// multipathd maps a single path only if it maps every disk. It always maps two paths of one
/// unit.
fn two_paths_are_a_map(multipathd: &Multipathd, maps_one_path: bool) {
    let rig = Rig::new("d1");
    let alone = rig.attach(&[0]);
    assert_eq!(map_and_why(&alone).0.is_some(), maps_one_path, "{alone:?}");
    assert_eq!(map_and_why(&alone).1, None, "{alone:?}");
    assert_eq!(rig.is_remembered(), maps_one_path);
    rig.detach();

    let both = rig.attach(&[0, 1]);
    assert_eq!(map_and_why(&both), (Some(rig.wwid().as_str()), None));
    assert_eq!(both.paths().len(), 2);
    assert!(rig.is_remembered(), "multipathd writes it down by itself");
    for path in both.paths() {
        let disk = path.node.file_name().unwrap().to_str().unwrap();
        let map = multipathd::map_of(disk).unwrap();
        assert!(both.node.ends_with(map), "{both:?}");
        assert!(multipathd.knows(disk));
    }
    writes_and_reads(&both);
    assert!(!rig.attach(&[0, 1]).changed);
    rig.detach();
}

#[test]
fn the_packaged_multipathd_maps_two_paths_and_one_path_that_requires_a_map() {
    let multipathd = Multipathd::start_as_packaged();
    two_paths_are_a_map(&multipathd, false);
    let rig = Rig::new("d2");
    let alone = rig.request(&[0]).multipath(Multipath::Require);
    let alone = rig.engine.attach(&alone, soon()).unwrap();
    assert_eq!(map_and_why(&alone).0, Some(rig.wwid().as_str()));
    rig.detach();
}

#[test]
fn where_multipathd_finds_multipaths_two_paths_are_a_map() {
    two_paths_are_a_map(&defaults("find_multipaths yes"), false);
}

#[test]
fn where_multipathd_waits_for_a_second_path_two_paths_are_a_map() {
    two_paths_are_a_map(&defaults("find_multipaths smart"), false);
}

#[test]
fn where_multipathd_takes_every_disk_udev_later_two_paths_are_a_map() {
    two_paths_are_a_map(&defaults("find_multipaths no"), true);
}

#[test]
fn where_multipathd_takes_every_disk_at_once_two_paths_are_a_map() {
    two_paths_are_a_map(&defaults("find_multipaths greedy"), true);
}

#[test]
fn a_map_with_a_friendly_name_is_found_by_its_uuid() {
    let _multipathd = defaults("find_multipaths strict\nuser_friendly_names yes");
    let rig = Rig::new("d3");
    let both = rig
        .engine
        .attach(&rig.request(&[0, 1]).multipath(Multipath::Require), soon())
        .unwrap();
    assert_eq!(map_and_why(&both), (Some("mpatha"), None));
    let uuid = format!("mpath-{}", rig.wwid());
    let map = both.node.file_name().unwrap();
    let found = fs::read_to_string(Path::new("/sys/block").join(map).join("dm/uuid"));
    assert_eq!(found.unwrap().trim(), uuid);
    rig.detach();
}

#[test]
fn a_map_named_by_a_vendors_attribute_is_the_units_own() {
    let _multipathd = Multipathd::start_configured("overrides {\n uid_attribute ID_WWN\n}\n");
    let rig = Rig::new("d4");
    let both = rig.attach(&[0, 1]);
    let name = map_and_why(&both).0.expect("a map");
    assert!(name.starts_with("0x6"), "{both:?}");
    assert_eq!(both.paths().len(), 2);
    rig.detach();
}

#[test]
fn an_attach_of_a_blacklisted_unit_returns_a_path_and_the_reason() {
    let _multipathd = Multipathd::start_configured("blacklist {\n wwid \"3600.*\"\n}\n");
    let rig = Rig::new("d5");
    let start = Instant::now();
    let required = rig.request(&[0, 1]).multipath(Multipath::Require);
    let error = rig.engine.attach(&required, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert_eq!(error.stage(), Some(Stage::Map));
    assert!(error.to_string().contains("configuration"), "{error}");
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    nothing_is_left();
    let preferred = rig.attach(&[0, 1]);
    let (map, why) = map_and_why(&preferred);
    assert_eq!(map, None);
    assert!(why.unwrap().contains("configuration"), "{why:?}");
    rig.detach();
}

/// Another claim of a path prevents device-mapper from taking it.
#[test]
fn a_required_map_that_multipathd_cannot_make_is_refused_at_once_and_a_preferred_one_is_explained()
{
    let _multipathd = Multipathd::start_as_packaged();
    let rig = Rig::new("d6");
    let alone = rig.attach(&[0]);
    let claim = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_EXCL)
        .open(&alone.node)
        .unwrap();
    let preferred = rig.attach(&[0, 1]);
    let (map, why) = map_and_why(&preferred);
    assert_eq!(map, None);
    assert!(why.unwrap().contains("\"fail\""), "{why:?}");
    assert_eq!(preferred.node, alone.node);
    let start = Instant::now();
    let required = rig.request(&[0, 1]).multipath(Multipath::Require);
    let error = rig.engine.attach(&required, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains(&rig.wwid()), "{error}");
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    drop(claim);
    let mapped = rig.engine.attach(&required, soon()).unwrap();
    assert_eq!(mapped.paths().len(), 2);
    rig.detach();
}

/// multipathd refuses a path whose size is not the map's.
#[test]
fn a_path_that_multipathd_refuses_is_missing_and_the_others_are_the_map() {
    let _multipathd = Multipathd::start_as_packaged();
    let rig = Rig::of(Store::growable("d7", 8 * MIB));
    let alone = rig.request(&[0]).multipath(Multipath::Require);
    rig.engine.attach(&alone, soon()).unwrap();
    rig.store.grow(16 * MIB);
    let both = rig.engine.attach(&rig.request(&[0, 1]), soon()).unwrap();
    assert!(map_and_why(&both).0.is_some(), "{both:?}");
    assert_eq!(both.paths().len(), 1);
    let Unit::Scsi { missing, .. } = &both.unit else {
        panic!("{both:?}");
    };
    assert_eq!(missing.len(), 1, "{both:?}");
    assert!(missing[0].to_string().contains(PORTALS[1]), "{missing:?}");
    assert!(missing[0].why.contains("multipathd refused"), "{missing:?}");
    let start = Instant::now();
    let two = rig.request(&[0, 1]).min_paths(2);
    let error = rig.engine.attach(&two, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    rig.detach();
}

#[test]
fn a_detach_of_a_path_that_is_refused_leaves_the_path_to_multipathd() {
    let multipathd = Multipathd::start_as_packaged();
    let rig = Rig::of(Store::ramdisk("d9", 16 * MIB));
    let attached = rig.attach(&[0]);
    assert_eq!(map_and_why(&attached), (None, None));
    let node = attached.node.to_str().unwrap();
    let disk = attached.node.file_name().unwrap().to_str().unwrap();
    guest::run(&["mkfs.ext4", "-q", node]);
    fs::create_dir_all("/tmp/lazy").unwrap();
    guest::run(&["mount", "-t", "ext4", node, "/tmp/lazy"]);
    let open = fs::File::create("/tmp/lazy/file").unwrap();
    // No list of mounts has it any more, and the kernel holds the disk.
    guest::run(&["umount", "--lazy", "/tmp/lazy"]);
    guest::udevd::settle();
    guest::wait_until("multipathd to know the path", LIMIT, || {
        multipathd.knows(disk).then_some(())
    });
    let failure = rig.engine.detach(rig.source(&[0]), soon()).unwrap_err();
    let is_known = multipathd.knows(disk);
    drop(open);
    fs::remove_dir("/tmp/lazy").unwrap();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    assert!(is_known, "multipathd was told to forget it: {failure}");
    rig.detach();
}
