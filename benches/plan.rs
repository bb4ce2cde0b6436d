//! The plan for 10,000 volumes: nothing to do, everything to do, and every second volume moved
//! to another's source.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "criterion's macro makes a public function, and a bench may panic"
)]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lunbd::engine::journal::VolumeSpec;
use lunbd::engine::{Condition, VolumeStatus};
use lunbd::id::VolumeId;
use lunbd::reconcile::{Actual, Desired, plan};
use lunbd::{AttachRequest, Source};

const VOLUMES: u32 = 10_000;

fn id(number: u32) -> VolumeId {
    format!("pvc-7f0c5a1e-9b1d-4d4e-8c57-{number:012}")
        .parse()
        .unwrap()
}

/// NBD and SCSI in turn, named as an agent names its volumes.
fn request(number: u32) -> AttachRequest {
    let text = if number.is_multiple_of(2) {
        format!("nbd://192.0.2.1:10809/vol-{number}")
    } else {
        format!("iscsi://192.0.2.1,192.0.2.2/iqn.2003-01.org.lunbd:array/{number}")
    };
    let source: Source = text.parse().unwrap();
    AttachRequest::new(source)
}

fn desired(source_of: impl Fn(u32) -> u32) -> Desired {
    let mut desired = Desired::default();
    for number in 0..VOLUMES {
        desired
            .insert(id(number), &request(source_of(number)))
            .unwrap();
    }
    desired
}

fn actual() -> Actual {
    let stands = |number| {
        let spec = VolumeSpec::of(&request(number));
        VolumeStatus::new(id(number), spec, Condition::Complete)
    };
    (0..VOLUMES).map(stands).collect()
}

fn plans(criterion: &mut Criterion) {
    let (there, nothing) = (actual(), Actual::default());
    let reached = desired(|number| number);
    // Each second volume gets the source of the second volume after it.
    let moved = desired(|number| match number % 2 {
        0 => (number + 2) % VOLUMES,
        _ => number,
    });
    let mut group = criterion.benchmark_group("plan for 10000 volumes");
    group.throughput(Throughput::Elements(u64::from(VOLUMES)));
    assert!(plan(&reached, &there).is_empty());
    group.bench_function("all stand", |bencher| {
        bencher.iter(|| plan(black_box(&reached), &there));
    });
    group.bench_function("none stands", |bencher| {
        bencher.iter(|| plan(black_box(&reached), &nothing));
    });
    group.bench_function("half moved", |bencher| {
        bencher.iter(|| plan(black_box(&moved), &there));
    });
    group.bench_function("none is wanted", |bencher| {
        bencher.iter(|| plan(&Desired::default(), black_box(&there)));
    });
    group.finish();
}

criterion_group!(benches, plans);
criterion_main!(benches);
