mod every_plan;

use super::*;
use crate::engine::journal::Operation;
use crate::engine::{AttachRequest, Condition, NbdOptions};
use crate::id::{Source, Wwid};
use crate::iscsi::SessionOptions;

/// The ids are from a small range, so that volumes conflict.
#[derive(Debug, Clone)]
struct Wish {
    volume: u8,
    source: u8,
    more: Option<u8>,
    nbd: bool,
    read_only: bool,
    min_paths: usize,
    expect: Option<u8>,
    min_size: Option<u64>,
}

fn id(volume: u8) -> VolumeId {
    format!("pvc-{volume}").parse().unwrap()
}

fn unit(number: u8) -> Wwid {
    format!("naa.5000c500a1b2c3{number:02x}").parse().unwrap()
}

impl Wish {
    fn request(&self) -> AttachRequest {
        let source = |number: u8| -> Source {
            let text = if self.nbd {
                format!("nbd://h/{number}")
            } else {
                format!("scsi:2:0:0:{number}")
            };
            text.parse().unwrap()
        };
        let mut request = AttachRequest::new(source(self.source)).min_paths(self.min_paths);
        if self.nbd {
            let options = NbdOptions::default();
            let options = if self.read_only {
                options.read_only()
            } else {
                options
            };
            return request.nbd(options);
        }
        if let Some(more) = self.more {
            request = request.path(source(more));
        }
        match self.expect {
            Some(number) => request.expect(unit(number)),
            None => request,
        }
    }

    fn spec(&self) -> VolumeSpec {
        VolumeSpec::of(&self.request())
    }
}

/// The wishes that do not conflict with an earlier one.
fn desired(wishes: &[Wish]) -> Desired {
    let mut desired = Desired::default();
    for wish in wishes {
        let volume = id(wish.volume);
        if desired.insert(volume.clone(), &wish.request()).is_ok() {
            desired.set_min_size(&volume, wish.min_size).unwrap();
        }
    }
    desired
}

fn nbd(volume: u8, source: u8) -> Wish {
    Wish {
        volume,
        source,
        more: None,
        nbd: true,
        read_only: false,
        min_paths: 1,
        expect: None,
        min_size: None,
    }
}

fn stands(wishes: &[Wish]) -> Actual {
    let stand = wishes
        .iter()
        .map(|wish| VolumeStatus::new(id(wish.volume), wish.spec(), Condition::Complete));
    stand.collect()
}

#[test]
fn a_volume_waits_for_the_one_that_has_its_source() {
    let plan = plan(&desired(&[nbd(1, 7)]), &stands(&[nbd(2, 7)]));
    assert_eq!(
        plan.to_string(),
        "detach pvc-2: it is not wanted\n\
         attach pvc-1: it is wanted and not attached; after pvc-2\n"
    );
}

#[test]
fn two_volumes_that_change_places_are_both_detached_first() {
    let plan = plan(
        &desired(&[nbd(1, 2), nbd(2, 1)]),
        &stands(&[nbd(1, 1), nbd(2, 2)]),
    );
    let kinds: Vec<_> = plan.steps.iter().map(|step| step.kind).collect();
    assert_eq!(kinds, [StepKind::Detach; 2]);
    assert!(plan.steps.iter().all(|step| step.after.is_empty()));
}

/// A wish for the unit of another volume, the wish for that volume, and that one as attached.
fn expects_anothers_unit() -> (Wish, Wish, Actual) {
    let (mut wish, mut other) = (nbd(1, 1), nbd(2, 2));
    (wish.nbd, wish.expect) = (false, Some(9));
    other.nbd = false;
    let mut actual = stands(std::slice::from_ref(&other));
    actual.volumes.get_mut(&id(2)).unwrap().names = vec![unit(9)];
    (wish, other, actual)
}

#[test]
fn a_volume_that_expects_another_volumes_unit_is_refused_with_both_names() {
    let (wish, other, actual) = expects_anothers_unit();
    let plan = plan(&desired(&[wish, other]), &actual);
    let [step] = plan.steps.as_slice() else {
        panic!("{plan}");
    };
    assert_eq!(
        (step.kind, step.volume.as_str()),
        (StepKind::Refused, "pvc-1")
    );
    assert!(step.to_string().contains("pvc-2"), "{step}");
}

#[test]
fn a_volume_that_changes_in_place_is_not_detached_for_one_that_expects_its_unit() {
    let (wish, mut other, actual) = expects_anothers_unit();
    other.min_paths = 2;
    let plan = plan(&desired(&[wish, other]), &actual);
    let kinds: Vec<_> = plan.steps.iter().map(|step| step.kind).collect();
    assert!(!kinds.contains(&StepKind::Detach), "{plan}");
    assert!(kinds.contains(&StepKind::Refused), "{plan}");
}

#[test]
fn an_option_that_cannot_be_changed_in_place_needs_a_detach_and_any_other_an_attach() {
    let mut read_only = nbd(1, 1);
    read_only.read_only = true;
    let first = plan(&desired(&[read_only]), &stands(&[nbd(1, 1)]));
    assert_eq!(first.to_string(), "detach pvc-1: it is wanted read-only\n");
    let mut more = nbd(1, 1);
    more.nbd = false;
    let before = stands(std::slice::from_ref(&more));
    more.more = Some(2);
    let again = plan(&desired(&[more]), &before);
    assert_eq!(again.steps.len(), 1);
    assert_eq!(again.steps[0].kind, StepKind::Attach);
}

/// One volume that is attached with this size, and wanted with that least size.
fn sized(size: Option<u64>, min_size: Option<u64>) -> (Desired, Actual) {
    let mut wish = nbd(1, 1);
    wish.nbd = false;
    let mut actual = stands(std::slice::from_ref(&wish));
    actual.volumes.get_mut(&id(1)).unwrap().size = size;
    wish.min_size = min_size;
    (desired(&[wish]), actual)
}

#[test]
fn a_volume_that_is_too_small_is_resized_and_none_is_ever_shrunk() {
    let (desired, actual) = sized(Some(4096), Some(8192));
    assert_eq!(
        plan(&desired, &actual).to_string(),
        "resize pvc-1: it has 4096 bytes, and at least 8192 are wanted\n"
    );
    let (desired, actual) = sized(None, Some(8192));
    assert_eq!(
        plan(&desired, &actual).to_string(),
        "resize pvc-1: its size is unknown, and at least 8192 are wanted\n"
    );
    for (size, min_size) in [
        (Some(8192), Some(8192)),
        (Some(1 << 40), Some(8192)),
        (Some(8192), Some(0)),
        (Some(8192), None),
        (None, None),
    ] {
        let (desired, actual) = sized(size, min_size);
        let plan = plan(&desired, &actual);
        assert!(plan.is_empty(), "{size:?}, {min_size:?}: {plan}");
    }
}

#[test]
fn a_volume_is_resized_only_when_it_needs_no_other_step() {
    let (desired, actual) = sized(Some(4096), Some(8192));
    let kind_where = |change: &dyn Fn(&mut VolumeStatus)| {
        let mut actual = actual.clone();
        change(actual.volumes.get_mut(&id(1)).unwrap());
        let plan = plan(&desired, &actual);
        assert_eq!(plan.steps.len(), 1, "{plan}");
        plan.steps[0].kind
    };
    let doubted =
        |there: &mut VolumeStatus| there.verify_reason = Some("nobody has asked it".to_owned());
    assert_eq!(kind_where(&doubted), StepKind::Verify);
    let unscanned = |there: &mut VolumeStatus| there.unscanned.push("3:0:0:1".parse().unwrap());
    assert_eq!(kind_where(&unscanned), StepKind::Attach);
    let at_least = Some(6000);
    let begun = |there: &mut VolumeStatus| {
        there.under_way = Some(Operation::Resize { at_least });
        there.condition = Condition::HalfAttached;
    };
    assert_eq!(kind_where(&begun), StepKind::Finish);
    for condition in [Condition::Gone, Condition::Changed] {
        let there = |there: &mut VolumeStatus| there.condition = condition;
        assert_eq!(kind_where(&there), StepKind::Attach);
        let begun = |there: &mut VolumeStatus| {
            begun(there);
            there.condition = condition;
        };
        assert_eq!(kind_where(&begun), StepKind::Attach);
    }
    let abandon_unwritten = false;
    let detach = |there: &mut VolumeStatus| {
        there.under_way = Some(Operation::Detach { abandon_unwritten });
    };
    assert_eq!(kind_where(&detach), StepKind::Attach);
    let dead = |there: &mut VolumeStatus| there.condition = Condition::LinkDead;
    assert_eq!(kind_where(&dead), StepKind::Wait);
    assert_eq!(kind_where(&|_| ()), StepKind::Resize);
}

/// An iSCSI volume that logs in as this initiator.
fn logged_in(initiator: &str) -> VolumeSpec {
    let source: Source = "iscsi://10.0.0.1,10.0.0.2/iqn.2003-01.org.lunbd:array/1"
        .parse()
        .unwrap();
    let options = SessionOptions::new(initiator.parse().unwrap());
    VolumeSpec::of(&AttachRequest::new(source).log_in(options))
}

#[test]
fn a_portal_without_its_session_is_attached_again_and_another_initiator_is_another_attach() {
    let spec = logged_in("iqn.2026-01.example:one");
    let mut desired = Desired::default();
    desired.insert(id(1), &spec.request().unwrap()).unwrap();
    let mut there = VolumeStatus::new(id(1), spec, Condition::Complete);
    there.without_session.push("10.0.0.2".parse().unwrap());
    let actual = Actual::from_iter([there]);
    assert_eq!(
        plan(&desired, &actual).to_string(),
        "attach pvc-1: no session leads through 10.0.0.2:3260\n"
    );
    let other = logged_in("iqn.2026-01.example:two");
    let there = VolumeStatus::new(id(1), other, Condition::Complete);
    assert_eq!(
        plan(&desired, &Actual::from_iter([there])).to_string(),
        "detach pvc-1: it is logged in to as iqn.2026-01.example:two and wanted as \
         iqn.2026-01.example:one\n"
    );
}

/// The plan for a volume that is wanted from one source and attached from another.
fn plan_from(wanted: &str, attached: &str) -> String {
    let request = |source: &str| AttachRequest::new(source.parse::<Source>().unwrap());
    let mut desired = Desired::default();
    desired.insert(id(1), &request(wanted)).unwrap();
    let spec = VolumeSpec::of(&request(attached));
    let there = VolumeStatus::new(id(1), spec, Condition::Complete);
    plan(&desired, &Actual::from_iter([there])).to_string()
}

#[test]
fn a_volume_keeps_its_device_while_one_portal_or_port_is_wanted_as_before() {
    let iscsi = |portals: &str| format!("iscsi://{portals}/iqn.2003-01.org.lunbd:array/1");
    let fc = |ports: &str| format!("fc://{ports}/1");
    let (one, two, three) = (
        "0x1000000000000001",
        "0x1000000000000002",
        "0x1000000000000003",
    );
    for (wanted, attached) in [
        (iscsi("10.0.0.1,10.0.0.2"), iscsi("10.0.0.1")),
        (iscsi("10.0.0.2"), iscsi("10.0.0.1,10.0.0.2")),
        (iscsi("10.0.0.2,10.0.0.1"), iscsi("10.0.0.1,10.0.0.2")),
        (iscsi("10.0.0.2,10.0.0.3"), iscsi("10.0.0.1,10.0.0.2")),
        (fc(&format!("{two},{one}")), fc(one)),
        (fc(&format!("{two},{three}")), fc(&format!("{one},{two}"))),
    ] {
        assert_eq!(
            plan_from(&wanted, &attached),
            "attach pvc-1: its wanted settings differ from the attached ones\n",
            "{attached} to {wanted}"
        );
    }
    for (wanted, attached) in [
        (iscsi("10.0.0.2"), iscsi("10.0.0.1")),
        (
            iscsi("10.0.0.1"),
            "iscsi://10.0.0.1/iqn.2003-01.org.lunbd:array/2".into(),
        ),
        (
            iscsi("10.0.0.1"),
            "iscsi://10.0.0.1/iqn.2003-01.org.lunbd:other/1".into(),
        ),
        (fc(one), fc(two)),
        (fc(one), format!("fc://{one}/2")),
    ] {
        let plan = plan_from(&wanted, &attached);
        assert!(
            plan.starts_with("detach pvc-1: "),
            "{attached} to {wanted}: {plan}"
        );
    }
}

fn scsi(volume: u8, source: u8, more: Option<u8>) -> Wish {
    Wish {
        nbd: false,
        more,
        ..nbd(volume, source)
    }
}

#[test]
fn a_volume_that_gives_up_a_path_is_detached_before_another_gets_it() {
    // By itself it would change in place.
    let plan = plan(
        &desired(&[scsi(1, 1, None), scsi(2, 2, None)]),
        &stands(&[scsi(1, 1, Some(2))]),
    );
    assert_eq!(
        plan.to_string(),
        "detach pvc-1: another volume is wanted at its place\n\
         attach pvc-2: it is wanted and not attached; after pvc-1\n"
    );
}

#[test]
fn a_volume_that_is_detached_for_another_waits_for_no_third() {
    let wanted = [scsi(1, 1, Some(5)), scsi(2, 2, None)];
    let plan = plan(
        &desired(&wanted),
        &stands(&[scsi(1, 1, Some(2)), scsi(3, 5, None)]),
    );
    assert_eq!(
        plan.to_string(),
        "detach pvc-1: another volume is wanted at its place\n\
         detach pvc-3: it is not wanted\n\
         attach pvc-2: it is wanted and not attached; after pvc-1\n"
    );
}

#[test]
fn a_detach_that_was_begun_is_finished_also_for_a_volume_that_waits_for_it() {
    let mut actual = stands(&[nbd(2, 7)]);
    let abandon_unwritten = true;
    let begun = Operation::Detach { abandon_unwritten };
    actual.volumes.get_mut(&id(2)).unwrap().under_way = Some(begun);
    assert_eq!(
        plan(&desired(&[nbd(1, 7)]), &actual).to_string(),
        "finish pvc-2: it is not wanted, and its detach was begun\n\
         attach pvc-1: it is wanted and not attached; after pvc-2\n"
    );
}
