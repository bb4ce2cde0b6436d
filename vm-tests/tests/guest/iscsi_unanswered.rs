//! A target that does not answer INQUIRY while its session is up.

use std::fs;
use std::path::Path;

use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, ErrorKind, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_proxy::IscsiProxy;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, the_only_session};
use vm_tests::guest::lio::Store;

const IQN: &str = "iqn.2026-01.example:unanswered";
const PROXY: &str = "127.0.0.9:3260";
const INQUIRY: u8 = 0x12;

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
    let _patience = Patience::of(2);
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

    proxy.ignore(INQUIRY);
    let error = attach(2).unwrap_err();
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
