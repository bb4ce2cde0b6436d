//! Detaches.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use lunbd::engine::{Flush, Holder, StageObserver};
use lunbd::error::Stage;
use lunbd::id::Wwid;
use lunbd::{DetachRequest, DetachTarget, ErrorKind};

use super::machine::{
    Machine, attach, delete, detach, device_dir, devices, soon, unit, write_attribute,
};

const NONE: [&str; 0] = [];

pub(crate) fn a_detached_disk_is_gone_from_sysfs_from_dev_and_from_udev<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let attachment = attach(&engine, &source);
    let record = format!("udev/data/b{}", attachment.devno);
    let record = engine.roots().run.join(record);
    assert!(record.exists());
    let detachment = detach(&engine, &source).unwrap();
    assert!(detachment.changed);
    assert_eq!(detachment.node.as_ref(), Some(&attachment.node));
    assert_eq!(detachment.diskseq, attachment.diskseq);
    assert_eq!(detachment.flush, Some(Flush::Done));
    assert_eq!(devices(&*machine, &engine), NONE);
    assert!(!attachment.node.exists());
    for link in &attachment.links {
        assert!(link.symlink_metadata().is_err(), "{}", link.display());
    }
    assert!(!record.exists());
}

pub(crate) fn the_receipt_names_what_was_read_back<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let attachment = attach(&engine, &source);
    let detachment = detach(&engine, &source).unwrap();
    assert!(detachment.safe_to_unmap);
    let receipt = detachment.receipt.unwrap();
    assert!(receipt.safe_to_unmap);
    let strongest = attachment.identity().unwrap().wwid().unwrap();
    assert!(receipt.names.contains(strongest), "{receipt:?}");
    let [path] = &receipt.paths[..] else {
        panic!("{receipt:?}");
    };
    assert_eq!(Some(path.hctl), attachment.hctl());
    assert_eq!(path.node.as_ref(), Some(&attachment.node));
    assert_eq!(path.devno, Some(attachment.devno));
    assert_eq!(path.diskseq, attachment.diskseq);
    assert_eq!(path.flush, Some(Flush::Done));
    assert!(path.gone);
    assert!(
        receipt.map.is_none() && receipt.notes.is_empty(),
        "{receipt:?}"
    );
}

pub(crate) fn what_is_gone_already_is_detached_and_unchanged<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    assert!(!detach(&engine, &source).unwrap().changed);
    attach(&engine, &source);
    assert!(detach(&engine, &source).unwrap().changed);
    assert!(!detach(&engine, &source).unwrap().changed);
}

pub(crate) fn a_disk_that_somebody_else_deleted_is_detached_and_unchanged<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let attachment = attach(&engine, &source);
    machine.settle();
    delete(&engine, &source);
    let name = attachment.identity().unwrap().wwid().unwrap().clone();
    let request = DetachRequest::new(source).expect(name.clone());
    let detachment = engine.detach(request, soon()).unwrap();
    assert!(
        !detachment.changed && detachment.safe_to_unmap,
        "{detachment:?}"
    );
    assert_eq!(detachment.receipt.unwrap().names, [name]);
}

pub(crate) fn a_disk_is_detached_by_its_node_and_by_a_link_to_it<M: Machine>() {
    let machine = M::with(1, 3);
    let (engine, host) = (machine.engine(), machine.hosts()[0]);
    let by_node = attach(&engine, &unit(host, 1));
    let by_link = attach(&engine, &unit(host, 2));
    for path in [&by_node.node, &by_link.links[0]] {
        let named = DetachTarget::Device(path.clone());
        assert!(engine.detach(named.clone(), soon()).unwrap().changed);
        // An absent path proves nothing.
        let error = engine.detach(named.clone(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn a_disk_of_another_unit_than_the_expected_one_is_left<M: Machine>() {
    let machine = M::with(1, 3);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let attachment = attach(&engine, &source);
    let wrong: Wwid = "naa.60014050000000000000000000000000".parse().unwrap();
    let request = DetachRequest::new(source.clone()).expect(wrong);
    let error = engine.detach(request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    let name = attachment.identity().unwrap().wwid().unwrap();
    assert!(error.found().contains(&name.to_string()), "{error}");
    assert!(!attach(&engine, &source).changed);
    detach(&engine, &source).unwrap();
}

pub(crate) fn a_disk_that_a_process_has_claimed_is_refused_and_the_process_is_named<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let node = attach(&engine, &source).node;
    machine.settle();
    let holder = machine.open(&node, true);
    let error = detach(&engine, &source).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.stage(), Some(Stage::Claim));
    let us = std::process::id();
    let named = format!("open in process {us} (");
    assert!(error.to_string().contains(&named), "{error}");
    let is_us = |holder: &Holder| matches!(holder, Holder::Open { pid, .. } if *pid == us);
    assert!(error.holders().iter().any(is_us), "{:?}", error.holders());
    assert_eq!(devices(&*machine, &engine).len(), 1);
    let [path] = &error.receipt.paths[..] else {
        panic!("{error:?}");
    };
    assert!(!path.gone && path.flush.is_none(), "{error:?}");
    drop(holder);
    detach(&engine, &source).unwrap();
}

pub(crate) fn a_process_that_has_a_disk_open_for_writing_is_refused_and_named<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let node = attach(&engine, &source).node;
    machine.settle();
    let writer = machine.open_to_write(&node);
    let failure = detach(&engine, &source).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Claim), "{failure}");
    let us = format!("open for writing in process {}", std::process::id());
    assert!(failure.to_string().contains(&us), "{failure}");
    let abandon = DetachRequest::new(source.clone()).abandon_unwritten();
    let failure = engine.detach(abandon, soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    assert_eq!(devices(&*machine, &engine).len(), 1);
    drop(writer);
    machine.settle();
    assert!(detach(&engine, &source).unwrap().safe_to_unmap);
}

pub(crate) fn a_process_that_only_reads_does_not_hold_a_detach_up<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let node = attach(&engine, &source).node;
    let _reader = machine.open(&node, false);
    assert!(detach(&engine, &source).unwrap().changed);
}

pub(crate) fn a_mounted_disk_is_refused_with_its_mounts_path<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let node = attach(&engine, &source).node;
    let mounted = machine.mount(&node, "/tmp/lunbd-mounted");
    let error = detach(&engine, &source).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.stage(), Some(Stage::Claim));
    let message = error.to_string();
    assert!(
        message.contains("mounted on /tmp/lunbd-mounted"),
        "{message}"
    );
    let place = Path::new("/tmp/lunbd-mounted");
    let is_it = |holder: &Holder| matches!(holder, Holder::Mount { path, .. } if path == place);
    assert!(error.holders().iter().any(is_it), "{:?}", error.holders());
    drop(mounted);
    assert!(detach(&engine, &source).unwrap().changed);
}

pub(crate) fn an_offline_disk_without_users_is_detached_and_reported_as_unflushed<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    attach(&engine, &source);
    machine.settle();
    let state = device_dir(&engine, &source).join("state");
    write_attribute(&engine, &state, "offline\n");
    let detachment = detach(&engine, &source).unwrap();
    let flush = &detachment.flush;
    assert!(
        matches!(flush, Some(Flush::Unreachable(_))),
        "{detachment:?}"
    );
    assert!(!detachment.safe_to_unmap);
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn the_detach_of_an_offline_disk_waits_until_multipathd_has_closed_it<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let node = attach(&engine, &source).node;
    machine.settle();
    let multipathd = Mutex::new(Some(machine.open_in_multipathd(&node)));
    let state = device_dir(&engine, &source).join("state");
    write_attribute(&engine, &state, "offline\n");
    let passes = AtomicUsize::new(0);
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Resolve && passes.fetch_add(1, Ordering::Relaxed) == 5 {
            drop(multipathd.lock().unwrap().take());
        }
    });
    let request = DetachRequest::new(source).observe(observer);
    let detachment = engine.detach(request, soon()).unwrap();
    let flush = &detachment.flush;
    assert!(matches!(flush, Some(Flush::Unreachable(_))), "{flush:?}");
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn a_failed_flush_ends_the_detach_and_is_reported_until_the_data_is_abandoned<
    M: Machine,
>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let node = attach(&engine, &source).node;
    machine.settle();
    let written = machine.write(&node);
    machine.fail_writes(true);
    let error = detach(&engine, &source).unwrap_err();
    machine.fail_writes(false);
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert_eq!(error.stage(), Some(Stage::Flush), "{error}");
    assert_eq!(devices(&*machine, &engine).len(), 1);
    drop(written);
    machine.settle();
    // A second flush succeeds and proves nothing, in another process as well.
    let next = machine.engine();
    let error = detach(&next, &source).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    let message = error.to_string();
    assert!(message.contains("an earlier flush of"), "{message}");
    let abandon = DetachRequest::new(source).abandon_unwritten();
    let detachment = next.detach(abandon, soon()).unwrap();
    let flush = &detachment.flush;
    assert!(matches!(flush, Some(Flush::Abandoned(_))), "{detachment:?}");
    assert!(!detachment.safe_to_unmap);
    assert_eq!(devices(&*machine, &engine), NONE);
}
