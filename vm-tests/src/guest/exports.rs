//! Many volumes, each with a mark of the round that wrote to it last.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use lunbd::Source;

use super::directory::Directory;
use super::nbd_server::{At, NbdServer};

const MARK: usize = 512;

/// The mark of a source. Each unit of a target has its own place, because the units may share
/// one store.
fn mark_of(source: &str, round: u32) -> (u64, [u8; MARK]) {
    let mut mark = [0; MARK];
    let text = format!("{round} {source}");
    mark[..text.len()].copy_from_slice(text.as_bytes());
    let lun = source
        .strip_prefix("scsi:")
        .and_then(|hctl| hctl.rsplit(':').next());
    let place = lun.map_or(0, |lun| lun.parse::<u64>().expect("a LUN") * 4096);
    (place, mark)
}

/// Records on the disk which round of a test wrote to the source.
pub fn write_mark(node: &Path, source: &str, round: u32) {
    let (place, mark) = mark_of(source, round);
    let mut disk = OpenOptions::new()
        .write(true)
        .open(node)
        .expect("the device");
    disk.seek(SeekFrom::Start(place)).expect("its place");
    // No fsync: the detach must flush what is not on the server yet.
    disk.write_all(&mark).expect("a write");
}

/// Panics unless that round wrote to the source last.
#[track_caller]
pub fn assert_mark(node: &Path, source: &str, round: u32) {
    let (place, _) = mark_of(source, round);
    let mut disk = File::open(node).expect("the device");
    disk.seek(SeekFrom::Start(place)).expect("its place");
    let mut found = [0; MARK];
    disk.read_exact(&mut found).expect("a read");
    let found = String::from_utf8_lossy(&found);
    let found = found.trim_end_matches('\0');
    assert_eq!(found, format!("{round} {source}"), "{}", node.display());
}

/// One server with many exports, each a file.
#[derive(Debug)]
pub struct Exports {
    server: NbdServer,
    stores: Directory,
}

impl Exports {
    /// Makes `count` exports of 1 MiB each.
    #[must_use]
    pub fn new(count: u64) -> Self {
        let stores = Directory::new("stores");
        for number in 0..count {
            let file = File::create(stores.join(format!("v{number}"))).expect("a store");
            file.set_len(1 << 20).expect("its size");
        }
        let directory = format!("dir={}", stores.display());
        let server = NbdServer::nbdkit(At::unix(), &["file", &directory]);
        Self { server, stores }
    }

    /// The URI of one export.
    #[must_use]
    pub fn source(&self, number: u64) -> String {
        // Spelt as in the journal and in the kernel's backend id.
        let source: Source = self
            .server
            .uri(&format!("v{number}"))
            .parse()
            .expect("a URI");
        source.to_string()
    }

    /// Panics unless the server has the mark, read past all caches of the kernel.
    #[track_caller]
    pub fn assert_mark(&self, number: u64, round: u32) {
        assert_mark(
            &self.stores.join(format!("v{number}")),
            &self.source(number),
            round,
        );
    }
}
