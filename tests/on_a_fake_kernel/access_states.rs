//! Paths whose target ports have ALUA access states, on the kernel of `tests/fake_kernel`.

use std::fs;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nix::errno::Errno;

use crate::fake_kernel::{Address, FakeKernel, Unit, access};
use lunbd::engine::{Flush, Multipath, StageObserver};
use lunbd::error::Stage;
use lunbd::scsi::AccessState;
use lunbd::{
    AttachRequest, Attachment, Deadline, DetachRequest, DetachTarget, Engine, ErrorKind, Result,
    Source,
};

const ACTIVE: u8 = 0;
const NON_OPTIMIZED: u8 = 1;
const STANDBY: u8 = 2;
const UNAVAILABLE: u8 = 3;
const TRANSITIONING: u8 = 15;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(120))
}

/// A machine whose hosts present one unit as LUN 1.
fn machine(states: &[u8]) -> (FakeKernel, Arc<Engine>) {
    let fake = FakeKernel::with_hosts(u32::try_from(states.len()).unwrap());
    for (host, &state) in (0..).zip(states) {
        let group = u16::try_from(host).unwrap() + 7;
        let unit = Unit {
            port_group: Some((group, state)),
            ..Unit::disk(1)
        };
        let kernel = fake.kernel();
        kernel.change(|state| state.units.insert(Address::of(host, 1), unit));
    }
    let engine = access::engine(fake.root());
    (fake, engine)
}

fn set(fake: &FakeKernel, host: u32, state: u8) {
    fake.kernel().change(|kernel| {
        let unit = kernel.units.get_mut(&Address::of(host, 1)).unwrap();
        unit.port_group.as_mut().unwrap().1 = state;
    });
}

fn attach(engine: &Engine, hosts: u32) -> Result<Attachment> {
    let mut sources = (0..hosts).map(|host| format!("scsi:{host}:0:0:1").parse::<Source>());
    let request = AttachRequest::new(sources.next().unwrap().unwrap());
    let request = sources.fold(request, |request, source| request.path(source.unwrap()));
    engine.attach(&request.multipath(Multipath::Off), soon())
}

#[test]
fn the_first_of_the_paths_in_the_best_state_is_handed_out() {
    let (fake, engine) = machine(&[STANDBY, NON_OPTIMIZED, ACTIVE, ACTIVE]);
    let node_of = |attached: &Attachment| {
        let paths = attached.paths().iter();
        paths
            .map(|path| path.node == attached.node)
            .collect::<Vec<_>>()
    };
    let attached = attach(&engine, 4).unwrap();
    assert_eq!(node_of(&attached), [false, false, true, false]);
    let states = attached.paths().iter().map(|path| path.access_state);
    let expected = [
        AccessState::Standby,
        AccessState::ActiveNonOptimized,
        AccessState::ActiveOptimized,
        AccessState::ActiveOptimized,
    ];
    assert!(states.eq(expected.map(Some)), "{attached:?}");
    set(&fake, 2, UNAVAILABLE);
    set(&fake, 3, STANDBY);
    let again = attach(&engine, 4).unwrap();
    assert_eq!(node_of(&again), [false, true, false, false]);
}

#[test]
fn a_unit_without_a_path_that_serves_io_is_not_ready_and_leaves_nothing() {
    let (fake, engine) = machine(&[STANDBY, UNAVAILABLE]);
    let error = attach(&engine, 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    let text = error.to_string();
    assert!(text.contains("0:0:0:1 is standby"), "{text}");
    assert!(text.contains("1:0:0:1 is unavailable"), "{text}");
    assert_eq!(error.last_seen(), None, "{error}");
    assert_eq!(fake.kernel().devices(), [] as [&str; 0]);
}

/// How often the engine asked units for their access states.
fn questions(fake: &FakeKernel) -> usize {
    let acts = fake.kernel().acts();
    acts.iter()
        .filter(|act| act.starts_with("port groups"))
        .count()
}

#[test]
fn a_path_in_transition_is_waited_for_before_udev_and_handed_out_in_its_new_state() {
    let (fake, engine) = machine(&[TRANSITIONING]);
    let attached = std::thread::scope(|scope| {
        let attach = scope.spawn(|| attach(&engine, 1));
        while questions(&fake) < 2 {
            std::thread::yield_now();
        }
        assert!(!attach.is_finished());
        set(&fake, 0, NON_OPTIMIZED);
        attach.join().unwrap().unwrap()
    });
    let state = attached.paths()[0].access_state;
    assert_eq!(state, Some(AccessState::ActiveNonOptimized));
}

#[test]
fn a_transition_that_does_not_end_is_a_timeout_that_names_it_and_udev_was_not_waited_for() {
    let (_fake, engine) = machine(&[TRANSITIONING]);
    let source: Source = "scsi:0:0:0:1".parse().unwrap();
    let (told, stages) = mpsc::channel();
    let observer = StageObserver::new(move |stage| told.send(stage).unwrap());
    let request = AttachRequest::new(source).multipath(Multipath::Off);
    let short = Deadline::after(Duration::from_secs(10));
    let error = engine
        .attach(&request.observe(observer), short)
        .unwrap_err();
    let stages: Vec<Stage> = stages.try_iter().collect();
    assert!(!stages.contains(&Stage::Settle), "{stages:?}");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Identify), "{error}");
    assert_eq!(error.last_seen(), Some("0:0:0:1 is transitioning"));
}

#[test]
fn a_unit_without_access_states_is_handed_out_over_its_first_path() {
    let (fake, engine) = machine(&[ACTIVE, ACTIVE]);
    fake.kernel().change(|kernel| {
        for unit in kernel.units.values_mut() {
            unit.port_group = None;
        }
    });
    let attached = attach(&engine, 2).unwrap();
    assert_eq!(attached.node, attached.paths()[0].node);
    assert_eq!(attached.paths()[0].access_state, None);
    assert_eq!(questions(&fake), 0);
}

#[test]
fn the_last_flush_is_that_of_a_path_which_takes_it() {
    let (fake, engine) = machine(&[ACTIVE, ACTIVE]);
    for standby in [1, 0] {
        let attached = attach(&engine, 2).unwrap();
        set(&fake, standby, STANDBY);
        let device = DetachTarget::Device(attached.node.clone());
        let before = fake.kernel().acts().len();
        let detached = engine.detach(device, soon()).unwrap();
        assert!(detached.safe_to_unmap, "{detached:?}");
        let paths = detached.receipt.unwrap().paths;
        let refused = paths.iter().filter(|path| path.hctl.host.0 == standby);
        let refused: Vec<_> = refused.map(|path| path.flush.clone()).collect();
        let is_refused = matches!(&refused[..], [Some(Flush::PagesWritten(_))]);
        assert!(is_refused, "{paths:?}");
        let acts = fake.kernel().acts().split_off(before);
        let last = acts.iter().rfind(|act| act.starts_with("flush"));
        assert_eq!(*last.unwrap(), format!("flush {}:0:0:1", 1 - standby));
        set(&fake, standby, ACTIVE);
    }
}

#[test]
fn without_a_path_that_takes_the_flush_a_detach_is_not_ready_and_leaves_all_as_it_was() {
    let (fake, engine) = machine(&[ACTIVE]);
    let attached = attach(&engine, 1).unwrap();
    set(&fake, 0, STANDBY);
    let device = || DetachTarget::Device(attached.node.clone());
    let failure = engine.detach(device(), soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::NotReady, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    assert_eq!(fake.kernel().devices(), ["0:0:0:1"]);
    set(&fake, 0, ACTIVE);
    assert!(engine.detach(device(), soon()).unwrap().safe_to_unmap);
}

/// Deletes a path as another process would.
fn delete(engine: &Engine, host: u32) {
    let bus = engine.roots().sysfs.join("bus/scsi/devices");
    let delete = bus.join(format!("{host}:0:0:1/delete"));
    let written = engine
        .roots()
        .devices
        .write_attribute(&delete, "1", &|| true);
    assert!(written.unwrap());
}

#[test]
fn data_in_the_cache_of_a_unit_whose_refusing_path_goes_is_in_doubt_unless_another_path_flushes_it()
{
    for is_flushed in [false, true] {
        let (fake, engine) = machine(&[ACTIVE, ACTIVE]);
        let attached = attach(&engine, 2).unwrap();
        let name = attached.identity().unwrap().wwid().unwrap();
        let unit = || format!("unit:{name}").parse::<DetachTarget>().unwrap();
        set(&fake, 0, STANDBY);
        set(&fake, 1, STANDBY);
        let failure = engine.detach(unit(), soon()).unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::NotReady, "{failure}");
        delete(&engine, 0);
        if is_flushed {
            set(&fake, 1, ACTIVE);
        } else {
            delete(&engine, 1);
        }
        for _ in 0..2 {
            let detached = engine.detach(unit(), soon()).unwrap();
            assert_eq!(detached.safe_to_unmap, is_flushed, "{detached:?}");
        }
        let request = DetachRequest::new(unit()).abandon_unwritten();
        engine.detach(request, soon()).unwrap();
        assert!(engine.detach(unit(), soon()).unwrap().safe_to_unmap);
    }
}

#[test]
fn a_unit_that_cannot_write_its_cache_has_lost_data_also_if_its_path_is_standby_afterwards() {
    // A target reports a hardware error at once, and the kernel sends the command again after a
    // medium error (`drivers/scsi/scsi_error.c`, `scsi_check_sense`).
    for (error, answers) in [(Errno::EREMOTEIO, 1), (Errno::EIO, 6)] {
        let (fake, engine) = machine(&[ACTIVE]);
        let attached = attach(&engine, 1).unwrap();
        set(&fake, 0, STANDBY);
        fake.kernel().change(|kernel| {
            for unit in kernel.units.values_mut() {
                unit.flush_failure = (error, answers);
            }
        });
        let device = || DetachTarget::Device(attached.node.clone());
        let failure = engine.detach(device(), soon()).unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::Io, "{failure}");
        set(&fake, 0, ACTIVE);
        let failure = engine.detach(device(), soon()).unwrap_err();
        assert!(
            failure.to_string().contains("an earlier flush"),
            "{failure}"
        );
    }
}

#[test]
fn a_path_over_which_the_kernel_sends_no_flush_proves_nothing_about_the_units_cache() {
    let (fake, engine) = machine(&[ACTIVE, ACTIVE]);
    let attached = attach(&engine, 2).unwrap();
    set(&fake, 0, STANDBY);
    let name = attached.paths()[1].node.file_name().unwrap();
    let queue = fake.root().join("sys/block").join(name).join("queue");
    fs::write(queue.join("write_cache"), "write through\n").unwrap();
    let device = || DetachTarget::Device(attached.node.clone());
    let failure = engine.detach(device(), soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::NotReady, "{failure}");
    fs::write(queue.join("write_cache"), "write back\n").unwrap();
    assert!(engine.detach(device(), soon()).unwrap().safe_to_unmap);
}
