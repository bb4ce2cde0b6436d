use std::fs;
use std::num::NonZeroU16;
use std::time::Duration;

use super::*;
use crate::engine::journal::record::Outcome;
use crate::engine::{AttachRequest, NbdOptions};
use crate::kernel::Roots;
use crate::scsi::ScsiDevice;

fn spec(options: NbdOptions) -> VolumeSpec {
    let source: Source = "nbd://192.0.2.1/vol-7".parse().unwrap();
    VolumeSpec::of(&AttachRequest::new(source).nbd(options))
}

#[test]
fn a_volume_that_stands_is_refused_in_what_only_a_new_device_has_and_not_in_its_timeouts() {
    let known = Record {
        volume: "pvc-1".parse().unwrap(),
        spec: spec(NbdOptions::default()),
        intent: None,
        outcome: None,
        boot: None,
        detached: None,
    };
    let two = NonZeroU16::new(2).unwrap();
    for (options, why) in [
        (NbdOptions::default().read_only(), "read-only"),
        (NbdOptions::default().connections(two), "2 connections"),
        (
            NbdOptions::default().block_size(4096),
            "blocks of 4096 bytes",
        ),
    ] {
        let error = refuse_spec_change(&known, &spec(options)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        let text = error.to_string();
        assert!(text.contains(why) && text.contains("pvc-1"), "{text}");
    }
    let slower = NbdOptions::default().io_timeout(Duration::from_secs(90));
    refuse_spec_change(&known, &spec(slower)).unwrap();
}

const OURS: &str = "naa.5000c500a1b2c3d4";
const ANOTHERS: &str = "naa.5000c500a1b2c3d5";
const WEAK: &str = "t10.VENDOR_disk";

fn names(names: &[&str]) -> Vec<Wwid> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn at(source: &str, expect: Option<&str>) -> VolumeSpec {
    let request = AttachRequest::new(source.parse::<Source>().unwrap());
    VolumeSpec::of(&match expect {
        Some(name) => request.expect(name.parse().unwrap()),
        None => request,
    })
}

fn record(spec: VolumeSpec, of_unit: &[&str]) -> Record {
    let outcome = Outcome {
        node: "/dev/sdb".into(),
        devno: "8:16".parse().unwrap(),
        diskseq: None,
        size: 0,
        names: names(of_unit),
        map: None,
        nbd_index: None,
        content: None,
        tls: None,
        at: String::new(),
    };
    Record {
        volume: "pvc-1".parse().unwrap(),
        spec,
        intent: None,
        outcome: Some(outcome),
        boot: None,
        detached: None,
    }
}

fn identity(of_unit: &[&str]) -> Identity {
    Identity::of(names(of_unit))
}

#[test]
fn a_volume_is_not_handed_out_as_another_unit_than_before() {
    let known = record(at("scsi:2:0:0:1", None), &[OURS]);
    refuse_other_unit(&known, &identity(&[OURS])).unwrap();
    let error = refuse_other_unit(&known, &identity(&[ANOTHERS])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    assert!(error.to_string().contains(ANOTHERS), "{error}");
    let unknown = record(at("scsi:2:0:0:1", None), &[]);
    refuse_other_unit(&unknown, &identity(&[ANOTHERS])).unwrap();
}

#[test]
fn a_volume_is_not_attached_in_place_as_another_unit_than_it_is() {
    let wanted = at("scsi:2:0:0:1", Some(ANOTHERS));
    let bar = |is: Option<&str>, of_unit: &[&str]| {
        let known = record(at("scsi:2:0:0:1", is), of_unit);
        refuse_spec_change(&known, &wanted)
            .err()
            .map(|error| error.kind())
    };
    let mismatch = Some(ErrorKind::IdentityMismatch);
    assert_eq!(bar(None, &[OURS]), mismatch);
    assert_eq!(
        bar(Some(OURS), &[]),
        mismatch,
        "it is known by its expectation"
    );
    assert_eq!(bar(None, &[]), None);
    assert_eq!(bar(None, &[OURS, ANOTHERS]), None);
    // What the unit reported counts more than what was expected of it.
    assert_eq!(bar(Some(OURS), &[ANOTHERS]), None);
    assert_eq!(bar(Some(ANOTHERS), &[OURS]), mismatch);
}

#[test]
fn two_volumes_may_share_a_target_and_no_path_of_a_unit() {
    let unit = |portals: &str, lun: u8| {
        let source = format!("iscsi://{portals}/iqn.2003-01.org.lunbd:array/{lun}");
        at(&source, None)
    };
    let known = record(unit("10.0.0.1,10.0.0.2", 1), &[]);
    let refused = |wanted: &VolumeSpec| {
        let other = Reservation::of(&known);
        refuse_shared_claim(&"pvc-2".parse().unwrap(), wanted, other).err()
    };
    for portals in ["10.0.0.1", "10.0.0.2,10.0.0.1", "10.0.0.3,10.0.0.2"] {
        let error = refused(&unit(portals, 1)).unwrap();
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert!(error.to_string().contains("pvc-1"), "{error}");
        assert!(refused(&unit(portals, 2)).is_none(), "{portals}");
    }
    assert!(refused(&unit("10.0.0.3", 1)).is_none());
}

#[test]
fn a_unit_belongs_to_a_volume_by_a_unique_name_or_at_its_place_by_another() {
    let owns = |of_unit: &[&str], reports: &[&str], there: bool| {
        let known = record(at("scsi:2:0:0:1", None), of_unit);
        let is_there = |_: &Source| there;
        Reservation::of(&known).is_owner(&identity(reports), is_there)
    };
    for there in [false, true] {
        assert!(owns(&[OURS], &[OURS], there));
        assert!(!owns(&[OURS], &[ANOTHERS], there));
        assert_eq!(owns(&[WEAK], &[WEAK], there), there);
    }
}

#[test]
fn an_expected_name_counts_until_the_volume_has_reported_its_own() {
    let owns = |expect, of_unit: &[&str]| {
        let known = record(at("scsi:2:0:0:1", expect), of_unit);
        Reservation::of(&known).is_owner(&identity(&[OURS]), |_| true)
    };
    assert!(owns(Some(OURS), &[]));
    assert!(!owns(Some(ANOTHERS), &[]));
    assert!(!owns(Some(OURS), &[ANOTHERS]));
    assert!(!owns(None, &[]));
}

#[test]
fn an_address_reserves_a_unit_only_while_the_volumes_own_is_unknown() {
    let here: Hctl = "2:0:0:1".parse().unwrap();
    let elsewhere: Hctl = "3:0:0:1".parse().unwrap();
    let is_meant = |expect, of_unit: &[&str], hctl| {
        Reservation::of(&record(at("scsi:2:0:0:1", expect), of_unit)).is_meant_at(hctl)
    };
    assert!(is_meant(None, &[], here));
    assert!(!is_meant(None, &[], elsewhere));
    assert!(!is_meant(None, &[OURS], here));
    assert!(!is_meant(Some(OURS), &[], here));
}

/// The place of a device at this address, of which no transport is known.
fn place(hctl: &str) -> PathPlace {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    fs::create_dir_all(roots.sysfs.join("bus/scsi/devices").join(hctl)).unwrap();
    let device = ScsiDevice::find(&roots, hctl.parse().unwrap());
    PathPlace::of(&roots, &device.unwrap().unwrap())
}

#[test]
fn a_unit_with_a_name_that_others_may_have_is_a_volumes_only_where_its_source_leads() {
    let known = record(at("scsi:2:0:0:1", None), &[WEAK]);
    let reservation = Reservation::of(&known);
    let (wanting, unit) = ("pvc-2".parse().unwrap(), identity(&[WEAK]));
    let may_be_shared = |places: &[&str]| {
        let places: Vec<PathPlace> = places.iter().copied().map(place).collect();
        refuse_shared_unit(&wanting, (&unit, &places), reservation).is_err()
    };
    let (there, another_lun, another_host) = ("2:0:0:1", "2:0:0:2", "3:0:0:1");
    assert!(reservation.owns(&unit, &place(there)));
    assert!(!reservation.owns(&unit, &place(another_lun)));
    // lunbd cannot know whether another host leads to the target. So the volume does not own the
    // unit, and no other volume gets it.
    assert!(!reservation.owns(&unit, &place(another_host)));
    assert!(may_be_shared(&[there]));
    assert!(!may_be_shared(&[another_lun]));
    assert!(may_be_shared(&[another_host]));
    assert!(may_be_shared(&[another_lun, there]));
}
