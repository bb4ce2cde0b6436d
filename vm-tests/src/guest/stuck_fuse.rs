//! A FUSE file system whose daemon opens its root directory and then answers nothing,
//! as one that hangs.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// `include/uapi/linux/fuse.h`.
const INIT: u32 = 26;
const OPENDIR: u32 = 27;

/// Mounted at [`StuckFuse::path`]; dropping it unmounts it and ends every call that
/// waits for it.
#[derive(Debug)]
pub struct StuckFuse {
    path: PathBuf,
    connection: PathBuf,
}

impl StuckFuse {
    /// Mounts it at `path`, which is made.
    #[must_use]
    pub fn mount_at(path: &str) -> Self {
        super::enter();
        // Some kernels have it built in.
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
        thread::spawn(move || answer(channel));
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
        }
    }

    /// Where it is mounted.
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

fn answer(mut channel: File) {
    let mut request = vec![0; 64 << 10];
    while let Ok(length) = channel.read(&mut request) {
        let Some(header) = request.get(..length).filter(|it| it.len() >= 16) else {
            return;
        };
        let opcode = u32::from_ne_bytes([header[4], header[5], header[6], header[7]]);
        let unique = &header[8..16];
        let body: Vec<u8> = match opcode {
            INIT => init(),
            // A handle of 0, no flags.
            OPENDIR => vec![0; 16],
            _ => continue,
        };
        let total = u32::try_from(16 + body.len()).expect("a short answer");
        let mut said = total.to_ne_bytes().to_vec();
        said.extend(0_i32.to_ne_bytes());
        said.extend(unique);
        said.extend(body);
        if channel.write_all(&said).is_err() {
            return;
        }
    }
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
