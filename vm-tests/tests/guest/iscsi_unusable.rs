//! Devices that the kernel adds and that are of no use.
//!
//! A target may present a disk's type at a LUN and report that no unit is connected there:
//! peripheral qualifier 001b, as IBM's SVC does for unmapped LUNs. The kernel gives such a
//! device no disk. A unit that does not report its size gets a disk of no bytes.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use lunbd::engine::ReapRequest;
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Result, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_proxy::IscsiProxy;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::INITIATOR;
use vm_tests::guest::lio::Store;

const IQN: &str = "iqn.2026-01.example:not-connected";
const PROXY: &str = "127.0.0.9:3260";
const NOT_CONNECTED: u8 = 0b001;

fn source(lun: u64) -> Source {
    format!("iscsi://{PROXY}/{IQN}/{lun}").parse().unwrap()
}

fn attach(engine: &Engine, lun: u64) -> Result<Attachment> {
    let options = SessionOptions::new(INITIATOR.parse().unwrap());
    engine.attach(&AttachRequest::new(source(lun)).log_in(options), soon())
}

/// The error must come well before the deadline, because nothing more can come.
fn is_not_found(engine: &Engine, lun: u64) {
    let start = Instant::now();
    let error = attach(engine, lun).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    let text = error.to_string();
    assert!(text.contains("peripheral qualifier 001b"), "{text}");
    assert!(start.elapsed() < Duration::from_secs(20), "{text}");
}

#[test]
fn a_lun_without_a_connected_unit_is_not_found_and_is_attached_once_the_unit_is_connected() {
    iscsi_tcp::prepare();
    let engine = engine();
    let stores = ["4c01", "4c02"].map(|serial| Store::ramdisk(serial, 8 << 20));
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &stores[0]);
    target.map(2, &stores[1]);
    let proxy = IscsiProxy::start(PROXY, PORTALS[0]);
    proxy.set_qualifier(NOT_CONNECTED);
    is_not_found(&engine, 1);
    // The session that was created for the attach is gone too.
    nothing_is_left();

    proxy.set_qualifier(0);
    let other = attach(&engine, 2).unwrap();
    let host = other.hctl().unwrap().host;
    let device = format!("/sys/bus/scsi/devices/{host}:0:0:1");
    let scan_by_hand = || {
        proxy.set_qualifier(NOT_CONNECTED);
        fs::write(format!("/sys/class/scsi_host/host{host}/scan"), "0 0 1").unwrap();
        proxy.set_qualifier(0);
        assert!(Path::new(&device).exists());
        assert!(!Path::new(&device).join("block").exists());
    };
    // The device exists and still has no unit.
    scan_by_hand();
    proxy.set_qualifier(NOT_CONNECTED);
    is_not_found(&engine, 1);
    assert!(!Path::new(&device).exists());
    // The device exists, and its unit has appeared since.
    scan_by_hand();
    let attached = attach(&engine, 1).unwrap();
    assert!(attached.changed);
    assert_eq!(attached.hctl().unwrap().host, host);
    engine.detach(source(1), soon()).unwrap();
    // The device exists, and no caller wants it.
    scan_by_hand();
    let reaping = engine.reap(&ReapRequest::default(), soon()).unwrap();
    let is_named = format!("{reaping:?}").contains("peripheral qualifier 001b");
    assert!(is_named, "{reaping:?}");
    engine.detach(source(1), soon()).unwrap();
    assert!(!Path::new(&device).exists());
    engine.detach(source(2), soon()).unwrap();
    nothing_is_left();
}

#[test]
fn a_unit_that_does_not_say_its_size_is_not_ready_and_is_attached_once_it_does() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("4c03", 8 << 20);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let proxy = IscsiProxy::start(PROXY, PORTALS[0]);
    proxy.refuse_capacity(true);
    let error = attach(&engine, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    let text = error.to_string();
    assert!(text.contains("sense key 2h, code 04h/03h"), "{text}");
    nothing_is_left();
    proxy.refuse_capacity(false);
    assert_eq!(attach(&engine, 1).unwrap().size, 8 << 20);
    engine.detach(source(1), soon()).unwrap();
    nothing_is_left();
}
