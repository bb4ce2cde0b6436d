//! The threads of the kernel, which open nothing: on a large machine they are most of what
//! `/proc` shows.

use std::collections::BTreeSet;
use std::path::Path;

use nix::errno::Errno;
use parking_lot::Mutex;

use super::descriptor_tables::DescriptorTables;
use super::stat;
use crate::kernel::{Roots, proc_file};

/// The threads of the kernel are children of kthreadd, and so are the programs that the
/// kernel starts. A child is compared with kthreadd until it is known as a thread.
pub(super) struct KernelThreads<'a> {
    /// Empty if `/proc` does not show the children: then all processes are looked at.
    children: BTreeSet<u32>,
    tables: &'a DescriptorTables,
}

const KTHREADD: u32 = 2;

/// `PF_KTHREAD` (`include/linux/sched.h`): a process that ends loses its executable
/// file while it still has descriptors, and never gains this flag. The execution of a program
/// clears it (`fs/exec.c`, `begin_new_exec`).
const KERNEL_THREAD: u64 = 0x0020_0000;

/// Children of kthreadd that are threads of the kernel.
static KNOWN_THREADS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

impl<'a> KernelThreads<'a> {
    pub(super) fn read(roots: &Roots, tables: &'a DescriptorTables) -> Self {
        let kthreadd = roots.proc.join(KTHREADD.to_string());
        let children = kthreadd.join(format!("task/{KTHREADD}/children"));
        // In another PID namespace a program has this number.
        let text = proc_file::read(&children)
            .ok()
            .filter(|_| is_kernel_thread(&kthreadd));
        let text = String::from_utf8(text.unwrap_or_default()).unwrap_or_default();
        let children = text.split_ascii_whitespace();
        let children: BTreeSet<u32> = children.filter_map(|pid| pid.parse().ok()).collect();
        let mut known = KNOWN_THREADS.lock();
        known.retain(|pid| children.contains(pid));
        Self { children, tables }
    }

    /// Whether this is kthreadd. `false` if `/proc` does not show its children.
    pub(super) fn is_parent(&self, pid: u32) -> bool {
        pid == KTHREADD && !self.children.is_empty()
    }

    pub(super) fn has(&self, pid: u32, process: &Path) -> bool {
        if !self.children.contains(&pid) {
            return false;
        }
        let mut known = KNOWN_THREADS.lock();
        if known.contains(&pid) {
            return true;
        }
        // The threads that kthreadd has made have its table of descriptors (`kernel/kthread.c`,
        // `create_kthread`), and no program has it (`kernel/umh.c`,
        // `call_usermodehelper_exec_work`).
        match self.tables.compare(KTHREADD, pid) {
            Ok(true) => {
                known.insert(pid);
                true
            }
            Ok(false) => false,
            // It has ended.
            Err(Errno::ESRCH) => true,
            // Before Linux 5.19 a program has the flag too until it is executed.
            Err(_) => is_kernel_thread(process),
        }
    }
}

pub(super) fn is_kernel_thread(process: &Path) -> bool {
    stat::read_field(process, stat::FLAGS).is_ok_and(|flags| flags & KERNEL_THREAD != 0)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::kernel::process::program_pids;

    #[test]
    fn a_child_of_kthreadd_that_is_ending_is_no_thread_of_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let process = |pid: &str| roots.proc.join(pid);
        fs::create_dir_all(process("2/task/2")).unwrap();
        fs::write(process("2/stat"), "2 (kthreadd) S 0 0 0 0 -1 2129984 0\n").unwrap();
        // No process of this machine has such a high number.
        let (thread, program) = (4_194_305, 4_194_306);
        let children = format!("{thread} {program}");
        fs::write(process("2/task/2/children"), children).unwrap();
        for (pid, flags) in [(thread, "69238880"), (program, "4194560")] {
            fs::create_dir_all(process(&pid.to_string())).unwrap();
            let stat = format!("{pid} (a ) b) Z 2 0 0 0 -1 {flags} 0 0 0 0\n");
            fs::write(process(&pid.to_string()).join("stat"), stat).unwrap();
        }
        let tables = DescriptorTables::read(&roots);
        let threads = KernelThreads::read(&roots, &tables);
        let is_thread = |pid: u32| threads.has(pid, &process(&pid.to_string()));
        assert!(is_thread(thread) && !is_thread(program));
        assert!(threads.is_parent(KTHREADD) && !threads.is_parent(program));
        let mut programs = program_pids(&roots).unwrap();
        programs.sort_unstable();
        assert_eq!(programs, [KTHREADD, program]);
    }
}
