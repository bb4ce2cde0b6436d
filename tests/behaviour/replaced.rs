//! Addresses that the array gives to other units.

use std::fs;
use std::path::PathBuf;

use lunbd::engine::{Flush, ResizeRequest};
use lunbd::{AttachRequest, Attachment, DetachTarget, Engine, ErrorKind, Source};

use super::machine::{Machine, attach, detach, device_dir, devices, soon, unit, write_attribute};

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

/// Makes the kernel read the names again, as another process would.
fn rescan(machine: &impl Machine, engine: &Engine, source: &Source) {
    let file = device_dir(engine, source).join("rescan");
    write_attribute(engine, &file, "1");
    machine.settle();
}

pub(crate) fn a_mounted_disk_stays_the_unit_that_it_was_first_after_a_rescan<M: Machine>() {
    let machine = M::with(2, 4);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[1], 3));
    let old = attach(&engine, &source);
    let was = old.identity().unwrap().wwid().unwrap().clone();
    let mounted = machine.mount(&old.node, "/tmp/lunbd-stale");
    machine.settle();
    machine.give_to_others();
    rescan(&*machine, &engine, &source);
    let by_source = detach(&engine, &source);
    let by_node = engine.detach(DetachTarget::Device(old.node.clone()), soon());
    let by_name = engine.detach(DetachTarget::Unit(was.clone()), soon());
    let resized = engine.resize(&ResizeRequest::new(source.clone()), soon());
    let stands = devices(&*machine, &engine);
    drop(mounted);

    assert_eq!(stands.len(), 1, "{stands:?}");
    for detached in [by_source, by_node] {
        let failure = detached.unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
        assert_eq!(failure.receipt.names.first(), Some(&was), "{failure:?}");
    }
    // A name that is not unique names no unit.
    let failure = by_name.unwrap_err();
    let expected = if was.is_unique() {
        ErrorKind::InUse
    } else {
        ErrorKind::IdentityMismatch
    };
    assert_eq!(failure.kind(), expected, "{failure}");
    let error = resized.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");

    let detachment = detach(&engine, &source).unwrap();
    let flush = &detachment.flush;
    assert!(matches!(flush, Some(Flush::Replaced(_))), "{detachment:?}");
    assert!(!detachment.safe_to_unmap);
    assert_eq!(devices(&*machine, &engine), [] as [&str; 0]);
}

pub(crate) fn what_was_written_to_a_disk_never_goes_to_the_unit_that_a_rescan_found_there<
    M: Machine,
>() {
    let machine = M::with(2, 4);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[1], 3));
    let old = attach(&engine, &source);
    let written = machine.write(&old.node);
    machine.give_to_others();
    let file = device_dir(&engine, &source).join("rescan");
    write_attribute(&engine, &file, "1");
    let detached = detach(&engine, &source);
    drop(written);
    match detached {
        Ok(detached) => {
            let flush = &detached.flush;
            assert!(matches!(flush, Some(Flush::Replaced(_))), "{detached:?}");
            assert!(!detached.safe_to_unmap, "{detached:?}");
        }
        // A process has it open, so nothing is written to it and it stays.
        Err(failure) => {
            assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
            detach(&engine, &source).unwrap();
        }
    }
    assert_eq!(devices(&*machine, &engine), [] as [&str; 0]);
}
