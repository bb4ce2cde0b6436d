//! The inventory of a machine with 10,000 SCSI disks. The machine is a directory in memory. Its
//! files cost as much as sysfs's, except for the kernel's own formatting.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "criterion's macro makes a public function, and a bench may panic and run another's command"
)]

#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../tests/machine/mod.rs"]
mod machine;

use std::process::{Command, Stdio};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lunbd::Engine;
use machine::san::San;

fn inventory(criterion: &mut Criterion) {
    let san = San::of_ten_thousand();
    let roots = san.machine.roots();
    let mut group = criterion.benchmark_group("inventory of 10000");
    group
        .throughput(Throughput::Elements(10_000))
        .sample_size(10);
    let engine = Engine::start(roots.clone()).unwrap();
    group.bench_function("lunbd", |bencher| {
        bencher.iter(|| engine.inventory().unwrap());
    });
    // The lsblk of util-linux, which shows less: no identity, no session, no state.
    let mut lsblk = Command::new("lsblk");
    let version = lsblk.arg("--version").stdout(Stdio::null()).status();
    if version.is_ok() {
        group.bench_function("lsblk --sysroot --json", |bencher| {
            bencher.iter(|| {
                let mut lsblk = Command::new("lsblk");
                lsblk.arg("--sysroot").arg(roots.sysfs.parent().unwrap());
                let done = lsblk.arg("--json").stdout(Stdio::null()).status();
                assert!(done.unwrap().success());
            });
        });
    }
    group.finish();
}

criterion_group!(benches, inventory);
criterion_main!(benches);
