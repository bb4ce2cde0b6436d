//! Disks whose size the kernel has lost.
//!
//! A rescan over a lost path makes READ CAPACITY fail, and the kernel sets the disk's size to 0
//! ("detected capacity change from 16384 to 0"). It does not read the size again when the path
//! is back. Since Linux 5.0 or so the kernel itself rescans a device when `running` is written
//! to its state (`scsi_sysfs.c`, `store_state_field`).

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use lunbd::engine::{Action, Condition, DetachVolume, Recovered};
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::crash::{Place, volume};
use vm_tests::guest::iscsi_proxy::IscsiProxy;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, the_only_session};
use vm_tests::guest::keeping::Keeping;
use vm_tests::guest::lio::Store;
use vm_tests::guest::writer::first_block;

const IQN: &str = "iqn.2026-01.example:sizes";
const PROXY: &str = "127.0.0.9:3260";
const BYTES: u64 = 8 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

/// The size that the kernel shows, in bytes.
fn size_of(device: &Path) -> u64 {
    let disks = guest::entries(device.join("block"));
    let size = fs::read_to_string(device.join("block").join(&disks[0]).join("size")).unwrap();
    size.trim().parse::<u64>().unwrap() * 512
}

#[test]
fn a_recovery_reads_the_size_again_that_a_rescan_over_the_lost_session_cleared() {
    let rig = Rig::new();
    let engine = engine();
    let request = AttachRequest::new(rig.source.clone());
    let options = options().recovery_timeout(Duration::from_secs(3));
    let unit = engine.attach(&request.log_in(options), soon()).unwrap();
    let keeping = Keeping::start(&engine);
    let device = the_only_session().device_dir(1);
    let state = device.join("state");
    // The kernel accepts each word only with a newline.
    fs::write(&state, "offline\n").unwrap();
    rig.proxy.fall_silent_at_capacity();
    // The kernel rescans, and the write waits until the recovery timeout.
    let run = thread::spawn(move || fs::write(state, "running\n"));
    guest::wait_until("READ CAPACITY", LIMIT, || {
        (!rig.proxy.is_to_be_silent()).then_some(())
    });
    rig.target.portal_down(0);
    rig.proxy.cut();
    guest::wait_until("the kernel to lose the size", LIMIT, || {
        (size_of(&device) == 0).then_some(())
    });
    run.join().unwrap().unwrap();
    rig.target.portal_up(0);
    keeping.wait_until_recovered(1);
    assert_eq!(size_of(&device), BYTES);
    first_block(&unit.node).unwrap();
    keeping.end();
    let detachment = engine.detach(rig.source.clone(), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    nothing_is_left();
}

/// A unit behind a proxy that can refuse READ CAPACITY, so that the kernel loses the unit's
/// size while the session is up.
struct Rig {
    target: IscsiTarget,
    proxy: IscsiProxy,
    source: Source,
}

impl Rig {
    fn new() -> Self {
        iscsi_tcp::prepare();
        let mut target = IscsiTarget::new(IQN);
        target.map(1, &Store::ramdisk("51ce", BYTES));
        Self {
            target,
            proxy: IscsiProxy::start(PROXY, PORTALS[0]),
            source: format!("iscsi://{PROXY}/{IQN}/1").parse().unwrap(),
        }
    }

    fn request(&self) -> AttachRequest {
        AttachRequest::new(self.source.clone()).log_in(options())
    }

    /// Makes the kernel lose the size; returns the unit's device.
    fn lose_its_size(&self) -> PathBuf {
        let device = the_only_session().device_dir(1);
        self.proxy.refuse_capacity(true);
        fs::write(device.join("rescan"), "1").unwrap();
        assert_eq!(size_of(&device), 0);
        self.proxy.refuse_capacity(false);
        assert_eq!(size_of(&device), 0);
        device
    }
}

#[test]
fn a_repeated_attach_and_a_heal_of_the_session_read_a_lost_size_again() {
    let rig = Rig::new();
    let engine = engine();
    engine.attach(&rig.request(), soon()).unwrap();
    rig.lose_its_size();
    let again = engine.attach(&rig.request(), soon()).unwrap();
    assert_eq!((again.size, again.changed), (BYTES, false));
    let device = rig.lose_its_size();
    let healed = guest::lunbd(&["heal", &rig.source.to_string()]);
    assert!(healed.status.success(), "{healed:?}");
    assert_eq!(size_of(&device), BYTES);
    engine.detach(rig.source.clone(), soon()).unwrap();
    nothing_is_left();
    drop(rig.target);
}

#[test]
fn a_recovery_reads_a_volumes_lost_size_and_reports_a_unit_that_does_not_answer() {
    let rig = Rig::new();
    let place = Place::new();
    let (first, next) = (engine(), engine());
    let journal = place.open(&first);
    first
        .attach_volume(&journal, &volume(), &rig.request(), soon())
        .unwrap();
    let device = rig.lose_its_size();
    drop(journal);
    let journal = place.open(&next);
    let recover = || -> Recovered { next.recover_volume(&journal, &volume(), soon()).unwrap() };
    rig.proxy.refuse_capacity(true);
    let failed = recover();
    assert_eq!(failed.condition, Condition::LinkDead, "{failed:?}");
    let Action::Failed(error) = &failed.action else {
        panic!("{failed:?}");
    };
    assert!(error.to_string().contains("without a size"), "{error}");
    rig.proxy.refuse_capacity(false);
    let [surveyed] = next.survey(&journal).unwrap().try_into().unwrap();
    assert!(surveyed.verify_reason.is_some(), "{surveyed:?}");
    let healed = recover();
    assert!(matches!(healed.action, Action::Healed), "{healed:?}");
    assert_eq!(healed.condition, Condition::Complete, "{healed:?}");
    assert_eq!(size_of(&device), BYTES);
    let [surveyed] = next.survey(&journal).unwrap().try_into().unwrap();
    assert_eq!(surveyed.verify_reason, None);
    next.detach_volume(&journal, &volume(), &DetachVolume::default(), soon())
        .unwrap();
    nothing_is_left();
}
