//! Which names prove that two devices lead to one unit: two tgt daemons that give their units
//! equal names, and a LIO unit whose product text changes.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use lunbd::engine::{DetachTarget, DetachVolume, Flush, Multipath, ReapRequest};
use lunbd::error::Stage;
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};
use serde_json::Value;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::INITIATOR;
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{Multipathd, NoPath};
use vm_tests::guest::tgt::Tgt;
use vm_tests::guest::{self, entries};

const BYTES: u64 = 8 << 20;
const FIRST: (&str, &str) = ("127.0.0.1:3260", "iqn.2026-01.example:first");
const SECOND: (&str, &str) = ("127.0.0.2:3260", "iqn.2026-01.example:second");
/// tgt makes this name only from the numbers of the target and of the LUN.
const BOTH: &str = "naa.3000000100000001";

/// Two daemons as on two hosts: each has one target, number 1, with LUN 1.
fn two_daemons() -> [Tgt; 2] {
    iscsi_tcp::prepare();
    let start = |port, (portal, iqn)| Tgt::start(port, portal, iqn, BYTES);
    [start("0", FIRST), start("1", SECOND)]
}

fn source((portal, iqn): (&str, &str)) -> Source {
    format!("iscsi://{portal}/{iqn}/1").parse().unwrap()
}

fn request(source: Source) -> AttachRequest {
    AttachRequest::new(source).log_in(SessionOptions::new(INITIATOR.parse().unwrap()))
}

fn attach(engine: &Engine, source: Source) -> Attachment {
    engine.attach(&request(source), soon()).unwrap()
}

fn node_of(attachment: &Attachment) -> DetachTarget {
    DetachTarget::Device(attachment.node.clone())
}

fn write(node: &Path, byte: u8) {
    let disk = OpenOptions::new().write(true).open(node).unwrap();
    disk.write_all_at(&[byte; 4096], 0).unwrap();
    disk.sync_all().unwrap();
}

/// A byte of the disk itself, not of the page cache.
fn read(node: &Path) -> u8 {
    guest::run(&["blockdev", "--flushbufs", node.to_str().unwrap()]);
    let mut block = [0; 4096];
    let disk = fs::File::open(node).unwrap();
    disk.read_exact_at(&mut block, 0).unwrap();
    block[0]
}

#[test]
fn a_detach_leaves_the_volume_of_another_target_that_has_the_same_local_names() {
    let [first, second] = two_daemons();
    let engine = engine();
    let kept = attach(&engine, source(SECOND));
    write(&kept.node, b'2');
    for by_node in [true, false] {
        let gone = attach(&engine, source(FIRST));
        assert_eq!(gone.identity(), kept.identity());
        assert!(gone.identity().unwrap().is(&BOTH.parse().unwrap()));
        assert_ne!(gone.node, kept.node);
        write(&gone.node, b'1');
        assert_eq!((read(&gone.node), read(&kept.node)), (b'1', b'2'));
        let target = if by_node {
            node_of(&gone)
        } else {
            source(FIRST).into()
        };
        let detachment = engine.detach(target, soon()).unwrap();
        assert!(!gone.node.exists());
        assert!(kept.node.exists(), "the other volume's disk went too");
        assert_eq!(read(&kept.node), b'2');
        assert_eq!(detachment.receipt.as_ref().unwrap().paths.len(), 1);
        assert_eq!(detachment.flush, Some(Flush::Done));
        assert_eq!((first.connections(), second.connections()), (0, 1));
    }
    let both = attach(&engine, source(FIRST));
    let by_name: DetachTarget = format!("unit:{BOTH}").parse().unwrap();
    let error = engine.detach(by_name, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    for attachment in [&both, &kept] {
        let hctl = attachment.hctl().unwrap().to_string();
        assert!(error.to_string().contains(&hctl), "{error}");
        assert!(attachment.node.exists());
        engine.detach(node_of(attachment), soon()).unwrap();
    }
    nothing_is_left();
}

#[test]
fn a_journal_keeps_two_volumes_with_equal_local_names_apart() {
    let _daemons = two_daemons();
    let place = format!("/tmp/identity-{}", std::process::id());
    let engine = engine();
    let journal = engine.open_journal_at(place.as_ref(), soon()).unwrap();
    let [gone, kept] = [("gone", FIRST), ("kept", SECOND)].map(|(volume, at)| {
        let volume = volume.parse().unwrap();
        let attached = engine.attach_volume(&journal, &volume, &request(source(at)), soon());
        (volume, attached.unwrap())
    });
    for survey in engine.survey(&journal).unwrap() {
        assert_eq!(survey.paths.len(), 1, "{survey:?}");
        assert!(survey.node.is_some(), "{survey:?}");
    }
    for reattached in [&gone, &kept].map(|(volume, _)| volume) {
        let at = if *reattached == gone.0 { FIRST } else { SECOND };
        let again = engine.attach_volume(&journal, reattached, &request(source(at)), soon());
        assert!(!again.unwrap().changed);
    }
    let how = DetachVolume::default();
    engine
        .detach_volume(&journal, &gone.0, &how, soon())
        .unwrap();
    assert!(!gone.1.node.exists());
    assert!(kept.1.node.exists(), "the other volume's disk went too");
    let recovered = engine.recover(&journal, soon()).unwrap();
    assert!(kept.1.node.exists(), "{recovered:?}");
    engine
        .detach_volume(&journal, &kept.0, &how, soon())
        .unwrap();
    nothing_is_left();
    drop(journal);
    fs::remove_dir_all(&place).unwrap();
}

#[test]
fn a_map_holds_the_paths_of_one_target_and_a_path_of_another_with_the_same_names_is_refused() {
    iscsi_tcp::prepare();
    let _multipathd = Multipathd::start(NoPath::Fail);
    let (portal, iqn) = FIRST;
    let portals = [portal, "127.0.0.3:3260"];
    let _first = Tgt::with("0", &portals, iqn, &[1], BYTES);
    let second = Tgt::start("1", SECOND.0, SECOND.1, BYTES);
    let engine = engine();
    let two_portals = || source((&portals.join(","), iqn));
    let both = request(two_portals()).min_paths(2);
    let attached = engine.attach(&both.multipath(Multipath::Require), soon());
    let map = attached.unwrap();
    write(&map.node, b'1');
    let listed = guest::lunbd(&["list", "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let [unit] = listed["units"].as_array().unwrap().as_slice() else {
        panic!("{listed}");
    };
    assert_eq!(unit["weakly_identified"], true, "{unit}");
    assert_eq!(unit["paths"].as_array().unwrap().len(), 2, "{unit}");

    // multipathd adds its disk to the map, because it has the same name.
    let error = engine.attach(&request(source(SECOND)), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    assert_eq!(error.stage(), Some(Stage::Map), "{error}");
    assert_eq!(second.connections(), 0);
    let name = map.node.file_name().unwrap().to_str().unwrap();
    assert_eq!(entries(format!("/sys/block/{name}/slaves")).len(), 2);
    assert_eq!(read(&map.node), b'1');

    let by_one_path = DetachTarget::Device(map.paths()[0].node.clone());
    let detachment = engine.detach(by_one_path, soon()).unwrap();
    assert_eq!(detachment.receipt.as_ref().unwrap().paths.len(), 2);
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    nothing_is_left();
}

#[test]
fn a_map_belongs_to_its_unit_also_if_its_wwid_comes_from_another_udev_property() {
    iscsi_tcp::prepare();
    // 0x6001405..., as the settings of some vendors have it.
    let _multipathd = Multipathd::naming_by("ID_WWN_WITH_EXTENSION");
    let store = Store::file("5a5a0002", 8 << 20);
    let mut target = IscsiTarget::new(FIRST.1);
    target.map(1, &store);
    let engine = engine();
    let at = source((PORTALS[0], FIRST.1));
    let attached = engine.attach(&request(at.clone()).multipath(Multipath::Require), soon());
    let map = attached.unwrap();
    let name = map.node.file_name().unwrap().to_str().unwrap();
    let uuid = fs::read_to_string(format!("/sys/block/{name}/dm/uuid")).unwrap();
    assert!(uuid.starts_with("mpath-0x6001405"), "{uuid}");
    let detachment = engine.detach(at, soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    nothing_is_left();
}

#[test]
fn a_unit_whose_product_text_changes_while_its_registered_name_stays_is_the_same_unit() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::file("5a5a0001", 64 << 20);
    let mut target = IscsiTarget::new(FIRST.1);
    target.map(1, &store);
    let at = || source((PORTALS[0], FIRST.1));
    let attached = attach(&engine, at());
    let node = attached.node.to_str().unwrap();
    guest::run(&["mkfs.ext4", "-q", "-F", node]);
    let place = Path::new("/tmp/identity-mounted");
    fs::create_dir_all(place).unwrap();
    guest::run(&["mount", "-t", "ext4", node, place.to_str().unwrap()]);
    let mut firmware = 0;
    let mut upgrade = |target: &mut IscsiTarget| {
        firmware += 1;
        target.unmap(1);
        store.set_product(&format!("firmware-{firmware}"));
        target.map(1, &store);
    };
    guest::run(&["sync"]);
    upgrade(&mut target);
    let mounted = engine.attach(&request(at()), soon());
    let written = fs::write(place.join("file"), "kept");
    guest::run(&["umount", place.to_str().unwrap()]);
    fs::remove_dir(place).unwrap();
    let mounted = mounted.unwrap();
    written.unwrap();
    assert!(!mounted.changed && mounted.node == attached.node);

    upgrade(&mut target);
    let idle = engine.attach(&request(at()), soon()).unwrap();
    assert!(!idle.changed, "an idle disk was deleted");
    assert_eq!(idle.diskseq, attached.diskseq);

    upgrade(&mut target);
    let reaping = engine.reap(&ReapRequest::default(), soon()).unwrap();
    assert!(reaping.stale_luns.is_empty(), "{reaping:?}");
    let detachment = engine.detach(at(), soon()).unwrap();
    assert_eq!(detachment.flush, Some(Flush::Done));
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    nothing_is_left();
    assert!(entries("/sys/class/iscsi_host").is_empty());
}
