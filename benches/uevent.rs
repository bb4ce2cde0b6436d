//! The parser that sees every uevent of the machine.
#![allow(missing_docs, reason = "criterion's macro makes a public function")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use lunbd::uevent::Message;

/// A disk's `add`, as Linux 6.12 sends it.
const ADD: &[u8] = b"add@/devices/pseudo_0/adapter0/host1/target1:0:0/1:0:0:7/block/sda\0\
    ACTION=add\0DEVPATH=/devices/pseudo_0/adapter0/host1/target1:0:0/1:0:0:7/block/sda\0\
    SUBSYSTEM=block\0MAJOR=8\0MINOR=0\0DEVNAME=sda\0DEVTYPE=disk\0DISKSEQ=9\0SEQNUM=1771\0";

fn parse(criterion: &mut Criterion) {
    criterion.bench_function("uevent/parse a disk's add", |bencher| {
        bencher.iter(|| Message::parse(black_box(ADD)));
    });
}

criterion_group!(benches, parse);
criterion_main!(benches);
