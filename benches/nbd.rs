//! The cost of a dial besides waiting: parsing the address, and the handshake.
#![allow(missing_docs, reason = "criterion's macro makes a public function")]

use std::hint::black_box;
use std::io::{self, Read, Write};
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use lunbd::Deadline;
use lunbd::id::NbdUri;
use lunbd::nbd::handshake;

/// qemu-nbd's answers for a disk of 1 GiB, up to the ACK.
const GO_REPLIES: &[u8] = b"NBDMAGICIHAVEOPT\0\x03\
    \0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x03\0\0\0\x0c\
    \0\0\0\0\0\0\x40\0\0\0\x01\x6d\
    \0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x03\0\0\0\x0e\
    \0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0\
    \0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x01\0\0\0\0";

/// A server whose answers are there at once.
struct RecordedServer<'a>(&'a [u8]);

impl Read for RecordedServer<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for RecordedServer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(black_box(bytes).len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn handshake(criterion: &mut Criterion) {
    let deadline = Deadline::after(Duration::from_secs(3600));
    criterion.bench_function("nbd/decode a handshake", |bencher| {
        bencher.iter(|| {
            let mut server = RecordedServer(black_box(GO_REPLIES));
            let export = handshake::negotiate(&mut server, "disk", deadline);
            assert!(export.is_ok_and(|export| export.size == 1 << 30));
        });
    });
}

fn uri(criterion: &mut Criterion) {
    for text in [
        "nbd://[2001:db8::1]:10810/a%20disk",
        "nbd+unix:///disk?socket=/run/nbd/disk.sock",
    ] {
        criterion.bench_function(&format!("nbd/parse {text}"), |bencher| {
            bencher.iter(|| black_box(text).parse::<NbdUri>());
        });
    }
}

criterion_group!(benches, handshake, uri);
criterion_main!(benches);
