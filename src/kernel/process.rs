//! Which processes have a device open, and which of them are hidden.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::devices::NumberedDevice;
use super::machine::Capabilities;
use super::{Roots, sysfs};
use crate::error::{Error, Result};

/// A process that has a device open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Opener {
    /// What is open.
    pub device: NumberedDevice,
    /// The process.
    pub pid: u32,
    /// Its command name.
    pub command: String,
    /// Whether it can write by one of its descriptors.
    pub writes: bool,
}

/// The processes that have a device open. A process that the kernel does not let us read is
/// only counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Openers {
    /// One for each process and device.
    pub found: Vec<Opener>,
    /// How many processes may have more open: the kernel did not let us look at each
    /// of their descriptors.
    pub unreadable: usize,
}

/// The inode of the PID namespace that the machine starts with
/// (`include/linux/proc_ns.h`, `PROC_PID_INIT_INO`).
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The same of user namespaces (`PROC_USER_INIT_INO`).
const INITIAL_USER_NAMESPACE: u64 = 0xEFFF_FFFD;

/// The processes that `/proc` shows.
pub(crate) fn pids(roots: &Roots) -> Result<Vec<u32>> {
    let names = sysfs::names(&roots.proc)?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

/// Whether a process runs whose command has this name, of those that `/proc`
/// shows.
pub(crate) fn is_running(roots: &Roots, command: &str) -> Result<bool> {
    let is_it = |pid: u32| {
        let name = sysfs::read(&roots.proc.join(format!("{pid}/comm")));
        name.is_ok_and(|name| name == command)
    };
    Ok(pids(roots)?.into_iter().any(is_it))
}

/// Whether this `/proc` shows the processes of all PID namespaces: its first process
/// is of the initial one. A kernel without such namespaces shows all.
///
/// # Errors
/// By the errno, where the namespace cannot be read.
pub(crate) fn shows_all_namespaces(roots: &Roots) -> Result<bool> {
    let inode = |process: &str| {
        let link = roots.proc.join(process).join("ns/pid");
        fs::metadata(&link)
            .map(|namespace| namespace.ino())
            .map_err(|error| (link, error))
    };
    let first = inode("1");
    let is_denied = matches!(&first, Err((_, error)) if !has_gone(error));
    // Who may not look at the first process can look at itself.
    match first.or_else(|_| inode("self")) {
        Ok(inode) => Ok(inode == INITIAL_PID_NAMESPACE),
        // A denied first process has a namespace, and this `/proc` does not show us.
        Err((_, error)) if has_gone(&error) => Ok(!is_denied),
        Err((link, error)) => Err(Error::io("cannot examine", &link, &error)),
    }
}

/// Whether the capabilities of this process are those over the machine's processes: in
/// another user namespace it has them over the processes there alone. A kernel without such
/// namespaces has no other.
pub(crate) fn is_in_initial_user_namespace(roots: &Roots) -> bool {
    has_initial_user_namespace(roots, "self")
}

fn has_initial_user_namespace(roots: &Roots, process: &str) -> bool {
    match fs::metadata(roots.proc.join(process).join("ns/user")) {
        Ok(namespace) => namespace.ino() == INITIAL_USER_NAMESPACE,
        Err(error) => has_gone(&error),
    }
}

/// Whether a process has `CAP_SYS_ADMIN` over the machine, also where that cannot be read.
pub(crate) fn may_administer(roots: &Roots, pid: u32) -> bool {
    let process = pid.to_string();
    let capabilities = Capabilities::effective_of(roots, &process);
    has_initial_user_namespace(roots, &process)
        && capabilities.map_or(true, Capabilities::sys_admin)
}

/// The processes that have one of `devices` open. A descriptor that only names a
/// device (`O_PATH`) is none of it. What is open on a file server is not asked for
/// there.
pub fn read_openers(roots: &Roots, devices: &[NumberedDevice]) -> Result<Openers> {
    let mut openers = Openers::default();
    let kernel_threads = KernelThreads::read(roots);
    for pid in pids(roots)? {
        let process = roots.proc.join(pid.to_string());
        if kernel_threads.has(pid, &process) {
            continue;
        }
        let mut is_whole = true;
        let found = read_openers_of(roots, pid, &process, devices, &mut is_whole);
        openers.found.extend(found);
        openers.unreadable += usize::from(!is_whole);
    }
    Ok(openers)
}

/// Whether this error says that a process has ended, or has closed a descriptor. Any
/// other leaves open what there is: a process of uid 0 without `CAP_SYS_PTRACE` may
/// list the descriptors of others, and not look at one (`EACCES`).
fn has_gone(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ENOENT | Errno::ESRCH))
}

/// What was read; nothing where it has gone. Any other error makes the look at its
/// process incomplete.
fn unless_denied<T>(read: io::Result<T>, is_whole: &mut bool) -> Option<T> {
    read.inspect_err(|error| *is_whole &= has_gone(error)).ok()
}

/// The opens of one process; `is_whole` becomes false where there may be more.
fn read_openers_of(
    roots: &Roots,
    pid: u32,
    process: &Path,
    devices: &[NumberedDevice],
    is_whole: &mut bool,
) -> Vec<Opener> {
    let mut found: Vec<Opener> = Vec::new();
    for descriptor in descriptors(process, is_whole) {
        let at = match roots.devices.device_at(&descriptor) {
            // The kernel lets us look, and the file's own file system does not: one in
            // user space refuses other users (`fs/fuse/dir.c`,
            // `fuse_allow_current_process`). It has no disk of this machine.
            Err(error) if !has_gone(&error) && fs::read_link(&descriptor).is_ok() => continue,
            at => unless_denied(at, is_whole).flatten(),
        };
        let Some(device) = at.filter(|device| devices.contains(device)) else {
            continue;
        };
        let Some(writes) = writes(&descriptor) else {
            continue;
        };
        match found.iter_mut().find(|opener| opener.device == device) {
            Some(known) => known.writes |= writes,
            None => found.push(Opener {
                device,
                pid,
                command: sysfs::read(&process.join("comm")).unwrap_or_default(),
                writes,
            }),
        }
    }
    found
}

/// Whether a descriptor was opened for writing, by the flags in `fdinfo`
/// (`fs/proc/fd.c`, octal); `None` where it has not the device open. One whose flags
/// cannot be read may write.
fn writes(descriptor: &Path) -> Option<bool> {
    let number = descriptor.file_name()?;
    let fdinfo = descriptor.parent()?.with_file_name("fdinfo").join(number);
    let text = match fs::read_to_string(fdinfo) {
        Ok(text) => text,
        Err(error) => return (!has_gone(&error)).then_some(true),
    };
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok());
    let Some(flags) = flags.map(OFlag::from_bits_retain) else {
        return Some(true);
    };
    if flags.contains(OFlag::O_PATH) {
        return None;
    }
    Some(flags & OFlag::O_ACCMODE != OFlag::O_RDONLY)
}

/// The threads of the kernel, which have no descriptors: on a large machine they are
/// most of what `/proc` shows.
///
/// They are children of kthreadd, as programs are that the kernel starts. The flags of
/// each child tell them apart, and are read once in the life of a thread.
struct KernelThreads {
    /// None where `/proc` does not say them: then all are looked at.
    children: BTreeSet<u32>,
}

const KTHREADD: u32 = 2;

/// `PF_KTHREAD` (`include/linux/sched.h`): a process that ends loses its executable
/// file while it still has descriptors, and never gains this flag.
const KERNEL_THREAD: u32 = 0x0020_0000;

/// Children of kthreadd that are threads of the kernel.
static KNOWN_THREADS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

impl KernelThreads {
    fn read(roots: &Roots) -> Self {
        let kthreadd = roots.proc.join(KTHREADD.to_string());
        let children = kthreadd.join(format!("task/{KTHREADD}/children"));
        let is_it = || sysfs::read(&kthreadd.join("comm")).is_ok_and(|name| name == "kthreadd");
        let text = fs::read_to_string(children).ok().filter(|_| is_it());
        let text = text.unwrap_or_default();
        let children = text.split_ascii_whitespace();
        let children: BTreeSet<u32> = children.filter_map(|pid| pid.parse().ok()).collect();
        let mut known = KNOWN_THREADS.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|pid| children.contains(pid));
        Self { children }
    }

    fn has(&self, pid: u32, process: &Path) -> bool {
        if !self.children.contains(&pid) {
            return false;
        }
        let mut known = KNOWN_THREADS.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(&pid) {
            return true;
        }
        let is_thread = flags(process).is_some_and(|flags| flags & KERNEL_THREAD != 0);
        if is_thread {
            known.insert(pid);
        }
        is_thread
    }
}

/// The process's flags in `stat` (proc(5), field 9); its command may contain blanks
/// and parentheses.
fn flags(process: &Path) -> Option<u32> {
    let text = sysfs::read(&process.join("stat")).ok()?;
    let (_, fields) = text.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(6)?.parse().ok()
}

/// The descriptors of a process, and where its first thread has ended, those of the
/// others: a process that was killed stays for as long as the kernel holds one.
fn descriptors(process: &Path, is_whole: &mut bool) -> Vec<PathBuf> {
    let mut paths = |dir: PathBuf| -> Vec<PathBuf> {
        let entries = unless_denied(fs::read_dir(dir), is_whole);
        let entries = entries.into_iter().flatten();
        let paths = entries.map(|entry| entry.map(|entry| entry.path()));
        paths
            .filter_map(|path| unless_denied(path, is_whole))
            .collect()
    };
    let own = paths(process.join("fd"));
    if !own.is_empty() {
        return own;
    }
    let threads = paths(process.join("task"));
    let of_threads = threads.into_iter().map(|thread| paths(thread.join("fd")));
    of_threads.flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::{OpenOptionsExt as _, symlink};
    use std::sync::Arc;

    use super::*;
    use crate::id::DevNo;
    use crate::kernel::Devices;
    use crate::kernel::devices::tests::Named;

    const SDA: DevNo = DevNo { major: 8, minor: 0 };

    #[test]
    fn a_process_that_may_not_be_looked_at_is_not_taken_for_one_that_has_nothing_open() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named("/dev/sda", SDA))),
            ..Roots::below(root.path())
        };
        let process = |pid: &str| roots.proc.join(pid);
        let unreadable = || {
            read_openers(&roots, &[NumberedDevice::Block(SDA)])
                .unwrap()
                .unreadable
        };
        fs::create_dir_all(process("7/fd")).unwrap();
        symlink("/none/there", process("7/fd/3")).unwrap();
        fs::create_dir_all(process("8")).unwrap();
        assert_eq!(unreadable(), 0, "these have ended");
        // The kernel denies the link too.
        fs::write(process("7/fd/denied"), "").unwrap();
        assert_eq!(unreadable(), 1);
        fs::remove_file(process("7/fd/denied")).unwrap();
        symlink("/mnt/fuse/file", process("7/fd/denied")).unwrap();
        assert_eq!(unreadable(), 0, "its file system denies it");
        fs::create_dir_all(process("9/task/10")).unwrap();
        fs::write(process("9/task/10/fd"), "").unwrap();
        assert_eq!(unreadable(), 1, "a thread");
        fs::write(process("8/fd"), "").unwrap();
        assert_eq!(unreadable(), 2, "the descriptors");
    }

    fn descriptor(file: &File) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    #[test]
    fn a_child_of_kthreadd_that_is_ending_is_no_thread_of_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let process = |pid: &str| roots.proc.join(pid);
        fs::create_dir_all(process("2/task/2")).unwrap();
        fs::write(process("2/comm"), "kthreadd\n").unwrap();
        // No process of this machine has such a high number.
        let (thread, program) = (4_194_305, 4_194_306);
        let children = format!("{thread} {program}");
        fs::write(process("2/task/2/children"), children).unwrap();
        for (pid, flags) in [(thread, "69238880"), (program, "4194560")] {
            fs::create_dir_all(process(&pid.to_string())).unwrap();
            let stat = format!("{pid} (a ) b) Z 2 0 0 0 -1 {flags} 0 0 0 0\n");
            fs::write(process(&pid.to_string()).join("stat"), stat).unwrap();
        }
        let threads = KernelThreads::read(&roots);
        let is_thread = |pid: u32| threads.has(pid, &process(&pid.to_string()));
        assert!(is_thread(thread) && !is_thread(program));
    }

    #[test]
    fn a_writer_is_told_from_a_reader_and_from_one_who_only_names_the_file() {
        let mut both = OpenOptions::new();
        both.read(true).write(true);
        let file = both.open("/dev/null").unwrap();
        assert_eq!(writes(&descriptor(&file)), Some(true));
        let file = OpenOptions::new().write(true).open("/dev/null").unwrap();
        assert_eq!(writes(&descriptor(&file)), Some(true));
        let file = File::open("/dev/null").unwrap();
        assert_eq!(writes(&descriptor(&file)), Some(false));
        let path = OFlag::O_PATH.bits();
        let file = OpenOptions::new().read(true).custom_flags(path).open("/");
        assert_eq!(writes(&descriptor(&file.unwrap())), None);
    }

    #[test]
    fn the_first_process_tells_whether_all_namespaces_are_shown() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        assert!(shows_all_namespaces(&roots).unwrap(), "no namespaces");
        let namespaces = roots.proc.join("1/ns");
        fs::create_dir_all(&namespaces).unwrap();
        fs::write(namespaces.join("pid"), "").unwrap();
        assert!(!shows_all_namespaces(&roots).unwrap());
        fs::remove_dir_all(&namespaces).unwrap();
        // Denied, and this `/proc` does not show us.
        fs::write(&namespaces, "").unwrap();
        assert!(!shows_all_namespaces(&roots).unwrap());
    }
}
