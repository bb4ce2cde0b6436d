//! Which processes have a device open, and which of them are hidden.

mod descriptor_tables;
pub(super) mod descriptors;
mod kernel_threads;
mod mappings;
mod opener;
mod pids;
mod rings;
mod scan;
mod stat;
mod threads;
mod without_descriptor;

use std::time::Duration;

use super::devices::NumberedDevice;
use super::machine::Capabilities;
use super::{Roots, namespace, sysfs, user_namespace, worker};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Stage};
use descriptor_tables::DescriptorTables;
use descriptors::has_gone;
use kernel_threads::is_kernel_thread;
pub use opener::{Means, Opener, Openers};
pub(crate) use pids::{pids, program_pids};
use scan::DescriptorScan;

/// The inode of the PID namespace that the machine starts with
/// (`include/linux/proc_ns.h`, `PROC_PID_INIT_INO`).
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// [`read_openers`] repeats its look at processes that start or end for this long.
const MAX_TIME_OF_REPEATS: Duration = Duration::from_secs(1);

/// The longest wait of [`read_openers`] for its look at all processes.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

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
///
/// # Errors
/// `TimedOut` at stage `claim` if the look does not end by `deadline`, or within 10 s: it may be
/// the last close of another device, which waits until its pages are written back. `Cancelled`,
/// and those of reading `/proc`.
pub fn read_openers(
    roots: &Roots,
    devices: &[NumberedDevice],
    deadline: Deadline,
) -> Result<Openers> {
    let (roots, devices) = (roots.clone(), devices.to_vec());
    let last_seen =
        || "the last close of a device may be waiting for its pages to be written".to_owned();
    worker::run(
        Stage::Claim,
        "a look at the descriptors of all processes",
        deadline.at_most(LOOK_LIMIT),
        last_seen,
        move || {
            let tables = DescriptorTables::read(&roots);
            let deadline = deadline.at_most(MAX_TIME_OF_REPEATS);
            let mut scan = DescriptorScan::new(&roots, &devices, &tables, deadline);
            scan.look_at_all(&mut |_, _| {})?;
            Ok(scan.openers)
        },
    )
}

/// As [`read_openers`], and the processes that have a device open without a descriptor: they
/// have it mapped for writing, or registered with an `io_uring`. If the kernel does not show
/// that in time, the process counts as one that may have more open.
pub fn read_all_openers(
    roots: &Roots,
    devices: &[NumberedDevice],
    deadline: Deadline,
) -> Result<Openers> {
    let tables = DescriptorTables::read(roots);
    let mut scan = DescriptorScan::new(roots, devices, &tables, deadline);
    scan.look_at_all(&mut |openers, processes| {
        for process in without_descriptor::read(roots, devices, processes, deadline) {
            if !process.is_complete {
                openers.unreadable.insert(process.pid);
            }
            openers.add_writer(roots, process.pid, &process.opened);
        }
    })?;
    Ok(scan.openers)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;

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
    fn a_process_that_may_not_be_looked_at_is_not_taken_for_one_that_has_nothing_open() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named("/dev/sda", SDA))),
            ..Roots::below(root.path())
        };
        let process = |pid: &str| roots.proc.join(pid);
        let unreadable = || {
            let long = Deadline::after(Duration::from_secs(600));
            let tables = DescriptorTables::read(&roots);
            let devices = [NumberedDevice::Block(SDA)];
            let mut scan = DescriptorScan::new(&roots, &devices, &tables, long);
            scan.look_at_all(&mut |_, _| {}).unwrap();
            scan.openers.unreadable.len()
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
        fs::create_dir_all(process("9/fd")).unwrap();
        fs::create_dir_all(process("9/task/9")).unwrap();
        fs::create_dir_all(process("9/task/10")).unwrap();
        let stat = |threads: u32| {
            let stat = format!("9 (a) S 2 9 9 0 -1 0 1 2 3 4 5 6 7 8 20 0 {threads} 0 99\n");
            fs::write(process("9/stat"), stat).unwrap();
        };
        stat(3);
        fs::create_dir_all(process("9/task/10/fd")).unwrap();
        assert_eq!(unreadable(), 1, "the kernel skipped a thread");
        stat(2);
        assert_eq!(unreadable(), 0);
        fs::remove_dir(process("9/task/10/fd")).unwrap();
        assert_eq!(unreadable(), 1, "a listed thread has ended in each look");
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
