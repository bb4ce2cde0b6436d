//! The time from the loss of a volume to its return, beside volumes whose server does not answer.
//!
//! The volume is a unit of the fake kernel in `tests/fake_kernel`. The server of the others
//! accepts connections and says nothing.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "criterion's macro makes a public function, and a bench may panic"
)]

#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../tests/fake_kernel/mod.rs"]
mod fake_kernel;

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use fake_kernel::{Address, FakeKernel, Unit, access};
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Event, Events, Options, Reconciler};
use lunbd::{AttachRequest, Deadline, Source};

const UNIT: &str = "scsi:0:0:0:1";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn request(source: &str) -> AttachRequest {
    AttachRequest::new(source.parse::<Source>().unwrap())
}

/// A server that never answers, and its connections.
fn silent_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let mut held: Vec<TcpStream> = Vec::new();
        held.extend(listener.incoming().flatten());
    });
    address
}

/// Waits for the attach of this volume.
fn attached(events: &mut Events, volume: &VolumeId) {
    loop {
        let event = events.next(soon()).expect("the attach in time").event;
        if matches!(&event, Event::Attached { volume: of, .. } if of == volume) {
            return;
        }
    }
}

/// Deletes the device of the unit, as another process does, and waits for its return.
fn lose_and_regain(fake: &FakeKernel, events: &mut Events, volume: &VolumeId) -> Duration {
    fake.kernel().settle();
    let devices = access::roots(fake.root()).devices;
    let delete = fake.root().join("sys/bus/scsi/devices/0:0:0:1/delete");
    let start = Instant::now();
    devices.write_attribute(&delete, "1", &|| true).unwrap();
    attached(events, volume);
    start.elapsed()
}

/// Stops the reconciler also if a measurement panics: the scope waits for it.
struct Stop<'a>(&'a Reconciler);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn beside(neighbours: u32, measure: impl FnOnce(&mut dyn FnMut() -> Duration)) {
    let fake = FakeKernel::with_hosts(1);
    fake.kernel().change(|state| {
        state.units.insert(Address::of(0, 1), Unit::disk(1));
    });
    let engine = access::engine(fake.root());
    let journal = engine
        .open_journal_at(&fake.root().join("journal"), soon())
        .unwrap();
    let reconciler = Reconciler::new(Arc::clone(&engine), journal, Options::default());
    let mut events = reconciler.subscribe();
    let volume: VolumeId = "back".parse().unwrap();
    let mut desired = Desired::default();
    let server = silent_server();
    for number in 0..neighbours {
        let away = format!("away-{number}").parse().unwrap();
        let source = format!("nbd://{server}/{number}");
        desired.insert(away, &request(&source)).unwrap();
    }
    desired.insert(volume.clone(), &request(UNIT)).unwrap();
    reconciler.set(desired);
    thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let stop = Stop(&reconciler);
        attached(&mut events, &volume);
        measure(&mut || lose_and_regain(&fake, &mut events, &volume));
        drop(stop);
        running.join().unwrap().unwrap();
    });
}

fn returns(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("a lost volume returns");
    group.sample_size(10);
    for neighbours in [0, 100, 1000] {
        beside(neighbours, |once| {
            let id = BenchmarkId::new("beside unreachable volumes", neighbours);
            group.bench_function(id, |bencher| {
                bencher.iter_custom(|rounds| (0..rounds).map(|_| once()).sum());
            });
        });
    }
    group.finish();
}

criterion_group!(benches, returns);
criterion_main!(benches);
