//! Volumes of many, each with a mark of who wrote to it last.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use lunbd::Source;

use super::directory::Directory;
use super::nbd_server::{At, NbdServer};

const MARK: usize = 512;

/// What is written to a source, in a place that is its own also where the units
/// of a target share one store.
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

/// Writes down which round of a test wrote to the source.
pub fn write_mark(node: &Path, source: &str, round: u32) {
    let (place, mark) = mark_of(source, round);
    let mut disk = OpenOptions::new()
        .write(true)
        .open(node)
        .expect("the device");
    disk.seek(SeekFrom::Start(place)).expect("its place");
    // No fsync: what is not on the server yet is for the detach to bring there.
    disk.write_all(&mark).expect("a write");
}

/// Fails unless that round wrote to it last.
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
    /// That many, of 1 MiB each.
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

    /// The URI of one.
    #[must_use]
    pub fn source(&self, number: u64) -> String {
        // As the journal and the kernel's backend id spell it.
        let source: Source = self
            .server
            .uri(&format!("v{number}"))
            .parse()
            .expect("a URI");
        source.to_string()
    }

    /// Fails unless the mark is what the server has, past all caches of the kernel's.
    #[track_caller]
    pub fn assert_mark(&self, number: u64, round: u32) {
        assert_mark(
            &self.stores.join(format!("v{number}")),
            &self.source(number),
            round,
        );
    }
}
