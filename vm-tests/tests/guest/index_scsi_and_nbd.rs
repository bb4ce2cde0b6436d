//! An engine that knows the machine's devices from their events. It must notice what other
//! processes do to them.

use std::fs;
use std::time::Duration;

use lunbd::uevent::HubOptions;
use lunbd::{AttachRequest, Engine, Roots, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::system_calls::SystemCalls;
use vm_tests::guest::{self, ScsiDebug};

/// An engine answers fewer calls than this by a look at each device.
const WARMING: usize = 3;
const LIMIT: Duration = Duration::from_secs(60);

fn attach(engine: &Engine, source: &Source) -> lunbd::Attachment {
    let request = AttachRequest::new(source.clone());
    engine.attach(&request, soon()).unwrap()
}

fn warm(engine: &Engine, source: &Source) {
    for _ in 0..WARMING {
        assert!(attach(engine, source).changed);
        assert!(engine.detach(source.clone(), soon()).unwrap().changed);
    }
}

/// An export, one to warm an engine with, and the server.
fn exports() -> (NbdModule, NbdServer, [Source; 2]) {
    let module = NbdModule::with_backend_ids(4);
    let server = NbdServer::nbdkit(At::unix(), &["--threads=1", "memory", "1M"]);
    let sources = ["one", "warming"].map(|name| server.uri(name).parse().unwrap());
    (module, server, sources)
}

#[test]
fn what_another_process_connects_or_disconnects_is_known_at_the_next_call() {
    let (_module, _server, [one, warming]) = exports();
    let engine = engine();
    warm(&engine, &warming);
    let uri = one.to_string();
    for _ in 0..3 {
        guest::run(&["lunbd", "attach", &uri]);
        let again = attach(&engine, &one);
        assert!(!again.changed, "{again:?}");
        let other = attach(&engine, &warming);
        assert!(other.changed);
        assert_ne!(other.nbd_index(), again.nbd_index());
        guest::run(&["lunbd", "detach", &uri]);
        assert!(!engine.detach(one.clone(), soon()).unwrap().changed);
        // The free index is used again before a new device is made.
        let new = attach(&engine, &one);
        assert!(new.changed);
        assert_eq!(new.nbd_index(), again.nbd_index());
        for source in [&one, &warming] {
            assert!(engine.detach(source.clone(), soon()).unwrap().changed);
        }
    }
}

#[test]
fn what_another_process_connects_while_events_are_lost_is_known_at_the_next_call() {
    let (_module, _server, [one, warming]) = exports();
    // The kernel's minimum is a buffer of about two events.
    let options = HubOptions::default().receive_buffer(1);
    let engine = Engine::with_options(Roots::default(), &options).unwrap();
    warm(&engine, &warming);
    let before = engine.hub().counters().overruns;
    guest::wait_until("events to be lost", LIMIT, || {
        for _ in 0..200 {
            fs::write("/sys/class/mem/null/uevent", "change").unwrap();
        }
        (engine.hub().counters().overruns > before).then_some(())
    });
    let uri = one.to_string();
    for _ in 0..3 {
        guest::run(&["lunbd", "attach", &uri]);
        assert!(!attach(&engine, &one).changed);
        guest::run(&["lunbd", "detach", &uri]);
        assert!(!engine.detach(one.clone(), soon()).unwrap().changed);
    }
}

#[test]
fn a_device_that_a_rescan_has_made_a_path_of_the_unit_is_seen_and_left_where_no_name_is_unique() {
    let target = ScsiDebug::options().luns(4).hosts(2).size_mib(16).load();
    let at = |host: usize, lun: u32| -> Source {
        let source = format!("scsi:{}:0:0:{lun}", target.hosts()[host]);
        source.parse().unwrap()
    };
    let engine = engine();
    target.set("vpd_use_hostno", 1);
    warm(&engine, &at(0, 1));
    attach(&engine, &at(1, 3));
    // From here on both hosts lead to one unit, which the kernel has read only over the first.
    target.set("vpd_use_hostno", 0);
    assert!(attach(&engine, &at(0, 3)).changed);
    assert_eq!(target.devices().len(), 2);
    let second = format!("{}:0:0:3", target.hosts()[1]);
    // No event reports this.
    fs::write(format!("/sys/bus/scsi/devices/{second}/rescan"), "1").unwrap();
    let detachment = engine.detach(at(0, 3), soon()).unwrap();
    assert!(!detachment.safe_to_unmap);
    let receipt = detachment.receipt.unwrap();
    assert_eq!(receipt.paths.len(), 1, "{receipt:?}");
    let seen = receipt.notes.iter().any(|note| note.contains(&second));
    assert!(seen, "{receipt:?}");
    assert_eq!(target.devices(), [second]);
}

#[test]
fn what_another_process_scans_or_deletes_is_known_at_the_next_call() {
    // Each unit has the same UUID, which is a unique name.
    let options = ScsiDebug::options().paths(2).luns(4);
    let target = options.parameter("uuid_ctl", 2).load();
    let at = |host: usize, lun: u32| -> Source {
        let source = format!("scsi:{}:0:0:{lun}", target.hosts()[host]);
        source.parse().unwrap()
    };
    let engine = engine();
    warm(&engine, &at(0, 1));
    for _ in 0..3 {
        assert!(attach(&engine, &at(0, 2)).changed);
        // This is the unit's other path.
        let other = target.hosts()[1];
        ScsiDebug::scan_on(other, "0 0 2");
        guest::wait_until("the other path's disk", LIMIT, || {
            ScsiDebug::disk_on(other, 2)
        });
        guest::udevd::settle();
        let detachment = engine.detach(at(0, 2), soon()).unwrap();
        let receipt = detachment.receipt.unwrap();
        assert_eq!(receipt.paths.len(), 2, "{receipt:?}");
        assert!(target.devices().is_empty(), "{:?}", target.devices());

        assert!(attach(&engine, &at(0, 2)).changed);
        guest::udevd::settle();
        fs::write(target.device_dir(2).join("delete"), "1").unwrap();
        let detachment = engine.detach(at(0, 2), soon()).unwrap();
        assert!(!detachment.changed, "{detachment:?}");
    }
}

/// The least number of system calls of several attaches, and of several detaches.
fn calls_of(engine: &Engine, source: &Source) -> [u64; 2] {
    let mut fewest = [u64::MAX; 2];
    for _ in 0..4 {
        let attach = || drop(attach(engine, source));
        let detach = || drop(engine.detach(source.clone(), soon()).unwrap());
        for (call, fewest) in [&attach as &dyn Fn(), &detach].into_iter().zip(&mut fewest) {
            guest::udevd::settle_and_end_workers();
            let calls = SystemCalls::of_this_process();
            let before = calls.count();
            call();
            *fewest = calls.count().saturating_sub(before).min(*fewest);
        }
    }
    fewest
}

fn tell_calls(kind: &str, alone: [u64; 2], others: u32, beside: [u64; 2]) {
    guest::tell(&format!(
        "{kind}: system calls of an attach and a detach: {alone:?} alone, {beside:?} beside {others}"
    ));
}

/// Each call takes at most this number of system calls.
#[track_caller]
fn require_at_most(limit: u64, each: &[u64]) {
    let is_within = each.iter().all(|calls| *calls <= limit);
    assert!(is_within, "{each:?} system calls, {limit} allowed");
}

#[track_caller]
fn is_flat(alone: u64, beside: u64) {
    assert!(
        beside * 10 <= alone * 11,
        "{alone} alone, {beside} beside others"
    );
}

#[test]
fn an_nbd_attach_takes_no_more_calls_beside_40_others_and_a_detach_two_for_each_server_connection()
{
    const OTHERS: u32 = 40;
    guest::time_limit(Duration::from_secs(600));
    let (_module, server, [one, warming]) = exports();
    let engine = engine();
    warm(&engine, &warming);
    let alone = calls_of(&engine, &one);
    let other = |number: u32| -> Source { server.uri(&format!("v{number}")).parse().unwrap() };
    // This engine ends before the calls are counted.
    {
        let another = Engine::start(Roots::default()).unwrap();
        for number in 0..OTHERS {
            attach(&another, &other(number));
        }
    }
    // The search for users sees the kernel thread of each device once.
    warm(&engine, &warming);
    let beside = calls_of(&engine, &one);
    for number in 0..OTHERS {
        engine.detach(other(number), soon()).unwrap();
    }
    tell_calls("NBD", alone, OTHERS, beside);
    // The detach takes a few calls for each process of the machine.
    require_at_most(400, &alone[..1]);
    is_flat(alone[0], beside[0]);
    // The server runs in this machine. The search for users asks about each descriptor that a
    // process has open, and about each thread, whose table of descriptors may be its own.
    // The server has a socket and a thread for each other device.
    is_flat(alone[1] + 2 * u64::from(OTHERS), beside[1]);
}

#[test]
fn a_scsi_attach_takes_as_many_system_calls_beside_40_others_as_alone_and_a_detach_looks_at_each() {
    const OTHERS: u32 = 40;
    guest::time_limit(Duration::from_secs(600));
    let target = ScsiDebug::with_luns(OTHERS + 2);
    let one = guest::agent::unit(&target, u64::from(OTHERS + 1));
    let engine = engine();
    warm(&engine, &one);
    let alone = calls_of(&engine, &one);
    for lun in 0..OTHERS {
        target.scan(&format!("0 0 {lun}"));
        target.wait_for_disk(u64::from(lun));
    }
    // The scans start kernel threads, and the search for users sees each of them once.
    warm(&engine, &one);
    let beside = calls_of(&engine, &one);
    tell_calls("SCSI", alone, OTHERS, beside);
    require_at_most(600, &alone);
    is_flat(alone[0], beside[0]);
    // A detach reads a page of each other disk before it claims that no path is left.
    is_flat(alone[1] + 3 * u64::from(OTHERS), beside[1]);
}
