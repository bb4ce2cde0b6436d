//! Processes that can write to a device although their first thread has no descriptor of it.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use io_uring::IoUring;
use nix::sched::{CloneFlags, unshare};

const LIMIT: Duration = Duration::from_secs(60);

/// A process that has mapped a device and has closed its descriptor, until it is dropped.
#[derive(Debug)]
pub struct Mapper(Child);

impl Mapper {
    /// Starts one that can write through its mapping.
    #[must_use]
    pub fn writing(node: &Path) -> Self {
        Self::begin(node, &[], "-rw", "rw-s")
    }

    /// Starts one that can only read.
    #[must_use]
    pub fn reading(node: &Path) -> Self {
        Self::begin(node, &["-r"], "-r", "r--s")
    }

    fn begin(node: &Path, options: &[&str], protection: &str, shown: &str) -> Self {
        let mut child = Command::new("xfs_io")
            .args(options)
            .arg(node)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("xfs_io");
        let process = PathBuf::from(format!("/proc/{}", child.id()));
        let script = format!("mmap {protection} 0 4096\nclose\n");
        let input = child.stdin.as_mut().expect("its input");
        input.write_all(script.as_bytes()).expect("its input");
        let name = node.to_str().expect("a name");
        super::wait_until("a mapping without a descriptor", LIMIT, || {
            let maps = fs::read_to_string(process.join("maps")).ok()?;
            let is_mapped = |line: &str| line.contains(shown) && line.ends_with(name);
            let is_open = super::entries(process.join("fd")).iter().any(|number| {
                fs::read_link(process.join("fd").join(number)).is_ok_and(|path| path == node)
            });
            (maps.lines().any(is_mapped) && !is_open).then_some(())
        });
        Self(child)
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ended = self.0.wait();
    }
}

/// A device that this process has registered with `io_uring`, and whose descriptor it has
/// closed, until it is dropped.
pub struct FixedFile(IoUring);

impl std::fmt::Debug for FixedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FixedFile").finish()
    }
}

impl FixedFile {
    /// Opens the device for writing.
    #[must_use]
    pub fn of(node: &Path) -> Self {
        let ring = IoUring::new(4).expect("io_uring");
        let file = writer(node);
        // A table has empty places too.
        let files = [-1, file.as_raw_fd(), -1];
        let registered = ring.submitter().register_files(&files);
        registered.expect("a fixed file");
        Self(ring)
    }

    /// What the kernel shows of the ring.
    #[must_use]
    pub fn shown(&self) -> String {
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        fs::read_to_string(path).expect("fdinfo")
    }
}

impl Drop for FixedFile {
    fn drop(&mut self) {
        // If a ring is only closed, the kernel releases its files some time later.
        let _let_go = self.0.submitter().unregister_files();
    }
}

/// A thread of this process that has a device open in a table of descriptors of its own,
/// until it is dropped.
#[derive(Debug)]
pub struct OwnTable {
    release: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl OwnTable {
    /// Opens the device for writing.
    #[must_use]
    pub fn with(node: &Path) -> Self {
        let (release, released) = mpsc::channel::<()>();
        let (opened, is_open) = mpsc::channel();
        let node = node.to_owned();
        let thread = thread::spawn(move || {
            unshare(CloneFlags::CLONE_FILES).expect("a table of its own");
            let file = writer(&node);
            opened.send(()).expect("a listener");
            let _released = released.recv();
            drop(file);
        });
        is_open.recv().expect("an open device");
        Self {
            release: Some(release),
            thread: Some(thread),
        }
    }
}

impl Drop for OwnTable {
    fn drop(&mut self) {
        drop(self.release.take());
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

fn writer(node: &Path) -> File {
    let opened = OpenOptions::new().read(true).write(true).open(node);
    opened.expect("a writer")
}
