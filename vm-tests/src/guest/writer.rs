//! A writer none of whose writes may be lost.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Writes one block after another, each with an fsync, until it is told to end. It keeps every
/// error.
#[derive(Debug)]
pub struct Writer {
    node: PathBuf,
    stop: Arc<AtomicBool>,
    written: Arc<AtomicUsize>,
    thread: JoinHandle<Vec<String>>,
}

const BLOCK: usize = 4096;
const BLOCKS: usize = 2048;

/// The content of block `number` after `times` writes.
fn content(number: usize, times: usize) -> [u8; BLOCK] {
    let mut block = [u8::try_from(times % 251).unwrap(); BLOCK];
    block[..8].copy_from_slice(&number.to_le_bytes());
    block
}

impl Writer {
    /// Starts writing to this device.
    #[must_use]
    pub fn start(node: &Path) -> Self {
        let (stop, written) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        let (told, count, path) = (Arc::clone(&stop), Arc::clone(&written), node.to_owned());
        let thread = std::thread::spawn(move || {
            let mut disk = OpenOptions::new().write(true).open(path).unwrap();
            let mut errors = Vec::new();
            while !told.load(Ordering::Relaxed) {
                let done = count.load(Ordering::Relaxed);
                let (number, times) = (done % BLOCKS, done / BLOCKS + 1);
                let result = disk
                    .seek(SeekFrom::Start((number * BLOCK) as u64))
                    .and_then(|_| disk.write_all(&content(number, times)))
                    .and_then(|()| disk.sync_data());
                errors.extend(result.err().map(|error| format!("block {done}: {error}")));
                count.fetch_add(1, Ordering::Relaxed);
            }
            errors
        });
        Self {
            node: node.to_owned(),
            stop,
            written,
            thread,
        }
    }

    /// How many blocks it has written.
    #[must_use]
    pub fn written(&self) -> usize {
        self.written.load(Ordering::Relaxed)
    }

    /// Waits until it has written more: after a heal, until the requests in flight have timed
    /// out. That takes 30 s unless a heal has set another time.
    pub fn goes_on(&self) {
        let before = self.written();
        super::wait_until("the writer to go on", Duration::from_secs(120), || {
            (self.written() > before + 5).then_some(())
        });
    }

    /// Ends the writer and compares every block with what was written.
    pub fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        let errors = self.thread.join().unwrap();
        assert!(errors.is_empty(), "{errors:?}");
        let written = self.written.load(Ordering::Relaxed);
        assert!(written > 0);
        // Read past the page cache: what the server has.
        let mut disk = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_DIRECT)
            .open(&self.node)
            .unwrap();
        let mut page = memmap2::MmapMut::map_anon(BLOCK).unwrap();
        for number in 0..BLOCKS.min(written) {
            disk.read_exact(&mut page).unwrap();
            let times = (written - number - 1) / BLOCKS + 1;
            assert!(page[..] == content(number, times), "block {number}");
        }
    }
}

/// The first block of the device, read past the page cache.
///
/// # Errors
/// If the block cannot be read.
pub fn first_block(node: &Path) -> std::io::Result<Vec<u8>> {
    let mut page = memmap2::MmapMut::map_anon(BLOCK)?;
    let direct = nix::libc::O_DIRECT;
    let disk = OpenOptions::new()
        .read(true)
        .custom_flags(direct)
        .open(node);
    disk?.read_exact(&mut page)?;
    Ok(page.to_vec())
}
