//! Rounds of NBD attach and detach, without udevd to make them fast.

use lunbd::{AttachRequest, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::{self, udevd};

#[test]
fn rounds_of_nbd_attach_and_detach_leak_no_device_no_descriptor_no_thread_and_no_lock() {
    guest::sweep_time_limit();
    let _module = NbdModule::with_backend_ids(2);
    let _absent = udevd::absent();
    let server = NbdServer::nbdkit(At::unix(), &["memory", "8M"]);
    let engine = engine();
    let source: Source = server.uri("").parse().unwrap();
    let round = || {
        let request = AttachRequest::new(source.clone());
        assert!(engine.attach(&request, soon()).unwrap().changed);
        assert!(engine.detach(source.clone(), soon()).unwrap().changed);
    };
    round();
    let before = guest::descriptors_and_threads();
    // Fifty rounds show a leak of one per round.
    for _ in 0..if guest::sweeps_are_whole() { 1000 } else { 50 } {
        round();
    }
    guest::wait_for_no_more_than(&before);
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
    let units = engine.inventory().unwrap().units;
    assert!(units.is_empty(), "{units:?}");
}
