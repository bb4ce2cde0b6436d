//! Addresses that the array gives to other units.

use std::fs;
use std::path::PathBuf;

use lunbd::engine::Flush;
use lunbd::{AttachRequest, Attachment, ErrorKind};

use super::machine::{Machine, attach, detach, devices, soon, unit};

pub(crate) fn an_unused_device_of_another_unit_is_replaced_and_its_links_are_the_new_units<
    M: Machine,
>() {
    let machine = M::with(2, 4);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[1], 3));
    let old = attach(&engine, &source);
    machine.settle();
    machine.give_to_others();
    let new = attach(&engine, &source);
    assert!(new.changed);
    let (was, is) = (old.identity().unwrap(), new.identity().unwrap());
    assert!(was.compare(is).is_different(), "{was} and {is}");
    // Disk sequence numbers exist since Linux 5.15.
    assert!(new.diskseq.is_none() || new.diskseq != old.diskseq);
    let by_id = |attachment: &Attachment| -> Vec<PathBuf> {
        let links = attachment.links.iter();
        let links = links.filter(|link| link.to_string_lossy().contains("/by-id/"));
        links.cloned().collect()
    };
    assert!(!by_id(&new).is_empty());
    for link in by_id(&new) {
        assert_eq!(fs::canonicalize(&link).unwrap(), new.node);
    }
    for link in by_id(&old) {
        assert!(fs::symlink_metadata(&link).is_err(), "{}", link.display());
    }
    assert_eq!(devices(&*machine, &engine).len(), 1);
    let detachment = detach(&engine, &source).unwrap();
    assert_eq!(detachment.flush, Some(Flush::Done));
}

pub(crate) fn a_device_of_another_unit_that_is_mounted_is_refused_and_left<M: Machine>() {
    let machine = M::with(2, 4);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[1], 3));
    let old = attach(&engine, &source);
    let mounted = machine.mount(&old.node, "/tmp/lunbd-stale");
    machine.give_to_others();
    let attached = engine.attach(&AttachRequest::new(source.clone()), soon());
    let detached = detach(&engine, &source);
    let stands = devices(&*machine, &engine);
    drop(mounted);

    let error = attached.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let text = error.to_string();
    assert!(text.contains("mounted on /tmp/lunbd-stale"), "{text}");
    let was = old.identity().unwrap().wwid().unwrap().to_string();
    assert!(text.contains(&was), "{text}");
    let failure = detached.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    let text = failure.to_string();
    assert!(text.contains("mounted on /tmp/lunbd-stale"), "{text}");
    assert_eq!(stands.len(), 1);

    // The disk is idle now: nothing of the old unit is written to the new one.
    let detachment = detach(&engine, &source).unwrap();
    let flush = &detachment.flush;
    assert!(matches!(flush, Some(Flush::Replaced(_))), "{detachment:?}");
    assert!(!detachment.safe_to_unmap);
    assert_eq!(devices(&*machine, &engine), [] as [&str; 0]);
}
