//! One unit at two LUNs of one target, 1 and 16385 (1 in flat space): LIO presents one volume
//! under both.

use std::fs;

use lunbd::error::Stage;
use lunbd::id::{Addressing, Lun, Wwid};
use lunbd::{AttachRequest, Attachment, DetachRequest, Engine, ErrorKind, Source};
use vm_tests::guest::agent::{attach, engine, soon, unit};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Session, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::{self, ScsiDebug};

const IQN: &str = "iqn.2026-01.example:aliases";
const LOW: u64 = 1;
const FLAT: u64 = 16_385;

/// The fields are dropped in this order.
struct Lab {
    engine: Engine,
    session: Session,
    _iscsid: Iscsid,
    _target: IscsiTarget,
    store: Store,
}

impl Lab {
    fn new(serial: &str) -> Self {
        let engine = engine();
        let store = Store::ramdisk(serial, 8 << 20);
        let mut target = IscsiTarget::new(IQN);
        target.map(LOW, &store);
        target.map(FLAT, &store);
        let iscsid = Iscsid::start();
        let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
        Self {
            engine,
            session,
            _iscsid: iscsid,
            _target: target,
            store,
        }
    }

    /// The source by address, because an iSCSI source can name LUN 1 in only one way.
    fn source(&self, lun: u64) -> Source {
        let dir = self.session.device_dir(lun);
        let hctl = dir.file_name().unwrap().to_str().unwrap();
        format!("scsi:{hctl}").parse().unwrap()
    }

    fn attach(&self, lun: u64) -> Attachment {
        let request = AttachRequest::new(self.source(lun));
        self.engine.attach(&request, soon()).unwrap()
    }

    fn wwid(&self) -> Wwid {
        self.store.wwid().parse().unwrap()
    }

    fn there(&self) -> Vec<u64> {
        let there = [LOW, FLAT].into_iter();
        there
            .filter(|lun| self.session.device_dir(*lun).exists())
            .collect()
    }

    fn detach_by_alias(&self, lun: u64) {
        let error = self.engine.detach(self.source(lun), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(error.stage(), Some(Stage::Resolve));
        assert!(error.to_string().contains("(--expect)"), "{error}");
        assert_eq!(self.there().len(), 1);
        let request = DetachRequest::new(self.source(lun)).expect(self.wwid());
        let detachment = self.engine.detach(request, soon()).unwrap();
        assert!(detachment.changed && detachment.safe_to_unmap);
        assert_eq!(self.there(), [] as [u64; 0]);
    }
}

fn is_one(first: &Attachment, second: &Attachment) {
    assert_eq!(second.node, first.node);
    assert_eq!(second.devno, first.devno);
    assert_eq!(second.diskseq, first.diskseq);
    assert_eq!(second.hctl(), first.hctl());
}

#[test]
fn a_unit_attached_at_one_lun_is_the_same_disk_at_the_other() {
    let lab = Lab::new("a1");
    assert_eq!(
        Lun::from_kernel(FLAT).addressing(),
        Addressing::Flat(u16::try_from(LOW).unwrap())
    );
    for (first, second) in [(LOW, FLAT), (FLAT, LOW)] {
        let one = lab.attach(first);
        assert!(one.changed && one.identity().unwrap().is(&lab.wwid()));
        let other = lab.attach(second);
        assert!(!other.changed);
        is_one(&one, &other);
        assert_eq!(lab.there(), [first]);
        lab.detach_by_alias(second);
    }
}

#[test]
fn both_luns_in_one_attach_are_one_path() {
    let lab = Lab::new("b1");
    let both = AttachRequest::new(lab.source(FLAT)).path(lab.source(LOW));
    let attachment = lab.engine.attach(&both, soon()).unwrap();
    assert_eq!(attachment.paths().len(), 1, "{attachment:?}");
    assert!(attachment.changed);
    assert_eq!(lab.there().len(), 1);
    let error = lab.engine.attach(&both.min_paths(2), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooFewPaths, "{error}");
    assert_eq!(lab.there().len(), 1, "it was there before");
    let by_name = DetachRequest::new(lab.source(LOW)).expect(lab.wwid());
    assert!(lab.engine.detach(by_name, soon()).unwrap().safe_to_unmap);
    assert_eq!(lab.there(), [] as [u64; 0]);
}

#[test]
fn both_luns_attached_at_once_are_one_disk() {
    let lab = Lab::new("c1");
    for _ in 0..8 {
        let (low, flat) = std::thread::scope(|scope| {
            let low = scope.spawn(|| lab.attach(LOW));
            let flat = scope.spawn(|| lab.attach(FLAT));
            (low.join().unwrap(), flat.join().unwrap())
        });
        is_one(&low, &flat);
        assert_eq!(lab.there().len(), 1);
        let missing = if lab.there() == [LOW] { FLAT } else { LOW };
        lab.detach_by_alias(missing);
    }
}

#[test]
fn an_alias_that_somebody_scanned_by_hand_is_never_handed_out_beside_the_first() {
    let lab = Lab::new("d1");
    let one = lab.attach(LOW);
    let host = one.hctl().unwrap().host;
    fs::write(format!("/sys/class/scsi_host/host{host}/scan"), "- - -").unwrap();
    guest::wait_until("the alias", soon().remaining(), || lab.session.disk(FLAT));
    assert_eq!(lab.there(), [LOW, FLAT]);
    for lun in [LOW, FLAT] {
        let again = lab.attach(lun);
        assert!(!again.changed);
        is_one(&one, &again);
    }
    // The other process's device stays until the unit is detached.
    assert_eq!(lab.there(), [LOW, FLAT]);
    let detachment = lab.engine.detach(lab.source(FLAT), soon()).unwrap();
    assert_eq!(detachment.receipt.unwrap().paths.len(), 2);
    assert_eq!(lab.there(), [] as [u64; 0]);
}

/// `scsi_debug` includes the LUN's address in the identity, so an alias is another unit there.
#[test]
fn two_luns_that_say_they_are_two_units_are_two_disks() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(300));
    let one = attach(&engine, &target, LOW);
    let other = attach(&engine, &target, FLAT);
    assert!(
        !one.identity()
            .unwrap()
            .compare(other.identity().unwrap())
            .is_proven_same()
    );
    assert_ne!(one.node, other.node);
    assert_eq!(target.devices().len(), 2);
    for lun in [LOW, FLAT] {
        engine.detach(unit(&target, lun), soon()).unwrap();
    }
    assert_eq!(target.devices(), [] as [&str; 0]);
}
