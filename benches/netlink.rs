//! The cost of an NBD command besides the kernel's own work.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "criterion's macro makes a public function, and a bench may panic"
)]

use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use lunbd::id::BackendId;
use lunbd::nbd::{Attribute, Connect, DeviceStatus, Message, Timeouts};

fn netlink(criterion: &mut Criterion) {
    let sockets = (0..4).map(|_| OwnedFd::from(UnixStream::pair().unwrap().0));
    let timeouts = Timeouts {
        request: Duration::from_secs(30),
        dead_connection: Duration::from_secs(300),
    };
    let connect = Connect::new(sockets.collect(), 1 << 40, timeouts)
        .block_size(4096)
        .backend(BackendId::derived("nbd://storage.example/volume-1"));
    criterion.bench_function("encode a connect with four sockets", |bencher| {
        bencher.iter(|| black_box(&connect).message().encode());
    });

    let message = connect.message();
    let bytes = message.encode();
    criterion.bench_function("decode a connect with four sockets", |bencher| {
        bencher.iter(|| Message::decode(message.command, black_box(&bytes)).unwrap());
    });

    let devices = (0..64).map(|index| DeviceStatus {
        index,
        connected: index % 2 == 0,
    });
    let status = Message {
        command: 5,
        attributes: vec![Attribute::Devices(devices.collect())],
    };
    let bytes = status.encode();
    criterion.bench_function("decode the status of 64 devices", |bencher| {
        bencher.iter(|| Message::decode(status.command, black_box(&bytes)).unwrap());
    });
}

criterion_group!(benches, netlink);
criterion_main!(benches);
