//! Volumes that a reconciler keeps as wanted: servers that go away, paths that come back, and
//! devices that other processes detach.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use lunbd::engine::NbdOptions;
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Event, Events, Options, Reconciler};
use lunbd::{AttachRequest, Deadline, Engine, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::exports::{Exports, assert_mark, write_mark};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store, backends};

/// The limit of a wait, also on a machine that is several times slower.
const LIMIT: Duration = Duration::from_secs(240);

fn id(text: &str) -> VolumeId {
    text.parse().unwrap()
}

fn request(source: &str) -> AttachRequest {
    AttachRequest::new(source.parse::<Source>().unwrap())
}

/// Runs a reconciler in this process during the test, and then detaches everything.
fn while_running(
    place: &Directory,
    options: Options,
    test: impl FnOnce(&Arc<Engine>, &Reconciler, &mut Events),
) {
    struct Stop<'a>(&'a Reconciler);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    let engine = Arc::new(engine());
    let journal = engine
        .open_journal_at(&place.join("journal"), soon())
        .unwrap();
    let reconciler = Reconciler::new(Arc::clone(&engine), journal, options);
    let mut events = reconciler.subscribe();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let stop = Stop(&reconciler);
        test(&engine, &reconciler, &mut events);
        reconciler.set(Desired::default());
        guest::wait_until("all to be detached", LIMIT, || {
            reconciler.in_use().is_empty().then_some(())
        });
        drop(stop);
        running.join().unwrap().unwrap();
    });
}

fn next(events: &mut Events, what: &str, is: impl Fn(&Event) -> bool) -> Event {
    let limit = Deadline::after(LIMIT);
    loop {
        let event = events
            .next(limit)
            .unwrap_or_else(|| panic!("no {what}"))
            .event;
        println!("{event}");
        if is(&event) {
            return event;
        }
    }
}

#[test]
fn the_reconciler_heals_a_returned_server_and_a_hung_one_delays_no_other_volume() {
    const HUNG: u32 = 12;
    let _module = NbdModule::with_backend_ids(4);
    let store = Store::sparse(1 << 20);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let hung = NbdServer::nbdkit(At::unix(), &["memory", "1M"]);
    let exports = Exports::new(8);
    let place = Directory::new("heal");
    // No hanging step ends before the other volumes are attached.
    let options = Options::default().step_limit(LIMIT * 2);
    while_running(&place, options, |_, reconciler, events| {
        let mut desired = Desired::default();
        desired
            .insert(id("pvc-1"), &request(&server.uri("disk")))
            .unwrap();
        hung.stop();
        // More volumes than there are threads, and each takes as long as a step may.
        for number in 0..HUNG {
            let options = NbdOptions::default();
            let backend = format!("hung-{number}").parse().unwrap();
            let source: Source = hung.uri(&format!("x{number}")).parse().unwrap();
            let request = AttachRequest::new(source).nbd(options.backend(backend));
            desired
                .insert(id(&format!("hung-{number}")), &request)
                .unwrap();
        }
        for number in 0..8 {
            let request = request(&exports.source(number));
            desired
                .insert(id(&format!("well-{number}")), &request)
                .unwrap();
        }
        reconciler.set(desired.clone());
        for number in 0..8 {
            let volume = id(&format!("well-{number}"));
            reconciler
                .wait_attached(&volume, Deadline::after(LIMIT))
                .unwrap();
        }
        let there = reconciler
            .wait_attached(&id("pvc-1"), Deadline::after(LIMIT))
            .unwrap();
        for number in 0..HUNG {
            desired.remove(&id(&format!("hung-{number}")));
        }
        reconciler.set(desired);
        hung.cont();
        let device = there.node.unwrap();
        write_mark(&device, "nbd", 1);
        nix::unistd::sync();
        for round in 0..2 {
            server.kill();
            let lost = next(
                events,
                "loss",
                |event| matches!(event, Event::Lost { volume, .. } if *volume == id("pvc-1")),
            );
            let Event::Lost { budget_left, .. } = lost else {
                unreachable!("just matched");
            };
            assert!(budget_left.is_some(), "{round}");
            server.start();
            next(
                events,
                "healing",
                |event| matches!(event, Event::Healed { volume } if *volume == id("pvc-1")),
            );
            assert_mark(&device, "nbd", 1);
        }
    });
    assert!(backends().is_empty());
}

#[test]
fn the_reconciler_attaches_a_device_again_that_another_tool_disconnected_also_under_a_reader() {
    let _module = NbdModule::with_backend_ids(2);
    let exports = Exports::new(1);
    let place = Directory::new("disconnected");
    // Only what happens causes an event.
    let options = Options::default().resync(LIMIT * 2);
    while_running(&place, options, |_, reconciler, events| {
        let volume = id("pvc-1");
        let mut desired = Desired::default();
        desired
            .insert(volume.clone(), &request(&exports.source(0)))
            .unwrap();
        reconciler.set(desired);
        for round in 0..12 {
            let limit = Deadline::after(LIMIT);
            let there = reconciler.wait_attached(&volume, limit).unwrap();
            let device = there.node.unwrap();
            // The kernel frees the device with its last opener.
            let reader = (round % 2 == 1).then(|| fs::File::open(&device).unwrap());
            guest::run(&["nbd-client", "-d", device.to_str().unwrap()]);
            drop(reader);
            next(events, "loss", |event| matches!(event, Event::Lost { .. }));
        }
    });
    assert!(backends().is_empty());
}
