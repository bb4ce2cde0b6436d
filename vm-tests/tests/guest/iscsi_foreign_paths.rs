//! Paths of a unit that the caller has not named: one that leads to another unit by now,
//! and one whose names the kernel has not read.

use std::fs;
use std::io::Write as _;
use std::time::Duration;

use lunbd::engine::{Flush, Multipath, Unit};
use lunbd::id::Hctl;
use lunbd::iscsi::SessionOptions;
use lunbd::{
    AttachRequest, Attachment, DetachRequest, DetachTarget, Engine, ErrorKind, Result, Source,
};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_proxy::IscsiProxy;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, Iscsid, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{Multipathd, NoPath};

const IQN: &str = "iqn.2026-01.example:foreign";
const BYTES: u64 = 8 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// A volume that two targets present.
struct Array {
    engine: Engine,
    targets: [IscsiTarget; 2],
    store: Store,
}

impl Array {
    fn presenting(store: Store) -> Self {
        iscsi_tcp::prepare();
        let mut targets = ["a", "b"].map(|name| IscsiTarget::new(&format!("{IQN}-{name}")));
        for target in &mut targets {
            target.map(1, &store);
        }
        Self {
            engine: engine(),
            targets,
            store,
        }
    }

    fn source(&self, target: usize) -> Source {
        self.targets[target].uri(&[target], 1).parse().unwrap()
    }

    fn attach(&self, targets: &[usize], multipath: Multipath) -> Result<Attachment> {
        let options = SessionOptions::new(INITIATOR.parse().unwrap());
        let mut sources = targets.iter().map(|&target| self.source(target));
        let request = AttachRequest::new(sources.next().unwrap());
        let request = sources.fold(request, AttachRequest::path);
        let request = request.multipath(multipath).log_in(options);
        let request = request.min_paths(targets.len());
        self.engine.attach(&request, soon())
    }
}

/// Where the path over the second target is.
fn second_path(attached: &Attachment) -> Hctl {
    attached.paths().last().unwrap().hctl
}

#[test]
fn a_map_with_a_path_that_leads_to_another_unit_by_now_is_not_handed_out() {
    let multipathd = Multipathd::start(NoPath::Fail);
    let mut array = Array::presenting(Store::ramdisk("a6101", BYTES));
    let attached = array.attach(&[0, 1], Multipath::Require).unwrap();
    let other = Store::ramdisk("a6102", BYTES);
    array.targets[1].remap(1, &other);
    let again = array.attach(&[0], Multipath::Prefer);
    let store = array.store.clone();
    array.targets[1].remap(1, &store);
    let error = again.expect_err("the map writes to another unit as well");
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    let said = error.to_string();
    let hctl = second_path(&attached).to_string();
    assert!(
        said.contains(&hctl) && said.contains(&other.wwid()),
        "{said}"
    );
    // It is left as it was, and is handed out again where all is well.
    let again = array.attach(&[0], Multipath::Prefer).unwrap();
    assert_eq!(again.node, attached.node);
    let detachment = array.engine.detach(array.source(0), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    drop(multipathd);
    nothing_is_left();
}

#[test]
fn a_map_that_was_removed_unflushed_because_another_unit_answers_leaves_a_doubt() {
    let multipathd = Multipathd::start(NoPath::Fail);
    let mut array = Array::presenting(Store::ramdisk("a6105", BYTES));
    array.attach(&[0], Multipath::Require).unwrap();
    array.targets[0].remap(1, &Store::ramdisk("a6106", BYTES));
    let name = array.store.wwid().parse().unwrap();
    let request = DetachRequest::new(DetachTarget::Unit(name));
    let detach = |request: &DetachRequest| array.engine.detach(request.clone(), soon()).unwrap();
    let first = detach(&request);
    assert!(first.changed && !first.safe_to_unmap, "{first:?}");
    let flush = first.receipt.unwrap().map.unwrap().flush;
    assert!(matches!(flush, Some(Flush::Replaced(_))), "{flush:?}");
    let again = detach(&request);
    assert!(!again.changed && !again.safe_to_unmap, "{again:?}");
    let abandoning = request.clone().abandon_unwritten();
    assert!(!detach(&abandoning).safe_to_unmap);
    let accepted = detach(&request);
    assert!(accepted.safe_to_unmap, "{accepted:?}");
    array.engine.detach(array.source(0), soon()).unwrap();
    drop(multipathd);
    nothing_is_left();
}

#[test]
fn a_map_is_flushed_although_one_of_its_targets_has_no_such_lun_any_more() {
    let multipathd = Multipathd::start(NoPath::Fail);
    let mut array = Array::presenting(Store::file("a6107", BYTES));
    let attached = array.attach(&[0, 1], Multipath::Require).unwrap();
    let mut map = fs::OpenOptions::new()
        .write(true)
        .open(&attached.node)
        .unwrap();
    map.write_all(&[0x5a; 4096]).unwrap();
    array.targets[1].unmap(1);
    drop(map);
    let detachment = array.engine.detach(array.source(0), soon()).unwrap();
    array.targets[1].map(1, &array.store);
    let receipt = detachment.receipt.as_ref().unwrap();
    let flush = &receipt.map.as_ref().unwrap().flush;
    assert_eq!(*flush, Some(Flush::Done), "{receipt:?}");
    assert_eq!(receipt.paths.len(), 2, "{receipt:?}");
    assert!(detachment.safe_to_unmap, "{receipt:?}");
    let data = fs::read(array.store.path().unwrap()).unwrap();
    assert!(data[..4096].iter().all(|&byte| byte == 0x5a));
    drop(multipathd);
    nothing_is_left();
}

#[test]
fn a_path_outside_the_units_map_is_not_handed_out_beside_the_map() {
    let mut multipathd = Multipathd::start(NoPath::Fail);
    let array = Array::presenting(Store::ramdisk("a6104", BYTES));
    let mapped = array.attach(&[0], Multipath::Require).unwrap();
    multipathd.stop();
    let beside = array.attach(&[1], Multipath::Prefer);
    let error = beside.expect_err("the map is the unit's other page cache");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let Unit::Scsi { map: Some(map), .. } = &mapped.unit else {
        panic!("{mapped:?}");
    };
    assert!(error.to_string().contains(map), "{error}");
    // Where the caller turns multipath off, it has decided so.
    let raw = array.attach(&[1], Multipath::Off).unwrap();
    assert_ne!(raw.node, mapped.node);
    // A path that is in use stays as it is.
    let user = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&raw.node);
    let again = array.attach(&[1], Multipath::Prefer).unwrap();
    assert_eq!((again.node, again.changed), (raw.node, false));
    drop(user.unwrap());
    multipathd.start_again();
    array.engine.detach(array.source(0), soon()).unwrap();
    drop(multipathd);
    nothing_is_left();
}

/// Of [`PORTALS`]' other target, by a proxy.
const PROXY: &str = "127.0.0.9:3260";

#[test]
fn a_path_without_a_name_in_sysfs_is_found_by_the_identity_that_it_reports() {
    let array = Array::presenting(Store::ramdisk("a6103", BYTES));
    array.attach(&[0], Multipath::Off).unwrap();
    let iscsid = Iscsid::start();
    let proxy = IscsiProxy::start(PROXY, PORTALS[1]);
    let session = iscsid.login(PROXY, array.targets[1].iqn(), Timeouts::default());
    proxy.hide_pages(true);
    session.scan(1);
    let device = session.device_dir(1);
    guest::wait_until("the disk", LIMIT, || session.disk(1));
    guest::udevd::settle();
    proxy.hide_pages(false);
    assert!(!device.join("vpd_pg83").exists());
    let detachment = array.engine.detach(array.source(0), soon()).unwrap();
    let stands = device.exists();
    if stands {
        fs::write(device.join("delete"), "1").unwrap();
    }
    session.logout();
    assert!(
        !(detachment.safe_to_unmap && stands),
        "safe, and a path stands: {detachment:?}"
    );
    assert!(!stands, "{detachment:?}");
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(detachment.receipt.unwrap().paths.len(), 2);
    drop((iscsid, proxy));
    nothing_is_left();
}
