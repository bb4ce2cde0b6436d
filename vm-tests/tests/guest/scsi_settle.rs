//! The state when an attach returns, compared with the state when `udevadm settle` returns.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use lunbd::engine::StageObserver;
use lunbd::error::Stage;
use lunbd::uevent::{HubOptions, Settled};
use lunbd::{AttachRequest, DetachRequest, Engine, Roots};
use vm_tests::guest::agent::{assert_is_another_life, attach, engine, soon, unit};
use vm_tests::guest::{self, ScsiDebug, udevd};

const ROUNDS: u64 = 50;
/// The limit for events that must come.
const LIMIT: Duration = Duration::from_secs(60);

/// Whether udev has a record of the disk, and the links that the record names.
fn is_on_record(disk: &str) -> bool {
    let devno = fs::read_to_string(format!("/sys/block/{disk}/dev")).unwrap();
    let record = fs::read_to_string(format!("/run/udev/data/b{}", devno.trim()));
    let record = record.unwrap_or_default();
    let links: Vec<_> = record
        .lines()
        .filter_map(|line| line.strip_prefix("S:"))
        .map(|link| Path::new("/dev").join(link))
        .collect();
    let leads_here = |link: &std::path::PathBuf| {
        fs::canonicalize(link).is_ok_and(|to| to == Path::new("/dev").join(disk))
    };
    !links.is_empty() && links.iter().all(leads_here)
}

#[test]
fn fifty_attaches_return_with_udevs_record_and_links_which_a_scan_and_udevadm_settle_do_not_always()
{
    guest::time_limit(Duration::from_mins(15));
    if guest::kernel() < (6, 12) {
        guest::skip("udevadm settle is early from 6.12 on");
    }
    let (engine, target) = (engine(), ScsiDebug::with_luns(200));
    for lun in 0..ROUNDS {
        let attachment = attach(&engine, &target, lun);
        let disk = attachment.node.file_name().unwrap().to_str().unwrap();
        assert!(is_on_record(disk), "{attachment:?}");
        assert!(!attachment.links.is_empty());
    }
    let mut without_disk = 0;
    let mut without_record = 0;
    for lun in 100..100 + ROUNDS {
        target.scan(&format!("0 0 {lun}"));
        udevd::settle();
        match target.disk(lun) {
            None => without_disk += 1,
            Some(disk) if !is_on_record(&disk) => without_record += 1,
            Some(_) => {}
        }
    }
    guest::tell(&format!(
        "of {ROUNDS} with a scan and udevadm settle, {without_disk} had no disk yet and \
         {without_record} no record; of {ROUNDS} attaches none"
    ));
    assert!(
        without_disk + without_record > 0,
        "udevadm settle was not early"
    );
}

#[test]
fn a_full_socket_buffer_in_a_detach_ends_in_a_resync_and_not_in_a_lost_waiter() {
    guest::enter();
    let target = ScsiDebug::with_luns(2);
    // The smallest buffer that the kernel gives: a few events.
    let options = HubOptions::default().receive_buffer(1);
    let engine = Arc::new(Engine::with_options(Roots::default(), &options).unwrap());
    let request = AttachRequest::new(unit(&target, 1));
    let attachment = engine.attach(&request, soon()).unwrap();
    // Events that udevd makes the kernel send late would be a part of the flood.
    udevd::settle();
    let before = engine.hub().counters().resyncs;
    let (deletes, flood_from) = mpsc::channel();
    let its = Arc::clone(&engine);
    let observer = StageObserver::new(move |stage| {
        // The detach has its watch here, and receives the notice before the delete.
        if stage == Stage::Delete {
            deletes.send(()).unwrap();
            guest::wait_until("a resync", LIMIT, || {
                (its.hub().counters().resyncs > before).then_some(())
            });
        }
    });
    let request = DetachRequest::new(unit(&target, 1)).observe(observer);
    let detachment = std::thread::scope(|scope| {
        let hub = engine.hub();
        scope.spawn(move || {
            const BURST: usize = 64;
            let change = || fs::write("/sys/devices/virtual/mem/full/uevent", "change").unwrap();
            flood_from.recv().unwrap();
            let start = Instant::now();
            while hub.counters().resyncs == before {
                assert!(start.elapsed() < LIMIT, "no resync");
                let seen = hub.counters();
                (0..BURST).for_each(|_| change());
                // Without a pace udevd would get far more events than it can handle in time.
                guest::wait_until("the hub to receive", LIMIT, || {
                    let now = hub.counters();
                    let receives = now.events > seen.events || now.overruns > seen.overruns;
                    (receives || now.resyncs > before).then_some(())
                });
            }
            (0..500).for_each(|_| change());
        });
        engine.detach(request, soon()).unwrap()
    });
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert!(
        attachment
            .links
            .iter()
            .all(|link| link.symlink_metadata().is_err())
    );
    let record = format!("/run/udev/data/b{}", attachment.devno);
    assert!(!Path::new(&record).exists());
    udevd::settle();
    assert_ne!(attachment.settled, Settled::KernelOnly);
}

#[test]
fn a_late_udev_event_of_a_removed_disk_does_not_end_the_attach_of_the_next_one() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let first = attach(&engine, &target, 1);
    // A udevd that has the disk open when it stops would keep its name from the next disk.
    udevd::settle();
    let udev = Mutex::new(Some(udevd::stopped()));
    fs::write(target.device_dir(1).join("delete"), "1").unwrap();
    guest::wait_until("the first life to be gone", LIMIT, || {
        (!target.device_dir(1).exists()).then_some(())
    });
    // udevd then reports both instances, the first one first.
    let on_settle = StageObserver::new(move |stage| {
        if stage == Stage::Settle {
            drop(udev.lock().unwrap().take());
        }
    });
    let request = AttachRequest::new(unit(&target, 1)).observe(on_settle);
    let second = engine.attach(&request, soon()).unwrap();
    assert_eq!(second.node, first.node);
    assert_is_another_life(&first, &second);
    assert!(!second.links.is_empty());
    engine.detach(unit(&target, 1), soon()).unwrap();
}
