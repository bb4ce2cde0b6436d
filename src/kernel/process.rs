//! Which processes have a device open, and which of them are hidden.

pub(super) mod descriptors;
mod kernel_threads;
mod mappings;
mod opener;
mod rings;
mod without_descriptor;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::devices::NumberedDevice;
use super::machine::Capabilities;
use super::{Roots, namespace, sysfs, user_namespace};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use descriptors::{DescriptorTables, has_gone, unless_denied, writes};
use kernel_threads::{KernelThreads, is_kernel_thread};
pub use opener::{Means, Opener};
use without_descriptor::Process;

/// The processes that have a device open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Openers {
    /// Each process with a device, once for each means.
    pub found: Vec<Opener>,
    /// The processes that may have more open: the kernel did not show all that they have.
    pub unreadable: BTreeSet<u32>,
}

/// The inode of the PID namespace that the machine starts with
/// (`include/linux/proc_ns.h`, `PROC_PID_INIT_INO`).
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The processes that `/proc` shows.
pub(crate) fn pids(roots: &Roots) -> Result<Vec<u32>> {
    let names = sysfs::names(&roots.proc)?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

/// The processes that `/proc` shows, without the children of kthreadd that are threads of the
/// kernel. These have the table of descriptors and the mount namespace of kthreadd, which is
/// included.
pub(crate) fn program_pids(roots: &Roots) -> Result<Vec<u32>> {
    let tables = DescriptorTables::read(roots);
    pids_without(roots, &KernelThreads::read(roots, &tables))
}

fn pids_without(roots: &Roots, kernel_threads: &KernelThreads<'_>) -> Result<Vec<u32>> {
    let mut pids = pids(roots)?;
    pids.retain(|pid| !kernel_threads.has(*pid, &roots.proc.join(pid.to_string())));
    Ok(pids)
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

/// How many kernel threads run an item of one of these work queues now, such as
/// `kworker/u5:2+nbd0-recv` (Linux 4.18, `kernel/workqueue.c`, `wq_worker_comm`). `None` if
/// this `/proc` shows no kernel threads.
pub(crate) fn running_items(roots: &Roots, queues: &[String]) -> Result<Option<usize>> {
    let name = |pid: u32| sysfs::read(&roots.proc.join(format!("{pid}/comm"))).ok();
    if name(PARENT_OF_KERNEL_THREADS).as_deref() != Some("kthreadd") {
        return Ok(None);
    }
    let runs_one = |name: String| {
        let item = name.split_once('+');
        item.is_some_and(|(_, queue)| queues.iter().any(|known| known == queue))
    };
    // A program can give itself such a name.
    let is_thread = |pid: u32| is_kernel_thread(&roots.proc.join(pid.to_string()));
    let runs = |pid: &u32| name(*pid).is_some_and(runs_one) && is_thread(*pid);
    Ok(Some(pids(roots)?.iter().filter(|pid| runs(pid)).count()))
}

/// The process id of `kthreadd` on each machine (`init/main.c`, `rest_init`).
const PARENT_OF_KERNEL_THREADS: u32 = 2;

/// Whether this `/proc` shows the processes of all PID namespaces: its first process
/// is of the initial one. A kernel without such namespaces shows all.
///
/// # Errors
/// By the errno, where the namespace cannot be read.
pub(crate) fn shows_all_namespaces(roots: &Roots) -> Result<bool> {
    let inode = |process: &str| {
        let process = roots.proc.join(process);
        namespace::inode(&process, "pid").map_err(|error| (process.join("ns/pid"), error))
    };
    let first = inode("1");
    let is_denied = matches!(&first, Err((_, error)) if !has_gone(error));
    // A process that may not look at the first process can look at itself.
    match first.or_else(|_| inode("self")) {
        Ok(inode) => Ok(inode == INITIAL_PID_NAMESPACE),
        // A denied first process has a namespace, and this `/proc` does not show this one.
        Err((_, error)) if has_gone(&error) => Ok(!is_denied),
        Err((link, error)) => Err(Error::io("cannot examine", &link, &error)),
    }
}

/// Whether a process has `CAP_SYS_ADMIN` over the machine. If that cannot be read, the answer
/// is yes.
pub(crate) fn may_administer(roots: &Roots, pid: u32) -> bool {
    let process = pid.to_string();
    let capabilities = Capabilities::effective_of(roots, &process);
    user_namespace::is_initial_of(roots, &process)
        && capabilities.map_or(true, Capabilities::sys_admin)
}

/// The processes that have a descriptor of one of `devices`. A descriptor that only names a
/// device (`O_PATH`) does not count. For a file on a file server, the server is not asked.
pub fn read_openers(roots: &Roots, devices: &[NumberedDevice]) -> Result<Openers> {
    Ok(DescriptorScan::read(roots, devices)?.openers)
}

/// As [`read_openers`], and the processes that have a device open without a descriptor: they
/// have it mapped for writing, or registered with an `io_uring`. If the kernel does not show
/// that in time, the process counts as one that may have more open.
pub fn read_all_openers(
    roots: &Roots,
    devices: &[NumberedDevice],
    deadline: Deadline,
) -> Result<Openers> {
    let DescriptorScan {
        mut openers,
        processes,
    } = DescriptorScan::read(roots, devices)?;
    for process in without_descriptor::read(roots, devices, processes, deadline) {
        let pid = process.pid;
        if !process.is_complete {
            openers.unreadable.insert(pid);
        }
        for (device, means) in process.opened {
            let mut known = openers.found.iter();
            if !known.any(|known| known.pid == pid && known.device == device && known.writes) {
                openers.found.push(Opener {
                    device,
                    pid,
                    command: command(&roots.proc.join(pid.to_string())),
                    writes: true,
                    means,
                });
            }
        }
    }
    Ok(openers)
}

/// The descriptors of each process.
struct DescriptorScan {
    openers: Openers,
    /// The processes that were looked at.
    processes: Vec<Process>,
}

impl DescriptorScan {
    fn read(roots: &Roots, devices: &[NumberedDevice]) -> Result<Self> {
        let mut openers = Openers::default();
        let mut processes = Vec::new();
        let tables = DescriptorTables::read(roots);
        let kernel_threads = KernelThreads::read(roots, &tables);
        for pid in pids_without(roots, &kernel_threads)? {
            let path = roots.proc.join(pid.to_string());
            let mut is_complete = true;
            let descriptors = tables.descriptors(pid, &path, &mut is_complete);
            let process = Process {
                pid,
                thread: descriptors.thread,
                rings: Vec::new(),
            };
            let mut scan = ProcessScan {
                path,
                process,
                found: Vec::new(),
            };
            for descriptor in descriptors.paths {
                scan.add(roots, devices, descriptor, &mut is_complete);
            }
            openers.found.extend(scan.found);
            // A thread of the kernel has no memory.
            if !kernel_threads.is_parent(pid) {
                processes.push(scan.process);
            }
            if !is_complete {
                openers.unreadable.insert(pid);
            }
        }
        Ok(Self { openers, processes })
    }
}

/// The descriptors of one process.
struct ProcessScan {
    path: PathBuf,
    process: Process,
    found: Vec<Opener>,
}

impl ProcessScan {
    /// Adds a descriptor. `is_complete` becomes false if the process may have more open.
    fn add(
        &mut self,
        roots: &Roots,
        devices: &[NumberedDevice],
        descriptor: PathBuf,
        is_complete: &mut bool,
    ) {
        let link = fs::read_link(&descriptor);
        match &link {
            Ok(link) if rings::is_ring(link) => return self.process.rings.push(descriptor),
            Ok(link) if is_no_path(link) => return,
            _ => {}
        }
        let at = match roots.devices.device_at(&descriptor) {
            // The kernel lets us look, but the file's own file system does not: a file
            // system in user space refuses other users (`fs/fuse/dir.c`,
            // `fuse_allow_current_process`). Such a file is no disk of this machine.
            Err(error) if !has_gone(&error) && link.is_ok() => return,
            at => unless_denied(at, is_complete).flatten(),
        };
        let Some(device) = at.filter(|device| devices.contains(device)) else {
            return;
        };
        let Some(writes) = writes(&descriptor) else {
            return;
        };
        // The process may have closed the descriptor, and the flags are those of another file
        // that has its number now.
        let is_another = match roots.devices.device_at(&descriptor) {
            Ok(now) => now != Some(device),
            Err(error) => has_gone(&error),
        };
        if is_another {
            return;
        }
        let mut known = self.found.iter_mut();
        match known.find(|opener| opener.device == device) {
            Some(known) => known.writes |= writes,
            None => self.found.push(Opener {
                device,
                pid: self.process.pid,
                command: command(&self.path),
                writes,
                means: Means::Descriptor,
            }),
        }
    }
}

/// Whether the link of a descriptor names something that is on no file system.
fn is_no_path(link: &Path) -> bool {
    let text = link.as_os_str().as_encoded_bytes();
    let names: [&[u8]; 3] = [b"socket:", b"pipe:", b"anon_inode:"];
    names.iter().any(|name| text.starts_with(name))
}

fn command(process: &Path) -> String {
    sysfs::read(&process.join("comm")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;
    use std::thread;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;
    use crate::id::DevNo;
    use crate::kernel::Devices;
    use crate::kernel::devices::tests::Named;

    const SDA: DevNo = DevNo { major: 8, minor: 0 };

    #[test]
    fn the_kernel_threads_that_run_an_item_of_some_work_queues_are_counted_where_they_are_shown() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let put = |pid: u32, name: &str| {
            let process = roots.proc.join(pid.to_string());
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("comm"), format!("{name}\n")).unwrap();
            let flags = if name.starts_with("a program") {
                0
            } else {
                0x0020_0000
            };
            let stat = format!("{pid} ({name}) S 2 0 0 0 -1 {flags} 0\n");
            fs::write(process.join("stat"), stat).unwrap();
        };
        let queues = ["nbd0-recv".to_owned(), "knbd0-recv".to_owned()];
        put(20, "kworker/u5:2+nbd0-recv");
        assert_eq!(running_items(&roots, &queues).unwrap(), None);
        put(2, "kthreadd");
        put(21, "kworker/u5:3-nbd0-recv");
        put(22, "nbd0-recv+nbd0-recv");
        put(23, "kworker/0:1+nbd10-recv");
        put(24, "a program+nbd0-recv");
        put(25, "kworker/u5:4+knbd0-recv");
        assert_eq!(running_items(&roots, &queues).unwrap(), Some(3));
    }

    #[test]
    fn a_descriptor_whose_number_another_file_has_meanwhile_does_not_open_the_device() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let process = roots.proc.join("7");
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::create_dir_all(process.join("fdinfo")).unwrap();
        // The look at the flags waits in this pipe.
        let flags = process.join("fdinfo/3");
        mkfifo(&flags, Mode::S_IRWXU).unwrap();
        let descriptor = process.join("fd/3");
        symlink("/dev/full", &descriptor).unwrap();
        let full = NumberedDevice::Character(DevNo { major: 1, minor: 7 });
        let openers = |successor: &str| {
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut pipe = fs::File::options().write(true).open(&flags).unwrap();
                    fs::remove_file(&descriptor).unwrap();
                    symlink(successor, &descriptor).unwrap();
                    pipe.write_all(b"flags:\t01\n").unwrap();
                });
                read_openers(&roots, &[full]).unwrap().found
            })
        };
        let [writer] = <[Opener; 1]>::try_from(openers("/dev/full")).unwrap();
        assert!(writer.writes, "{writer:?}");
        assert_eq!(openers("/dev/null"), []);
    }

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
                .len()
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
        fs::create_dir_all(process("9/task/9")).unwrap();
        fs::create_dir_all(process("9/task/10")).unwrap();
        fs::write(process("9/task/10/fd"), "").unwrap();
        assert_eq!(unreadable(), 1, "a thread");
        fs::write(process("8/fd"), "").unwrap();
        assert_eq!(unreadable(), 2, "the descriptors");
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
        // The look is denied, and this `/proc` does not show this process.
        fs::write(&namespaces, "").unwrap();
        assert!(!shows_all_namespaces(&roots).unwrap());
    }
}
