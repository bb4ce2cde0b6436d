//! Attaches over iSCSI sessions, some of which are dead, duplicated, crowded or lead to another
//! target.

use std::time::Duration;

use lunbd::engine::{Multipath, StageObserver, Unit};
use lunbd::error::Stage;
use lunbd::transport::RouteKind;
use lunbd::{AttachRequest, Attachment, Deadline, DetachTarget, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};

const IQN: &str = "iqn.2026-01.example:attach";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn source(target: &IscsiTarget, portals: &[usize], lun: u64) -> Source {
    target.uri(portals, lun).parse().unwrap()
}

fn scsi_devices() -> Vec<String> {
    let mut names = guest::entries("/sys/bus/scsi/devices");
    names.retain(|name| name.matches(':').count() == 3);
    names
}

fn missing(attachment: &Attachment) -> Vec<String> {
    let Unit::Scsi { missing, .. } = &attachment.unit else {
        return vec![format!("no SCSI unit: {attachment:?}")];
    };
    missing.iter().map(ToString::to_string).collect()
}

#[test]
fn an_attach_succeeds_with_one_dead_portal_and_the_next_attach_adds_its_path() {
    let engine = engine();
    let store = Store::ramdisk("a1", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let iscsid = Iscsid::start();
    let _multipathd = Multipathd::start(NoPath::Fail);
    let [_, second] = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));
    target.portal_down(1);
    second.wait_for_state("FAILED", LIMIT);
    let request = AttachRequest::new(source(&target, &[0, 1], 1)).multipath(Multipath::Require);
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_eq!(attachment.paths().len(), 1);
    let missing_paths = missing(&attachment);
    assert_eq!(missing_paths.len(), 1);
    assert!(
        missing_paths[0].contains(PORTALS[1]) && missing_paths[0].contains("FAILED"),
        "{missing_paths:?}"
    );

    target.portal_up(1);
    second.wait_for_state("LOGGED_IN", LIMIT);
    let both = engine.attach(&request, soon()).unwrap();
    assert_eq!(both.node, attachment.node, "the map has one path more");
    assert!(both.changed);
    let changed: Vec<bool> = both.paths().iter().map(|path| path.changed).collect();
    assert_eq!(changed, [false, true]);
    assert_eq!(missing(&both), [] as [&str; 0]);
    let detachment = engine.detach(source(&target, &[0], 1), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(scsi_devices(), [] as [&str; 0]);
}

#[test]
fn two_sessions_through_one_portal_are_two_paths_and_both_go() {
    let engine = engine();
    let store = Store::ramdisk("a2", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let iscsid = Iscsid::start();
    let _multipathd = Multipathd::start(NoPath::Fail);
    let first = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let second = iscsid.login_again(&first);
    let request = AttachRequest::new(source(&target, &[0], 1))
        .min_paths(2)
        .multipath(Multipath::Require);
    let attachment = engine.attach(&request, soon()).unwrap();
    let sessions: Vec<u32> = attachment
        .paths()
        .iter()
        .map(|path| match &path.via {
            RouteKind::Iscsi {
                session: Some(id), ..
            } => id.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(sessions, [first.id, second.id]);
    let detachment = engine.detach(source(&target, &[0], 1), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(detachment.receipt.unwrap().paths.len(), 2);
    assert_eq!(scsi_devices(), [] as [&str; 0]);
    assert_eq!(multipathd::maps(), [] as [&str; 0]);
}

#[test]
fn only_the_requested_lun_of_sixty_four_luns_appears() {
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    let stores: Vec<Store> = (0..64)
        .map(|lun| Store::ramdisk(&format!("{lun:02x}5"), MIB))
        .collect();
    for (lun, store) in (0..).zip(&stores) {
        target.map(lun, store);
    }
    let iscsid = Iscsid::start();
    let sessions = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));
    let request = AttachRequest::new(source(&target, &[0, 1], 37)).min_paths(2);
    let attachment = engine.attach(&request, soon()).unwrap();
    let name = stores[37].wwid().parse().unwrap();
    assert!(attachment.identity().unwrap().is(&name));
    guest::udevd::settle();
    let mut expected = sessions.map(|session| format!("{}:0:0:37", session.host));
    let mut found = scsi_devices();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
    engine
        .detach(DetachTarget::Device(attachment.node), soon())
        .unwrap();
    assert_eq!(scsi_devices(), [] as [&str; 0]);
}

/// Two targets with one volume each, requested as if they were two paths to one unit.
fn two_units_for_one(multipathd: bool) {
    const OTHER: &str = "iqn.2026-01.example:other";
    let engine = engine();
    let stores = ["b1", "c2"].map(|serial| Store::ramdisk(serial, 8 * MIB));
    let mut targets = [IQN, OTHER].map(IscsiTarget::new);
    for (target, store) in targets.iter_mut().zip(&stores) {
        target.map(1, store);
    }
    let iscsid = Iscsid::start();
    let multipathd = multipathd.then(|| Multipathd::start_mapping_every_disk(NoPath::Fail));
    let [_, second] = [IQN, OTHER].map(|iqn| iscsid.login(PORTALS[0], iqn, Timeouts::default()));
    let mut request = AttachRequest::new(source(&targets[0], &[0], 1))
        .path(source(&targets[1], &[0], 1))
        .min_paths(2);
    if multipathd.is_some() {
        // multipathd is as fast as possible: it has a map of each disk before the attach reads
        // any identity.
        request = request.observe(StageObserver::new(|stage| {
            if stage == Stage::Identify {
                guest::wait_until("multipathd's maps", LIMIT, || {
                    (multipathd::maps().len() == 2).then_some(())
                });
            }
        }));
    }
    // A path has half of the time, and waits for the maps in it too.
    let patient = || Deadline::after(4 * LIMIT);
    let error = engine.attach(&request, patient()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    for store in &stores {
        assert!(error.to_string().contains(&store.wwid()), "{error}");
    }
    assert_eq!(scsi_devices(), [] as [&str; 0], "{error:#}");
    assert_eq!(multipathd::maps(), [] as [&str; 0]);

    // An existing device stays unchanged.
    let disk = second.scanned_disk(1);
    guest::udevd::settle();
    let error = engine.attach(&request, patient()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    assert_eq!(second.disk(1), Some(disk));
    assert_eq!(scsi_devices(), [format!("{}:0:0:1", second.host)]);
    let left = engine.detach(source(&targets[1], &[0], 1), soon()).unwrap();
    assert!(left.safe_to_unmap, "{left:?}");
    drop(multipathd);
}

#[test]
fn paths_to_two_units_are_refused_and_their_new_devices_are_removed() {
    two_units_for_one(false);
}

#[test]
fn paths_to_two_units_are_refused_and_multipathds_maps_of_them_are_removed() {
    two_units_for_one(true);
}
