//! A reconciler that keeps volumes as an agent wants them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Event, Events, Options, Reconciler, StepKind};
use lunbd::{AttachRequest, Deadline, Engine, Source};

use super::machine::{
    Machine, attach, delete, detach, devices, shown_size, soon, unit, wait_until,
};

fn id(text: &str) -> VolumeId {
    text.parse().unwrap()
}

fn request(source: &Source) -> AttachRequest {
    AttachRequest::new(source.clone())
}

/// Runs a reconciler while `test` runs, and detaches everything afterwards.
fn while_running<M: Machine>(
    machine: &M,
    options: Options,
    test: impl FnOnce(&Arc<Engine>, &Reconciler, &mut Events),
) {
    /// Stops the reconciler also if the test panics.
    struct Stop<'a>(&'a Reconciler);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    let engine = machine.engine();
    let journal = engine.open_journal_at(&machine.journal(), soon()).unwrap();
    let reconciler = Reconciler::new(Arc::clone(&engine), journal, options);
    let mut events = reconciler.subscribe();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let stop = Stop(&reconciler);
        test(&engine, &reconciler, &mut events);
        reconciler.set(Desired::default());
        wait_until("all to be detached", || reconciler.in_use().is_empty());
        drop(stop);
        running.join().unwrap().unwrap();
    });
}

fn next(events: &mut Events, what: &str, is: impl Fn(&Event) -> bool) -> Event {
    let limit = soon();
    loop {
        let event = events
            .next(limit)
            .unwrap_or_else(|| panic!("no {what}"))
            .event;
        if is(&event) {
            return event;
        }
    }
}

pub(crate) fn what_is_wanted_is_attached_what_is_lost_comes_back_and_the_rest_is_detached<
    M: Machine,
>() {
    let machine = M::with(1, 8);
    let host = machine.hosts()[0];
    // This device is neither wanted nor the reconciler's.
    let foreign = unit(host, 7);
    while_running(&*machine, Options::default(), |engine, reconciler, _| {
        attach(engine, &foreign);
        let mut desired = Desired::default();
        for lun in [1, 2] {
            let volume = id(&format!("pvc-{lun}"));
            desired.insert(volume, &request(&unit(host, lun))).unwrap();
        }
        reconciler.set(desired.clone());
        for volume in ["pvc-1", "pvc-2"] {
            reconciler.wait_attached(&id(volume), soon()).unwrap();
        }
        assert_eq!(devices(&*machine, engine).len(), 3);
        machine.settle();
        delete(engine, &unit(host, 1));
        wait_until("the lost volume to be back", || {
            devices(&*machine, engine).contains(&format!("{host}:0:0:1"))
        });
        reconciler.wait_attached(&id("pvc-1"), soon()).unwrap();
        desired.remove(&id("pvc-1"));
        reconciler.set(desired);
        wait_until("the volume that is wanted no more to be gone", || {
            devices(&*machine, engine) == [2, 7].map(|lun| format!("{host}:0:0:{lun}"))
        });
    });
    let engine = machine.engine();
    assert_eq!(devices(&*machine, &engine), [format!("{host}:0:0:7")]);
    detach(&engine, &foreign).unwrap();
}

pub(crate) fn a_path_that_is_lost_and_comes_back_is_taken_in_again<M: Machine>() {
    let machine = M::with_two_paths();
    let sources: Vec<Source> = machine.hosts().iter().map(|host| unit(*host, 1)).collect();
    while_running(
        &*machine,
        Options::default(),
        |engine, reconciler, events| {
            let both = request(&sources[0]).path(sources[1].clone());
            let mut desired = Desired::default();
            desired.insert(id("pvc-1"), &both).unwrap();
            reconciler.set(desired);
            let there = reconciler.wait_attached(&id("pvc-1"), soon()).unwrap();
            assert_eq!(there.paths.len(), 2, "{there:?}");
            let is_whole = || {
                let there = reconciler.wait_attached(&id("pvc-1"), soon()).unwrap();
                let whole = there.paths.len() == 2 && there.missing.is_empty();
                whole && devices(&*machine, engine).len() == 2
            };
            machine.settle();
            // The second deletion happens while the path comes back.
            for _ in 0..2 {
                delete(engine, &sources[1]);
                wait_until("the path to be back", || {
                    devices(&*machine, engine).len() == 2
                });
            }
            next(events, "change", |event| {
                matches!(event, Event::Changed { paths: 2, .. })
            });
            wait_until("both paths to be known", is_whole);
            let again = reconciler.wait_attached(&id("pvc-1"), soon()).unwrap();
            assert_eq!(again.node, there.node);
            // Delete the path that the attach returned: another device comes back.
            machine.settle();
            delete(engine, &sources[0]);
            next(events, "change", |event| {
                matches!(event, Event::Lost { .. } | Event::Changed { .. })
            });
            wait_until("it to be whole again", is_whole);
        },
    );
    assert_eq!(devices(&*machine, &machine.engine()), [] as [&str; 0]);
}

pub(crate) fn the_reconciler_grows_a_unit_with_its_array_and_delays_no_other_volume_until_then<
    M: Machine,
>() {
    const GIB: u64 = 1 << 30;
    let machine = M::with(1, 4);
    let host = machine.hosts()[0];
    let retry = Options::default().retry(Duration::from_millis(50), Duration::from_secs(1));
    while_running(&*machine, retry, |engine, reconciler, events| {
        let grows = id("grows");
        let mut desired = Desired::default();
        desired
            .insert(grows.clone(), &request(&unit(host, 1)))
            .unwrap();
        desired.set_min_size(&grows, Some(GIB)).unwrap();
        reconciler.set(desired.clone());
        let of_resize = |event: &Event| {
            matches!(
                event,
                Event::Failed {
                    step: StepKind::Resize,
                    next_try: Some(_),
                    ..
                }
            )
        };
        next(events, "failure with its next try", of_resize);
        desired
            .insert(id("well"), &request(&unit(host, 2)))
            .unwrap();
        reconciler.set(desired.clone());
        reconciler.wait_attached(&id("well"), soon()).unwrap();
        let passed = Deadline::after(Duration::ZERO);
        let small = reconciler.wait_attached(&grows, passed).unwrap_err();
        let last = small.last_seen().unwrap_or_default();
        assert!(last.contains(&GIB.to_string()), "{last}");

        assert_eq!(machine.grow(), GIB);
        let there = reconciler.wait_attached(&grows, soon()).unwrap();
        assert_eq!(there.size, Some(GIB));
        let node: &Path = there.node.as_deref().unwrap();
        assert_eq!(shown_size(engine, node), GIB);
        let is_growth = |event: &Event| matches!(event, Event::Resized { size: GIB, old_size, .. } if *old_size < GIB);
        next(events, "growth", is_growth);
        // A device that is larger than wanted stays as it is.
        desired.set_min_size(&grows, Some(1)).unwrap();
        reconciler.set(desired);
        let there = reconciler.wait_attached(&grows, soon()).unwrap();
        assert_eq!(there.size, Some(GIB));
        assert!(reconciler.plan().is_empty(), "{}", reconciler.plan());
    });
    assert_eq!(devices(&*machine, &machine.engine()), [] as [&str; 0]);
}
