//! A target that does not answer a command while its session is up.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use lunbd::iscsi::{IscsiSession, SessionOptions, log_out};
use lunbd::{AttachRequest, Deadline, ErrorKind, Roots, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_proxy::IscsiProxy;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, the_only_session};
use vm_tests::guest::lio::Store;
use vm_tests::guest::{self, wait_until};

const IQN: &str = "iqn.2026-01.example:unanswered";
const PROXY: &str = "127.0.0.9:3260";
const INQUIRY: u8 = 0x12;
const READ_10: u8 = 0x28;
const LIMIT: Duration = Duration::from_secs(20);

/// Sets how long the kernel's scan waits for the answer to INQUIRY, in seconds, while this
/// lives.
struct Patience(String);

const PATIENCE: &str = "/sys/module/scsi_mod/parameters/inq_timeout";

impl Patience {
    fn of(seconds: u32) -> Self {
        let before = fs::read_to_string(PATIENCE).unwrap();
        fs::write(PATIENCE, seconds.to_string()).unwrap();
        Self(before)
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        fs::write(PATIENCE, self.0.trim()).unwrap();
    }
}

#[test]
fn a_lun_whose_inquiry_times_out_is_not_ready_and_one_that_is_not_there_is_not_found() {
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    for (lun, serial) in [(1, "4a01"), (2, "4a02")] {
        target.map(lun, &Store::ramdisk(serial, 8 << 20));
    }
    let proxy = IscsiProxy::start(PROXY, PORTALS[0]);
    let source = |lun: u64| -> Source { format!("iscsi://{PROXY}/{IQN}/{lun}").parse().unwrap() };
    let attach = |lun| {
        let options = SessionOptions::new(INITIATOR.parse().unwrap());
        engine.attach(&AttachRequest::new(source(lun)).log_in(options), soon())
    };
    attach(1).unwrap();
    let session = the_only_session();

    let patience = Patience::of(2);
    proxy.ignore(INQUIRY);
    let error = attach(2).unwrap_err();
    drop(patience);
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert!(error.to_string().contains("inq_timeout"), "{error}");
    assert_eq!(session.state(), "LOGGED_IN");
    assert!(!Path::new(&session.device_dir(2)).exists());

    proxy.ignore(0);
    let error = attach(7).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    attach(2).unwrap();
    for lun in [1, 2] {
        engine.detach(source(lun), soon()).unwrap();
    }
    nothing_is_left();
}

#[test]
fn a_logout_ends_a_delete_that_waits_for_an_unanswered_read_and_the_kernel_does_not_warn() {
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &Store::ramdisk("4a03", 8 << 20));
    let proxy = IscsiProxy::start(PROXY, PORTALS[0]);
    let source: Source = format!("iscsi://{PROXY}/{IQN}/1").parse().unwrap();
    let options = SessionOptions::new(INITIATOR.parse().unwrap());
    let attachment = engine.attach(&AttachRequest::new(source).log_in(options), soon());
    let disk = File::open(attachment.unwrap().node).unwrap();
    let session = the_only_session();
    let device = session.device_dir(1);
    let in_flight = Path::new("/sys/block").join(session.disk(1).unwrap());
    let in_flight = in_flight.join("inflight");
    // No read of udevd is in flight.
    guest::udevd::settle();

    proxy.ignore(READ_10);
    thread::scope(|scope| {
        scope.spawn(|| disk.read_exact_at(&mut [0; 4096], 4 << 20).unwrap_err());
        wait_until("the read to be in flight", LIMIT, || {
            let reads = fs::read_to_string(&in_flight).unwrap();
            reads.trim_start().starts_with('1').then_some(())
        });
        scope.spawn(|| fs::write(device.join("delete"), "1").unwrap());
        let id = session.id.to_string().parse().unwrap();
        let session = IscsiSession::new(&Roots::default(), id);
        // Before 5.15 the device's directory goes before the read has ended.
        wait_until("the delete to begin", LIMIT, || {
            if guest::kernel() < (5, 15) {
                return session.devices().unwrap().is_empty().then_some(());
            }
            // Its name among the devices of the bus goes soon.
            let state = fs::read_to_string(device.join("state"));
            let has_begun = state.map_or(true, |state| state.trim() == "cancel");
            has_begun.then_some(())
        });
        // The kernel itself gives the read 30 s.
        log_out(&Roots::default(), &session, Deadline::after(LIMIT)).unwrap();
    });
    nothing_is_left();
}
