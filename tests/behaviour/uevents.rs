//! The kernel's events during an attach and a detach.

use super::machine::{Machine, Seen, attach, detach, unit};
use super::minimum::{Kind, Minimum};

/// Pairs of events: the first always comes before the second, if both come.
const ORDER: &[(Kind, Kind)] = &[
    (
        ("add", "scsi", "scsi_target"),
        ("add", "scsi", "scsi_device"),
    ),
    (("add", "scsi", "scsi_device"), ("add", "scsi_device", "")),
    (("add", "scsi", "scsi_device"), ("add", "scsi_disk", "")),
    (("add", "scsi_device", ""), ("add", "scsi_generic", "")),
    (("add", "scsi_generic", ""), ("add", "bsg", "")),
    (("add", "scsi_disk", ""), ("add", "bdi", "")),
    (("add", "bdi", ""), ("add", "block", "disk")),
    (("add", "block", "disk"), ("bind", "scsi", "scsi_device")),
    (("remove", "bsg", ""), ("remove", "scsi_generic", "")),
    (
        ("remove", "scsi_generic", ""),
        ("remove", "scsi_device", ""),
    ),
    (("remove", "scsi_device", ""), ("remove", "scsi_disk", "")),
    (("remove", "scsi_disk", ""), ("remove", "bdi", "")),
    (("remove", "bdi", ""), ("remove", "block", "disk")),
    (
        ("remove", "block", "disk"),
        ("unbind", "scsi", "scsi_device"),
    ),
    (
        ("unbind", "scsi", "scsi_device"),
        ("remove", "scsi", "scsi_device"),
    ),
    (
        ("remove", "scsi", "scsi_device"),
        ("remove", "scsi", "scsi_target"),
    ),
];

pub(crate) fn an_attach_and_a_detach_cause_only_the_kernels_own_minimum_of_uevents_in_its_order<
    M: Machine,
>() {
    let machine = M::with(1, 256);
    let (engine, host) = (machine.engine(), machine.hosts()[0]);
    let minimum = machine.minimum();
    machine.settle();
    let raises = |act: &mut dyn FnMut(), wanted: &[Kind]| {
        let events = machine.kernel_events(act);
        require(minimum, &events, wanted);
    };
    let (seven, other) = (unit(host, 7), unit(host, 200));
    raises(&mut || drop(attach(&engine, &seven)), &minimum.first_lun());
    raises(&mut || drop(attach(&engine, &other)), minimum.disk);
    raises(&mut || drop(detach(&engine, &other)), minimum.delete);
    raises(&mut || drop(detach(&engine, &other)), &[]);
    raises(
        &mut || drop(detach(&engine, &seven)),
        &minimum.delete_last_lun(),
    );
}

/// Panics if any other event came, except those that udevd may add, or if two events came in
/// another order than always.
fn require(minimum: &Minimum, events: &[Seen], wanted: &[Kind]) {
    let kind = |seen: &Seen| {
        let (action, subsystem, devtype) = &seen.kind;
        (action.clone(), subsystem.clone(), devtype.clone())
    };
    let is = |seen: &Seen, wanted: &Kind| {
        let (action, subsystem, devtype) = &seen.kind;
        (&**action, &**subsystem, &**devtype) == *wanted
    };
    let mut own = events.to_vec();
    let brings_a_disk = wanted.contains(&("add", "block", "disk"));
    for adds in minimum.udevd_adds.iter().filter(|_| brings_a_disk) {
        let mut theirs = own.iter();
        if let Some(at) = theirs.position(|seen| seen.is_udevds && is(seen, adds)) {
            own.remove(at);
        }
    }
    let mut kinds: Vec<_> = own.iter().map(kind).collect();
    kinds.sort_unstable();
    let text = |(action, subsystem, devtype): &Kind| {
        let owned = |word: &str| word.to_owned();
        (owned(action), owned(subsystem), owned(devtype))
    };
    assert_eq!(kinds, wanted.iter().map(text).collect::<Vec<_>>());
    for (first, second) in ORDER {
        let place = |wanted: &Kind| own.iter().position(|seen| is(seen, wanted));
        if let (Some(one), Some(other)) = (place(first), place(second)) {
            assert!(one < other, "{second:?} before {first:?}: {own:?}");
        }
    }
}
