//! Paths whose target ports have ALUA access states, without a multipath map.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use lunbd::engine::{DetachFailure, Flush, Multipath, StageObserver};
use lunbd::error::Stage;
use lunbd::iscsi::SessionOptions;
use lunbd::scsi::AccessState;
use lunbd::{
    AttachRequest, Attachment, Deadline, DetachRequest, DetachTarget, Detachment, Engine,
    ErrorKind, Result, Source,
};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_proxy::IscsiProxy;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::INITIATOR;
use vm_tests::guest::lio::{PortGroup, Store};
use vm_tests::guest::unwritten::keep_unwritten;

const IQN: &str = "iqn.2026-01.example:access-states";
const ACTIVE: u8 = 0;
const NON_OPTIMIZED: u8 = 1;
const STANDBY: u8 = 2;
const UNAVAILABLE: u8 = 3;
const TRANSITIONING: u8 = 15;
const BYTES: u64 = 8 << 20;
const MINUTE: Duration = Duration::from_secs(60);

/// A volume with a write cache that two targets present, each at a port of its own group.
struct Array {
    engine: Engine,
    // The targets are dropped before the groups.
    targets: [IscsiTarget; 2],
    groups: [PortGroup; 2],
    store: Store,
}

impl Array {
    fn with(serial: &str, states: [u8; 2]) -> Self {
        iscsi_tcp::prepare();
        let store = Store::file(serial, BYTES);
        store.set_write_cache(true);
        let groups = [1, 2].map(|number| store.port_group(number));
        let mut targets = ["a", "b"].map(|name| IscsiTarget::new(&format!("{IQN}-{name}")));
        for (target, group) in targets.iter_mut().zip(&groups) {
            target.map_in_group(1, &store, group);
        }
        for (group, state) in groups.iter().zip(states) {
            group.set_access_state(state);
        }
        let engine = engine();
        Self {
            engine,
            targets,
            groups,
            store,
        }
    }

    fn source(&self, target: usize) -> Source {
        self.targets[target].uri(&[target], 1).parse().unwrap()
    }

    fn attach(&self, targets: &[usize]) -> Result<Attachment> {
        self.attach_observed(targets, StageObserver::new(|_| {}), soon())
    }

    fn attach_observed(
        &self,
        targets: &[usize],
        observer: StageObserver,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let options = SessionOptions::new(INITIATOR.parse().unwrap());
        let mut sources = targets.iter().map(|&target| self.source(target));
        let request = AttachRequest::new(sources.next().unwrap());
        let request = sources.fold(request, AttachRequest::path);
        let request = request.multipath(Multipath::Off).log_in(options);
        let request = request.min_paths(targets.len());
        self.engine.attach(&request.observe(observer), deadline)
    }

    fn detach(&self, attached: Attachment) -> Result<Detachment, DetachFailure> {
        let device = DetachTarget::Device(attached.node);
        self.engine.detach(device, soon())
    }

    /// The first byte of the volume on the target.
    fn first_byte(&self) -> u8 {
        let mut byte = [0];
        let path = self.store.path().unwrap();
        File::open(path).unwrap().read_exact(&mut byte).unwrap();
        byte[0]
    }
}

fn read_first_block(node: &Path) -> io::Result<()> {
    File::open(node)?.read_exact(&mut [0; 4096])
}

/// The stages that are entered within this time.
fn stages_within(told: &Receiver<Stage>, time: Duration) -> Vec<Stage> {
    let end = Instant::now() + time;
    let next = || told.recv_timeout(end.saturating_duration_since(Instant::now()));
    std::iter::from_fn(|| next().ok()).collect()
}

fn states(attached: &Attachment) -> Vec<Option<AccessState>> {
    let paths = attached.paths().iter();
    paths.map(|path| path.access_state).collect()
}

/// Waits until the kernel knows that the disk's target port has this state.
fn wait_for_known_state(node: &Path, state: &str) {
    let disk = Path::new("/sys/block").join(node.file_name().unwrap());
    guest::wait_until(&format!("the kernel to know {state}"), MINUTE, || {
        let known = fs::read_to_string(disk.join("device/access_state")).unwrap();
        (known.trim() == state).then_some(())
    });
}

/// Tells the kernel, and not the unit, what cache the disk has.
fn set_cache_type(node: &Path, cache: &str) {
    let disk = Path::new("/sys/block").join(node.file_name().unwrap());
    let [address] = &guest::entries(disk.join("device/scsi_disk"))[..] else {
        panic!("{} has no SCSI disk", node.display());
    };
    let attribute = disk
        .join("device/scsi_disk")
        .join(address)
        .join("cache_type");
    fs::write(attribute, format!("temporary {cache}")).unwrap();
}

/// The marks that make other processes' detaches report a loss.
fn marks_of_failed_flushes() -> Vec<String> {
    let mut names = guest::entries("/run/lunbd");
    names.retain(|name| name.starts_with("lost-"));
    names
}

/// No flush has failed, and the pages of one path are marked as in the unit's cache alone.
fn one_path_is_marked_as_in_the_cache() {
    let [mark] = &*marks_of_failed_flushes() else {
        panic!("{:?}", guest::entries("/run/lunbd"));
    };
    let mark = fs::read_to_string(format!("/run/lunbd/{mark}")).unwrap();
    assert!(
        mark.starts_with("no path flushed the unit's cache"),
        "{mark}"
    );
}

#[test]
fn an_attach_returns_an_active_path_and_not_the_first_one_in_standby() {
    let array = Array::with("a5501", [STANDBY, ACTIVE]);
    let attached = array.attach(&[0, 1]).unwrap();
    let expected = [AccessState::Standby, AccessState::ActiveOptimized].map(Some);
    assert_eq!(states(&attached), expected);
    assert_eq!(attached.node, attached.paths()[1].node);
    read_first_block(&attached.node).unwrap();
    read_first_block(&attached.paths()[0].node).unwrap_err();

    // The attach reads the states again.
    array.groups[0].set_access_state(NON_OPTIMIZED);
    array.groups[1].set_access_state(UNAVAILABLE);
    let again = array.attach(&[0, 1]).unwrap();
    assert!(!again.changed);
    assert_eq!(again.node, again.paths()[0].node);
    read_first_block(&again.node).unwrap();
    array.groups[1].set_access_state(ACTIVE);
    let again = array.attach(&[0, 1]).unwrap();
    assert_eq!(again.node, again.paths()[1].node);
    let detached = array.detach(again).unwrap();
    assert!(detached.safe_to_unmap, "{detached:?}");
    nothing_is_left();
}

#[test]
fn a_unit_whose_only_path_is_standby_is_not_ready_and_nothing_is_left_of_it() {
    let array = Array::with("a5502", [STANDBY, ACTIVE]);
    let error = array.attach(&[0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert!(error.to_string().contains("is standby"), "{error}");
    assert_eq!(error.last_seen(), None, "{error}");
    assert_eq!(marks_of_failed_flushes(), [] as [&str; 0]);
    nothing_is_left();

    array.groups[0].set_access_state(NON_OPTIMIZED);
    let attached = array.attach(&[0]).unwrap();
    read_first_block(&attached.node).unwrap();
    array.detach(attached).unwrap();
    nothing_is_left();
}

#[test]
fn a_path_that_becomes_standby_is_detached_once_another_path_has_flushed_the_cache() {
    let array = Array::with("a5503", [ACTIVE, NON_OPTIMIZED]);
    let attached = array.attach(&[0, 1]).unwrap();
    let mut disk = OpenOptions::new().write(true).open(&attached.node).unwrap();
    disk.write_all(&[0x5a; 4096]).unwrap();
    disk.sync_all().unwrap();
    drop(disk);
    array.groups[0].set_access_state(STANDBY);
    let detached = array.detach(attached).unwrap();
    assert!(detached.safe_to_unmap, "{detached:?}");
    let paths = detached.receipt.unwrap().paths;
    let flushes: Vec<_> = paths.into_iter().map(|path| path.flush.unwrap()).collect();
    assert!(flushes.contains(&Flush::Done), "{flushes:?}");
    let is_standby = |flush: &Flush| match flush {
        Flush::PagesWritten(why) => why.contains("standby"),
        _ => false,
    };
    assert!(flushes.iter().any(is_standby), "{flushes:?}");
    assert_eq!(marks_of_failed_flushes(), [] as [&str; 0]);
    assert_eq!(array.first_byte(), 0x5a);
    nothing_is_left();
}

/// The kernel takes the cache of a path for write-through if the path did not answer MODE SENSE.
#[test]
fn a_path_over_which_the_kernel_sends_no_flush_proves_nothing_about_the_units_cache() {
    let array = Array::with("a5508", [ACTIVE, NON_OPTIMIZED]);
    let attached = array.attach(&[0, 1]).unwrap();
    let other = attached.paths()[1].node.clone();
    set_cache_type(&other, "write through");
    array.groups[0].set_access_state(STANDBY);
    let device = DetachTarget::Device(attached.node.clone());
    let failure = array.engine.detach(device, soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::NotReady, "{failure}");
    one_path_is_marked_as_in_the_cache();

    set_cache_type(&other, "write back");
    let detached = array.detach(attached).unwrap();
    assert!(detached.safe_to_unmap, "{detached:?}");
    assert_eq!(marks_of_failed_flushes(), [] as [&str; 0]);
    nothing_is_left();
}

#[test]
fn a_detach_of_a_standby_path_alone_is_not_ready_and_succeeds_once_it_is_active() {
    // A host with multipath-tools has this handler, which refuses I/O itself.
    guest::need_module("scsi_dh_alua");
    let array = Array::with("a5504", [ACTIVE, ACTIVE]);
    let attached = array.attach(&[0]).unwrap();
    array.groups[0].set_access_state(STANDBY);
    let device = DetachTarget::Device(attached.node.clone());
    let failure = array.engine.detach(device, soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::NotReady, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    assert!(failure.to_string().contains("standby"), "{failure}");
    assert!(attached.node.exists());
    one_path_is_marked_as_in_the_cache();

    wait_for_known_state(&attached.node, "standby");
    array.groups[0].set_access_state(ACTIVE);
    // The kernel refuses the flush by the state that it knows, until the target has answered a
    // command of the next detach.
    let detached = guest::wait_until("the kernel to know the state", MINUTE, || {
        let device = DetachTarget::Device(attached.node.clone());
        let detached = array.engine.detach(device, soon());
        if let Err(failure) = &detached {
            assert_eq!(failure.kind(), ErrorKind::NotReady, "{failure}");
            one_path_is_marked_as_in_the_cache();
        }
        detached.ok()
    });
    assert!(detached.safe_to_unmap, "{detached:?}");
    assert_eq!(marks_of_failed_flushes(), [] as [&str; 0]);
    nothing_is_left();
    // The handler of Linux 5.10 holds I/O to a path in transition back (`alua_prep_fn`), and then
    // no other command reaches the path.
    guest::wait_until("the handler to have no device", MINUTE, || {
        let devices = fs::read_to_string("/sys/module/scsi_dh_alua/refcnt").unwrap();
        (devices.trim() == "0").then_some(())
    });
    guest::run(&["modprobe", "-r", "scsi_dh_alua"]);
}

#[test]
fn a_path_in_transition_is_waited_for_and_handed_out_once_it_serves() {
    let array = Array::with("a5506", [TRANSITIONING, TRANSITIONING]);
    let attach_during_transition = |at: Stage| {
        let (told, seen) = mpsc::channel();
        let observer = StageObserver::new(move |stage| {
            let _ended = told.send(stage);
        });
        thread::scope(|scope| {
            let attach = scope.spawn(|| array.attach_observed(&[0], observer, soon()));
            assert!(seen.iter().any(|stage| stage == at), "it ended before");
            let early = stages_within(&seen, Duration::from_secs(3));
            array.groups[0].set_access_state(ACTIVE);
            let attached = attach.join().unwrap().unwrap();
            assert!(!early.contains(&Stage::Settle), "{early:?}");
            assert_eq!(states(&attached), [Some(AccessState::ActiveOptimized)]);
            assert_eq!(attached.size, BYTES);
            read_first_block(&attached.node).unwrap();
            attached
        })
    };
    // The kernel's disk driver waits up to 100 s for the transition of a new device itself.
    assert!(attach_during_transition(Stage::Probe).changed);
    array.groups[0].set_access_state(TRANSITIONING);
    let attached = attach_during_transition(Stage::Identify);
    assert!(!attached.changed);

    array.groups[0].set_access_state(TRANSITIONING);
    let short = Deadline::after(Duration::from_secs(10));
    let observer = StageObserver::new(|_| {});
    let error = array.attach_observed(&[0], observer, short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Identify), "{error}");
    let seen = error.last_seen().unwrap_or_default();
    assert!(seen.ends_with("is transitioning"), "{error}");
    array.groups[0].set_access_state(ACTIVE);
    array.detach(attached).unwrap();
    nothing_is_left();
}

/// The target does not answer REPORT TARGET PORT GROUPS.
#[test]
fn a_unit_that_does_not_say_its_state_is_attached_and_its_device_is_not_quarantined() {
    const MAINTENANCE_IN: u8 = 0xa3;
    let array = Array::with("a5507", [ACTIVE, ACTIVE]);
    let proxy = IscsiProxy::start("127.0.0.9:3260", PORTALS[0]);
    let uri = format!("iscsi://127.0.0.9:3260/{}/1", array.targets[0].iqn());
    let source: Source = uri.parse().unwrap();
    let options = SessionOptions::new(INITIATOR.parse().unwrap());
    let request = AttachRequest::new(source).multipath(Multipath::Off);
    let request = request.log_in(options);
    // The kernel itself sends this command to a new device.
    let attached = array.engine.attach(&request, soon()).unwrap();
    assert_eq!(states(&attached), [Some(AccessState::ActiveOptimized)]);
    proxy.ignore(MAINTENANCE_IN);
    let attached = array.engine.attach(&request, soon()).unwrap();
    assert_eq!(states(&attached), [None]);
    assert!(array.engine.stuck_calls().is_empty());
    read_first_block(&attached.node).unwrap();
    proxy.ignore(0);
    // The removal waits until the kernel has aborted the unanswered command: 20 s of the command's
    // own, and as much again each time that iSCSI extends it (`iscsi_eh_cmd_timed_out`).
    let deadline = Deadline::after(Duration::from_secs(240));
    let device = DetachTarget::Device(attached.node);
    let detached = array.engine.detach(device, deadline).unwrap();
    assert!(detached.safe_to_unmap, "{detached:?}");
    nothing_is_left();
}

/// The pages cannot be written, and no other path has them.
#[test]
fn data_written_to_a_path_that_went_standby_is_lost_and_the_detach_reports_it() {
    let array = Array::with("a5505", [ACTIVE, NON_OPTIMIZED]);
    let attached = array.attach(&[0, 1]).unwrap();
    array.groups[0].set_access_state(STANDBY);
    let reader = keep_unwritten(&attached.node);
    let mut disk = OpenOptions::new().write(true).open(&attached.node).unwrap();
    disk.write_all(&[0x5a; 4096]).unwrap();
    drop(disk);
    let device = || DetachTarget::Device(attached.node.clone());
    let failure = array.engine.detach(device(), soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Io, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    assert_eq!(marks_of_failed_flushes().len(), 1);
    drop(reader);
    let request = DetachRequest::new(device()).abandon_unwritten();
    let detached = array.engine.detach(request, soon()).unwrap();
    assert!(!detached.safe_to_unmap, "{detached:?}");
    nothing_is_left();
}
