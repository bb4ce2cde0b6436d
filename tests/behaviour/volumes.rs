//! Volumes of a journal.

use lunbd::engine::{Action, Condition, DetachVolume, Journal};
use lunbd::error::Stage;
use lunbd::id::VolumeId;
use lunbd::{AttachRequest, DetachRequest, DetachTarget, Engine, ErrorKind, Source};

use super::machine::{
    Machine, attach, delete, detach, device_dir, devices, soon, unit, write_attribute,
};

const NONE: [&str; 0] = [];

fn id(text: &str) -> VolumeId {
    text.parse().unwrap()
}

fn open(machine: &impl Machine, engine: &Engine) -> Journal {
    engine.open_journal_at(&machine.journal(), soon()).unwrap()
}

fn request(source: &Source) -> AttachRequest {
    AttachRequest::new(source.clone())
}

/// Recovers in another engine, as after a restart. Returns the condition of the only volume and
/// the action.
fn recover<M: Machine>(machine: &M) -> Option<(Condition, Action)> {
    let engine = machine.engine();
    let mut recovery = engine.recover(&open(machine, &engine), soon()).unwrap();
    assert!(recovery.problems.is_empty(), "{recovery:?}");
    assert!(recovery.volumes.len() <= 1, "{recovery:?}");
    let volume = recovery.volumes.pop()?;
    Some((volume.condition, volume.action))
}

pub(crate) fn a_volume_is_attached_found_by_a_recovery_and_detached_without_a_record<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let journal = open(&*machine, &engine);
    let volume = id("pvc-1");
    let attached = engine.attach_volume(&journal, &volume, &request(&source), soon());
    assert!(attached.unwrap().changed);
    drop(journal);
    let found = recover(&*machine);
    assert!(
        matches!(found, Some((Condition::Complete, Action::Nothing))),
        "{found:?}"
    );
    let journal = open(&*machine, &engine);
    let detached = engine.detach_volume(&journal, &volume, &DetachVolume::default(), soon());
    assert!(detached.unwrap().safe_to_unmap);
    assert_eq!(journal.records(), []);
    drop(journal);
    assert!(recover(&*machine).is_none());
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn a_second_detach_of_a_volume_answers_as_the_first_did_until_something_stands_there<
    M: Machine,
>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let journal = open(&*machine, &engine);
    let volume = id("pvc-1");
    engine
        .attach_volume(&journal, &volume, &request(&source), soon())
        .unwrap();
    machine.settle();
    let detach_it = |journal: &Journal| {
        let how = DetachVolume::default();
        engine.detach_volume(journal, &volume, &how, soon())
    };
    let first = detach_it(&journal).unwrap();
    assert!(first.changed && first.safe_to_unmap);
    assert_eq!(first.volume.as_ref(), Some(&volume));
    // The detach is repeated in this process, and after a restart.
    let second = detach_it(&journal).unwrap();
    drop(journal);
    let journal = open(&*machine, &engine);
    for again in [second, detach_it(&journal).unwrap()] {
        assert!(!again.changed && again.safe_to_unmap, "{again:?}");
        assert!(again.detached_at.is_some(), "{again:?}");
    }
    // A detach by the source gives the same answer.
    let read = || engine.read_journal_at(&machine.journal(), soon()).unwrap();
    let by_source = DetachRequest::new(source.clone());
    assert_eq!(engine.volume_of(&read(), &by_source, soon()).unwrap(), None);
    let again = engine
        .detachment_before(&read(), &by_source, soon())
        .unwrap()
        .unwrap();
    assert!(again.safe_to_unmap, "{again:?}");
    // A failed attach leaves the record of the detach.
    let absent = request(&source).min_paths(2);
    engine
        .attach_volume(&journal, &volume, &absent, soon())
        .unwrap_err();
    assert!(detach_it(&journal).unwrap().safe_to_unmap);
    // The unit is attached again without the journal.
    attach(&engine, &source);
    let stands = detach_it(&journal).unwrap();
    assert!(!stands.changed && !stands.safe_to_unmap, "{stands:?}");
    detach(&engine, &source).unwrap();
    assert!(detach_it(&journal).unwrap().safe_to_unmap);
    journal.forget(&volume, soon()).unwrap();
    assert_eq!(detach_it(&journal).unwrap_err().kind(), ErrorKind::NotFound);
}

pub(crate) fn the_volume_of_a_source_a_node_or_a_name_is_found_in_a_journal<M: Machine>() {
    let machine = M::with(1, 4);
    let (engine, host) = (machine.engine(), machine.hosts()[0]);
    let journal = open(&*machine, &engine);
    let volume = id("pvc-1");
    let source = unit(host, 1);
    let attached = engine
        .attach_volume(&journal, &volume, &request(&source), soon())
        .unwrap();
    machine.settle();
    let beside = attach(&engine, &unit(host, 2)).node;
    machine.settle();
    let read = || engine.read_journal_at(&machine.journal(), soon()).unwrap();
    let volume_of = |target: DetachTarget| {
        let request = DetachRequest::new(target);
        engine.volume_of(&read(), &request, soon()).unwrap()
    };
    let name = attached.identity().unwrap().wwid().unwrap().clone();
    let mut targets = vec![
        DetachTarget::Source(source),
        DetachTarget::Device(attached.node.clone()),
    ];
    if name.is_unique() {
        targets.push(DetachTarget::Unit(name));
    }
    for target in targets {
        assert_eq!(
            volume_of(target.clone()).as_ref(),
            Some(&volume),
            "{target}"
        );
    }
    for other in [
        DetachTarget::Device(beside),
        DetachTarget::Source(unit(host, 3)),
    ] {
        assert_eq!(volume_of(other.clone()), None, "{other}");
    }
    let how = DetachVolume::default();
    engine
        .detach_volume(&journal, &volume, &how, soon())
        .unwrap();
    detach(&engine, &unit(host, 2)).unwrap();
}

pub(crate) fn a_path_that_is_named_before_the_others_does_not_replace_the_device_of_a_volume<
    M: Machine,
>() {
    let machine = M::with_two_paths();
    let engine = machine.engine();
    let [first, second] = [0, 1].map(|host| unit(machine.hosts()[host], 1));
    let journal = open(&*machine, &engine);
    let volume = id("pvc-1");
    let attached = engine
        .attach_volume(&journal, &volume, &request(&first), soon())
        .unwrap();
    machine.settle();
    let both = AttachRequest::new(second.clone()).path(first);
    let again = engine
        .attach_volume(&journal, &volume, &both, soon())
        .unwrap();
    assert_eq!((again.paths().len(), again.changed), (2, true), "{again:?}");
    assert_eq!(
        (&again.node, again.diskseq),
        (&attached.node, attached.diskseq)
    );
    // Without a volume the first of equal paths is returned.
    assert_ne!(attach(&engine, &second).node, attached.node);
    machine.settle();
    engine
        .detach_volume(&journal, &volume, &DetachVolume::default(), soon())
        .unwrap();
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn a_volume_whose_unit_is_another_volumes_is_refused_and_taken_down_again<M: Machine>() {
    let machine = M::with(2, 4);
    let (engine, hosts) = (machine.engine(), machine.hosts());
    let journal = open(&*machine, &engine);
    let first = unit(hosts[0], 1);
    let attached = engine.attach_volume(&journal, &id("pvc-1"), &request(&first), soon());
    let name = attached
        .unwrap()
        .identity()
        .unwrap()
        .wwid()
        .unwrap()
        .clone();
    // The source is the same.
    let again = engine.attach_volume(&journal, &id("pvc-2"), &request(&first), soon());
    let error = again.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(error.to_string().contains("pvc-1"), "{error}");
    // The source is another one, with the unit's name. If another unit may have the same name,
    // the engine first asks the unit that answers there.
    let second = request(&unit(hosts[0], 2)).expect(name.clone());
    let again = engine.attach_volume(&journal, &id("pvc-2"), &second, soon());
    let error = again.unwrap_err();
    if name.is_unique() {
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert!(error.to_string().contains("pvc-1"), "{error}");
    } else {
        assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    }
    assert_eq!(journal.records().len(), 1);
    assert_eq!(devices(&*machine, &engine).len(), 1);
    let how = DetachVolume::default();
    engine
        .detach_volume(&journal, &id("pvc-1"), &how, soon())
        .unwrap();
}

pub(crate) fn a_volume_that_somebody_deleted_is_attached_again_by_a_repeated_attach<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let journal = open(&*machine, &engine);
    let volume = id("pvc-1");
    let attach_it = || engine.attach_volume(&journal, &volume, &request(&source), soon());
    let first = attach_it().unwrap();
    machine.settle();
    delete(&engine, &source);
    let second = attach_it().unwrap();
    assert!(second.changed);
    assert_eq!(second.identity(), first.identity());
    assert_eq!(journal.records().len(), 1);
    drop(journal);
    let found = recover(&*machine);
    assert!(
        matches!(found, Some((Condition::Complete, Action::Nothing))),
        "{found:?}"
    );
    detach(&engine, &source).unwrap();
}

pub(crate) fn an_attach_of_a_volume_that_fails_leaves_no_record<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, absent) = (machine.engine(), unit(machine.hosts()[0], 9));
    let journal = open(&*machine, &engine);
    let failed = engine.attach_volume(&journal, &id("pvc-1"), &request(&absent), soon());
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(journal.records(), []);
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn a_detach_of_a_volume_that_is_in_use_is_refused_and_the_volume_stays_complete<
    M: Machine,
>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let journal = open(&*machine, &engine);
    let volume = id("pvc-1");
    let attached = engine.attach_volume(&journal, &volume, &request(&source), soon());
    let node = attached.unwrap().node;
    machine.settle();
    let holder = machine.open(&node, true);
    let how = DetachVolume::default();
    let refused = engine.detach_volume(&journal, &volume, &how, soon());
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InUse);
    assert_eq!(refused.stage(), Some(Stage::Claim));
    drop(journal);
    let found = recover(&*machine);
    assert!(
        matches!(found, Some((Condition::Complete, Action::Nothing))),
        "{found:?}"
    );
    drop(holder);
    let journal = open(&*machine, &engine);
    engine
        .detach_volume(&journal, &volume, &how, soon())
        .unwrap();
    assert_eq!(journal.records(), []);
}

pub(crate) fn a_volume_is_not_gone_while_its_disk_stands_as_a_unit_that_a_rescan_found_there<
    M: Machine,
>() {
    let machine = M::with(2, 4);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[1], 3));
    let journal = open(&*machine, &engine);
    let volume = id("pvc-1");
    let attached = engine.attach_volume(&journal, &volume, &request(&source), soon());
    let mounted = machine.mount(&attached.unwrap().node, "/tmp/lunbd-stale");
    machine.settle();
    machine.give_to_others();
    let file = device_dir(&engine, &source).join("rescan");
    write_attribute(&engine, &file, "1");
    machine.settle();
    let detach_it = || engine.detach_volume(&journal, &volume, &DetachVolume::default(), soon());
    let detached = detach_it();
    drop(mounted);
    let failure = detached.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    assert_eq!(journal.records().len(), 1);
    let detached = detach_it().unwrap();
    assert!(detached.changed && !detached.safe_to_unmap, "{detached:?}");
    assert_eq!(devices(&*machine, &engine), NONE);
}
