//! The names in a directory.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;

use nix::errno::Errno;

/// The names of many descriptors or devices, in bytes.
const ROOM: usize = 32 << 10;

/// The places in an entry of its length and of its name, which ends with a zero byte
/// (`include/linux/dirent.h`, `struct linux_dirent64`).
const LENGTH: usize = 16;
const NAME: usize = 19;

/// More than the longest entry: its fields, a name of 255 bytes and the zero byte.
const LONGEST_ENTRY: usize = 280;

/// What shows that a directory has no further name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastRead {
    /// A read without a name, in any file system.
    Empty,
    /// A read that leaves room for one more entry. It saves one call. The file systems below
    /// `/sys` and `/proc` stop early only if the next entry does not fit (`kernfs_fop_readdir`,
    /// `proc_pid_readdir`, `configfs_readdir`). XFS, FUSE and NFS may stop earlier.
    LeavesRoom,
}

/// Hands over each name in an open directory, without `.` and `..`, from where the descriptor
/// stands. Unlike `readdir`, it does not ask first whether the descriptor is a directory.
///
/// # Errors
/// The errno of `getdents64`. The names before the error were handed over.
#[doc(alias = "getdents64")]
pub fn read_names(
    directory: BorrowedFd<'_>,
    last: LastRead,
    take: impl FnMut(&OsStr),
) -> nix::Result<()> {
    read_names_into(&mut vec![0_u8; ROOM], directory, last, take)
}

fn read_names_into(
    entries: &mut [u8],
    directory: BorrowedFd<'_>,
    last: LastRead,
    mut take: impl FnMut(&OsStr),
) -> nix::Result<()> {
    loop {
        // SAFETY: the kernel writes no more than the given length to the buffer, which lives
        // through the call.
        let written = unsafe {
            libc::syscall(
                libc::SYS_getdents64,
                directory.as_raw_fd(),
                entries.as_mut_ptr(),
                entries.len(),
            )
        };
        let written = Errno::result(written)?;
        let mut rest = usize::try_from(written)
            .ok()
            .and_then(|written| entries.get(..written))
            .unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        let leaves_room = rest.len() + LONGEST_ENTRY <= entries.len();
        while let Some(length) = rest.get(LENGTH..).and_then(|rest| rest.first_chunk::<2>()) {
            let length = usize::from(u16::from_ne_bytes(*length)).max(NAME);
            let (entry, next) = rest.split_at_checked(length).unwrap_or((rest, &[]));
            rest = next;
            let name = entry.get(NAME..).unwrap_or_default();
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            if name != b"." && name != b".." {
                take(OsStr::from_bytes(name));
            }
        }
        if leaves_room && last == LastRead::LeavesRoom {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::ffi::OsString;
    use std::fs::{self, File};
    use std::os::fd::AsFd as _;

    use super::*;

    fn names(directory: &File) -> nix::Result<BTreeSet<OsString>> {
        let mut names = BTreeSet::new();
        let read = read_names(directory.as_fd(), LastRead::Empty, |name| {
            assert!(names.insert(name.to_owned()), "{name:?} came twice");
        });
        read.map(|()| names)
    }

    #[test]
    fn the_names_are_those_that_the_standard_library_reads() {
        for directory in ["/", "/proc", "/proc/self/fd", "/dev", "/sys/class"] {
            let expected = fs::read_dir(directory).unwrap();
            let expected: BTreeSet<_> = expected.map(|entry| entry.unwrap().file_name()).collect();
            let found = names(&File::open(directory).unwrap()).unwrap();
            // Processes, and the descriptors of other tests, come and go.
            let stays = |name: &&OsString| !name.as_bytes().iter().all(u8::is_ascii_digit);
            let stay = |names: BTreeSet<OsString>| -> Vec<_> {
                names.iter().filter(stays).cloned().collect()
            };
            assert_eq!(stay(found), stay(expected), "{directory}");
        }
    }

    #[test]
    fn below_sys_and_proc_a_read_that_leaves_room_is_the_last_one_with_a_name() {
        for directory in [
            "/proc",
            "/proc/self",
            "/proc/self/task",
            "/sys",
            "/sys/class",
        ] {
            let opened = File::open(directory).unwrap();
            let mut found = 0;
            // There is room for a few names, so most reads fill it.
            let mut room = [0; 2 * LONGEST_ENTRY];
            let count = |_: &OsStr| found += 1;
            read_names_into(&mut room, opened.as_fd(), LastRead::LeavesRoom, count).unwrap();
            assert!(found > 0, "{directory}");
            // Processes come and go.
            let rest = names(&opened).unwrap();
            let is_new = |name: &OsString| name.as_bytes().iter().all(u8::is_ascii_digit);
            assert!(rest.iter().all(is_new), "{directory}: {rest:?}");
        }
    }

    #[test]
    fn more_names_than_one_call_returns_all_come() {
        let directory = std::env::temp_dir().join(format!("lunbd-names-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let expected: BTreeSet<OsString> = (0..1500)
            .map(|number| format!("a file with a longer name, number {number}").into())
            .collect();
        for name in &expected {
            File::create(directory.join(name)).unwrap();
        }
        let found = names(&File::open(&directory).unwrap());
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(found.unwrap(), expected);
    }

    #[test]
    fn a_file_is_no_directory() {
        assert_eq!(
            names(&File::open("/proc/self/stat").unwrap()),
            Err(Errno::ENOTDIR)
        );
    }
}
