//! Stale LUNs of an iSCSI target: LIO's answers for a LUN that it no longer presents.

use std::time::Duration;

use lunbd::engine::{Evidence, Multipath, ReapOutcome, ReapReport, ReapRequest, StaleLun};
use lunbd::{AttachRequest, Attachment, DetachRequest, DetachTarget, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{Multipathd, NoPath};

const IQN: &str = "iqn.2026-01.example:reap";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn attach(engine: &Engine, target: &IscsiTarget, lun: u64) -> Attachment {
    let source: Source = target.uri(&[0], lun).parse().unwrap();
    engine.attach(&AttachRequest::new(source), soon()).unwrap()
}

fn reap(engine: &Engine) -> ReapReport {
    let reaping = engine.reap(&ReapRequest::default(), soon()).unwrap();
    println!("{reaping:?}");
    reaping
}

#[track_caller]
fn only(reaping: ReapReport) -> StaleLun {
    let [stale_lun] = <[StaleLun; 1]>::try_from(reaping.stale_luns).expect("one stale LUN");
    stale_lun
}

#[track_caller]
fn is_reaped(engine: &Engine, attachment: &Attachment) -> Evidence {
    let stale_lun = only(reap(engine));
    assert_eq!(stale_lun.node, attachment.node);
    assert!(
        matches!(stale_lun.outcome, ReapOutcome::Reaped),
        "{stale_lun:?}"
    );
    assert!(!attachment.node.exists());
    stale_lun.evidence
}

#[test]
fn luns_that_the_array_no_longer_presents_are_reaped_and_a_lost_session_proves_nothing() {
    let engine = engine();
    let [zero, gone, moved, other, stays] =
        ["a0", "b1", "c2", "d2", "e3"].map(|serial| Store::ramdisk(serial, 16 * MIB));
    let mut target = IscsiTarget::new(IQN);
    for (lun, store) in [&zero, &gone, &moved, &stays].into_iter().enumerate() {
        target.map(u64::try_from(lun).unwrap(), store);
    }
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let units: Vec<_> = (0..4).map(|lun| attach(&engine, &target, lun)).collect();
    let nothing = reap(&engine);
    assert!(nothing.stale_luns.is_empty() && nothing.unproven.is_empty());

    target.unmap(1);
    let refused = Evidence::NotSupported { command: "INQUIRY" };
    assert_eq!(is_reaped(&engine, &units[1]), refused);

    target.remap(2, &other);
    let Evidence::Replaced { now } = is_reaped(&engine, &units[2]) else {
        panic!("another unit answers");
    };
    assert!(now.is(&other.wwid().parse().unwrap()), "{now}");

    // LIO has a unit of its own at LUN 0, which answers REPORT LUNS.
    target.unmap(0);
    let placeholder = Evidence::NoUnit {
        qualifier: 1,
        device_type: 0x1f,
    };
    assert_eq!(is_reaped(&engine, &units[0]), placeholder);

    target.unmap(3);
    target.portal_down(0);
    session.wait_for_state("FAILED", LIMIT);
    let down = reap(&engine);
    assert!(down.stale_luns.is_empty(), "{down:?}");
    assert_eq!(down.unproven.len(), 1);
    assert!(units[3].node.exists());
    target.portal_up(0);
    session.wait_for_state("LOGGED_IN", LIMIT);
    assert_eq!(is_reaped(&engine, &units[3]), refused);
}

#[test]
fn a_stale_lun_in_a_map_is_skipped_and_a_detach_of_the_unit_removes_both() {
    let engine = engine();
    let store = Store::ramdisk("f1", 16 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let iscsid = Iscsid::start();
    let _multipathd = Multipathd::start(NoPath::Fail);
    for portal in &PORTALS[..2] {
        let _session = iscsid.login(portal, IQN, Timeouts::default());
    }
    let source: Source = target.uri(&[0, 1], 1).parse().unwrap();
    let request = AttachRequest::new(source.clone())
        .min_paths(2)
        .multipath(Multipath::Require);
    let attachment = engine.attach(&request, soon()).unwrap();
    target.unmap(1);
    let reaping = reap(&engine);
    assert_eq!(reaping.stale_luns.len(), 2);
    let map = attachment.node.file_name().unwrap().to_str().unwrap();
    for stale_lun in &reaping.stale_luns {
        let ReapOutcome::Skipped(error) = &stale_lun.outcome else {
            panic!("{stale_lun:?}");
        };
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(
            error.to_string().contains(&format!("held by {map}")),
            "{error}"
        );
    }
    engine.detach(source, soon()).unwrap();
    assert!(!attachment.node.exists());
    assert!(reap(&engine).stale_luns.is_empty());
    // A map that lost its paths before it was flushed leaves a record, until a caller accepts the
    // loss.
    let unit = DetachTarget::Unit(store.wwid().parse().unwrap());
    let accepting = DetachRequest::new(unit).abandon_unwritten();
    engine.detach(accepting, soon()).unwrap();
    let left = guest::entries("/run/lunbd");
    assert!(
        !left.iter().any(|name| name.starts_with("lost-")),
        "{left:?}"
    );
}
