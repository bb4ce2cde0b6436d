//! A FUSE file system with one file, whose daemon hangs: it lets callers open the root
//! directory and answers nothing else.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// `include/uapi/linux/fuse.h`.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// The inode number of the file, whatever name is looked up.
const FILE: u64 = 2;
const FILE_BYTES: u64 = 1 << 20;

/// A file system mounted at [`StuckFuse::path`]. Dropping it unmounts it and ends every call
/// that waits for it.
#[derive(Debug)]
pub struct StuckFuse {
    path: PathBuf,
    connection: PathBuf,
    hangs: Arc<AtomicBool>,
}

impl StuckFuse {
    /// Creates `path` and mounts the file system there. Its daemon hangs.
    #[must_use]
    pub fn mount_at(path: &str) -> Self {
        let mounted = Self::answering_at(path);
        mounted.hang();
        mounted
    }

    /// Creates `path` and mounts the file system there. Its daemon answers until
    /// [`StuckFuse::hang`].
    #[must_use]
    pub fn answering_at(path: &str) -> Self {
        super::enter();
        // Some kernels have FUSE built in.
        let kinds = fs::read_to_string("/proc/filesystems").expect("the file systems");
        if !kinds
            .lines()
            .any(|kind| kind.trim_end().ends_with("\tfuse"))
        {
            super::modprobe("fuse", &[]);
        }
        fs::create_dir_all(path).expect("a mount point");
        let channel = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let channel = channel.expect("/dev/fuse");
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            channel.as_raw_fd()
        );
        let options = CString::new(options).expect("no zero");
        let kind = Some("fuse");
        mount(Some("stuck"), path, kind, MsFlags::empty(), Some(&*options)).expect("a mount");
        let hangs = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&hangs);
        thread::spawn(move || answer(channel, &until));
        let control = "/sys/fs/fuse/connections";
        if super::entries(control).is_empty() {
            let _mounted_already = mount(
                Some("fusectl"),
                control,
                Some("fusectl"),
                MsFlags::empty(),
                None::<&str>,
            );
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("the mounts");
        let line = mounts.lines().find(|line| line.contains(path));
        let device = line.and_then(|line| line.split(' ').nth(2));
        let minor = device.and_then(|device| device.strip_prefix("0:"));
        let connection = Path::new(control).join(minor.expect("the mount"));
        Self {
            path: PathBuf::from(path),
            connection,
            hangs,
        }
    }

    /// From now on its daemon hangs.
    pub fn hang(&self) {
        self.hangs.store(true, Ordering::SeqCst);
    }

    /// Its file of 1 MiB of zeroes.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.path.join("image")
    }

    /// Removes the mount from the tree, as `umount --lazy` does. A process with an open file of
    /// it keeps the file system.
    pub fn detach_mount(&self) {
        umount2(&self.path, MntFlags::MNT_DETACH).expect("a mount");
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for StuckFuse {
    fn drop(&mut self) {
        let _ended = fs::write(self.connection.join("abort"), "1");
        let _gone = umount2(&self.path, MntFlags::MNT_DETACH);
        let _gone = umount2("/sys/fs/fuse/connections", MntFlags::MNT_DETACH);
        let _gone = fs::remove_dir(&self.path);
    }
}

fn answer(mut channel: File, hangs: &AtomicBool) {
    let mut request = vec![0; 64 << 10];
    while let Ok(length) = channel.read(&mut request) {
        let Some(header) = request.get(..length).filter(|it| it.len() >= 40) else {
            return;
        };
        let opcode = u32::from_ne_bytes([header[4], header[5], header[6], header[7]]);
        let unique = &header[8..16];
        let body = match opcode {
            INIT => Some(init()),
            // File handle 0, no flags.
            OPENDIR => Some(vec![0; 16]),
            FORGET | BATCH_FORGET | INTERRUPT => continue,
            _ if hangs.load(Ordering::SeqCst) => continue,
            _ => body(opcode, header),
        };
        let total = 16 + body.as_ref().map_or(0, Vec::len);
        let mut said = u32::try_from(total)
            .expect("a short answer")
            .to_ne_bytes()
            .to_vec();
        let errno = if body.is_some() { 0 } else { nix::libc::ENOSYS };
        said.extend((-errno).to_ne_bytes());
        said.extend(unique);
        said.extend(body.unwrap_or_default());
        if channel.write_all(&said).is_err() {
            return;
        }
    }
}

/// The answer to a request about the file; `None` if the request is not one of those.
fn body(opcode: u32, request: &[u8]) -> Option<Vec<u8>> {
    match opcode {
        // `struct fuse_entry_out`, with validity times of 0.
        LOOKUP => {
            let mut body = FILE.to_ne_bytes().to_vec();
            body.resize(40, 0);
            body.extend(attributes(FILE));
            Some(body)
        }
        // `struct fuse_attr_out`.
        GETATTR => {
            let node = request.get(16..24)?.try_into().ok()?;
            let mut body = vec![0; 16];
            body.extend(attributes(u64::from_ne_bytes(node)));
            Some(body)
        }
        OPEN => Some(vec![0; 16]),
        READ => {
            let length = request.get(56..60)?.try_into().ok()?;
            Some(vec![0; usize::try_from(u32::from_ne_bytes(length)).ok()?])
        }
        RELEASE | RELEASEDIR | FLUSH => Some(Vec::new()),
        _ => None,
    }
}

/// `struct fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let (size, mode) = if node == FILE {
        (FILE_BYTES, 0o100_600_u32)
    } else {
        (0, 0o40_700)
    };
    let mut body = Vec::new();
    for number in [node, size, size / 512, 0, 0, 0] {
        body.extend(number.to_ne_bytes());
    }
    body.extend([0; 12]);
    for number in [mode, 1] {
        body.extend(number.to_ne_bytes());
    }
    body.resize(88, 0);
    body
}

/// `struct fuse_init_out` of version 7.31.
fn init() -> Vec<u8> {
    let mut body = Vec::new();
    for number in [7_u32, 31, 4096, 0] {
        body.extend(number.to_ne_bytes());
    }
    for number in [12_u16, 9] {
        body.extend(number.to_ne_bytes());
    }
    for number in [4096_u32, 1] {
        body.extend(number.to_ne_bytes());
    }
    body.resize(64, 0);
    body
}
