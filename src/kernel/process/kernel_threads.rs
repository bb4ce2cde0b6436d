//! The threads of the kernel, which open nothing: on a large machine they are most of what
//! `/proc` shows.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use parking_lot::Mutex;

use crate::kernel::{Roots, sysfs};

/// The threads of the kernel are children of kthreadd, and so are the programs that the
/// kernel starts. The flags of each child tell them apart, and are read once in the life of a
/// thread.
pub(super) struct KernelThreads {
    /// Empty if `/proc` does not show the children: then all processes are looked at.
    children: BTreeSet<u32>,
}

const KTHREADD: u32 = 2;

/// `PF_KTHREAD` (`include/linux/sched.h`): a process that ends loses its executable
/// file while it still has descriptors, and never gains this flag.
const KERNEL_THREAD: u32 = 0x0020_0000;

/// Children of kthreadd that are threads of the kernel.
static KNOWN_THREADS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

impl KernelThreads {
    pub(super) fn read(roots: &Roots) -> Self {
        let kthreadd = roots.proc.join(KTHREADD.to_string());
        let children = kthreadd.join(format!("task/{KTHREADD}/children"));
        let is_it = || sysfs::read(&kthreadd.join("comm")).is_ok_and(|name| name == "kthreadd");
        let text = fs::read_to_string(children).ok().filter(|_| is_it());
        let text = text.unwrap_or_default();
        let children = text.split_ascii_whitespace();
        let children: BTreeSet<u32> = children.filter_map(|pid| pid.parse().ok()).collect();
        let mut known = KNOWN_THREADS.lock();
        known.retain(|pid| children.contains(pid));
        Self { children }
    }

    pub(super) fn has(&self, pid: u32, process: &Path) -> bool {
        if !self.children.contains(&pid) {
            return false;
        }
        let mut known = KNOWN_THREADS.lock();
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
