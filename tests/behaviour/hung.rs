//! Kernel calls that do not return: the caller returns, and everything else continues.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lunbd::engine::StageObserver;
use lunbd::error::Stage;
use lunbd::id::HostNo;
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, ErrorKind, Source};

use super::machine::{Machine, attach, detach, devices, soon, unit};

/// The deadline of a call.
const LIMIT: Duration = Duration::from_secs(3);
/// The time for the caller's own work on a busy machine.
const TOLERANCE: Duration = Duration::from_secs(10);

fn in_time(engine: &Engine, source: &Source) -> lunbd::Error {
    let start = Instant::now();
    let request = AttachRequest::new(source.clone());
    let error = engine.attach(&request, Deadline::after(LIMIT)).unwrap_err();
    let took = start.elapsed();
    assert!(took < LIMIT + TOLERANCE, "{took:?}: {error}");
    error
}

pub(crate) fn a_scan_that_hangs_quarantines_its_host_until_it_returns_while_another_host_attaches<
    M: Machine,
>() {
    let machine = M::with(2, 4);
    let (engine, hosts) = (machine.engine(), machine.hosts());
    let (hung, elsewhere) = (hosts[0], unit(hosts[1], 1));
    machine.hang();
    let error = in_time(&engine, &unit(hung, 1));
    machine.answer_again();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Scan), "{error}");
    assert_eq!(error.last_seen(), Some("host state=running"));

    let stuck = engine.stuck_calls();
    assert_eq!(stuck.len(), 1);
    assert_eq!(stuck[0].host, HostNo(hung));
    assert_eq!(stuck[0].stage, Stage::Scan);
    assert!(stuck[0].whole_host);
    machine.require_stack(&stuck[0]);

    // The refusal comes at once, and names the reason.
    let start = Instant::now();
    let request = AttachRequest::new(unit(hung, 2));
    let error = engine.attach(&request, soon()).unwrap_err();
    assert!(start.elapsed() < TOLERANCE, "{:?}", start.elapsed());
    assert_eq!(error.kind(), ErrorKind::Quarantined);
    assert!(error.to_string().contains("stage scan"), "{error}");

    assert!(attach(&engine, &elsewhere).changed);
    // If the first call had returned, the other host would prove nothing.
    assert_eq!(engine.stuck_calls().len(), 1);

    machine.wait_until_given_up(&engine);
    assert!(attach(&engine, &unit(hung, 2)).changed);
    assert!(detach(&engine, &unit(hung, 2)).unwrap().changed);
    // The kernel decides whether the scan found its unit after its caller gave up: 6.1 gives up
    // an INQUIRY that was not answered in time.
    detach(&engine, &unit(hung, 1)).unwrap();
    detach(&engine, &elsewhere).unwrap();
    assert_eq!(devices(&*machine, &engine), [] as [&str; 0]);
}

pub(crate) fn a_flush_that_hangs_quarantines_its_device_and_not_the_others_of_its_host<
    M: Machine,
>() {
    let machine = M::with(1, 4);
    let (engine, host) = (machine.engine(), machine.hosts()[0]);
    // The second device of a host would wait for the first one's I/O: they begin to share their
    // tags, and for that the kernel freezes the existing queues (`block/blk-mq.c`,
    // `blk_mq_add_queue_tag_set`). A third device does not wait.
    attach(&engine, &unit(host, 2));
    attach(&engine, &unit(host, 1));
    machine.settle();

    // The limit leaves time for the stages before the flush.
    let limit = 2 * LIMIT;
    let its = Arc::clone(&machine);
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Flush {
            its.hang();
        }
    });
    let request = DetachRequest::new(unit(host, 1)).observe(observer);
    let start = Instant::now();
    let error = engine.detach(request, Deadline::after(limit)).unwrap_err();
    let took = start.elapsed();
    machine.answer_again();
    assert!(took < limit + TOLERANCE, "{took:?}: {error}");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Flush), "{error}");

    let stuck = engine.stuck_calls();
    assert_eq!(stuck.len(), 1);
    assert_eq!(stuck[0].stage, Stage::Flush);
    assert!(!stuck[0].whole_host);
    machine.require_stack(&stuck[0]);

    let error = in_time(&engine, &unit(host, 1));
    assert_eq!(error.kind(), ErrorKind::Quarantined, "{error}");
    assert!(error.to_string().contains("stage flush"), "{error}");
    assert!(attach(&engine, &unit(host, 3)).changed);
    assert_eq!(engine.stuck_calls().len(), 1);

    machine.wait_until_given_up(&engine);
    // The flush that hung may have failed in the end.
    let abandon = DetachRequest::new(unit(host, 1)).abandon_unwritten();
    assert!(engine.detach(abandon, soon()).unwrap().changed);
    for lun in [2, 3] {
        assert!(detach(&engine, &unit(host, lun)).unwrap().changed);
    }
}
