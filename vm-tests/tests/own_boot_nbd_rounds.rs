//! Many rounds of NBD attach and detach, with a boot of their own: no udevd, so
//! that they are quick.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test panics to fail"
)]

use std::time::Duration;

use lunbd::{AttachRequest, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::{self, udevd};

#[test]
fn a_thousand_rounds_leak_no_device_no_descriptor_no_thread_and_no_lock() {
    guest::time_limit(Duration::from_secs(1800));
    if guest::series() != "6.1" {
        guest::skip("counted on one kernel, for the run's time");
    }
    let _module = NbdModule::load(2);
    udevd::kill();
    let server = NbdServer::nbdkit(At::unix(), &["memory", "8M"]);
    let engine = engine();
    let source: Source = server.uri("").parse().unwrap();
    let count = |of: &str| guest::entries(format!("/proc/self/{of}")).len();
    let round = || {
        let request = AttachRequest::new(source.clone());
        assert!(engine.attach(&request, soon()).unwrap().changed);
        assert!(engine.detach(source.clone(), soon()).unwrap().changed);
    };
    round();
    let before = (count("fd"), count("task"));
    for _ in 0..1000 {
        round();
    }
    // A worker's thread ends a moment after it has answered.
    guest::wait_until(
        "as many descriptors and threads as before",
        Duration::from_secs(60),
        || (count("fd") <= before.0 && count("task") <= before.1).then_some(()),
    );
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
    let units = engine.inventory().unwrap().units;
    assert!(units.is_empty(), "{units:?}");
}
