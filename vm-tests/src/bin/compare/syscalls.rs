//! How many system calls this process and its children make, by the kernel's own
//! tracepoint.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use vm_tests::guest;

/// The guest's debugfs mounts it on the first look.
const TRACING: &str = "/sys/kernel/debug/tracing";

/// Counts while it lives; every call costs more then.
pub(crate) struct Syscalls(());

impl Syscalls {
    /// Of each thread that is there, and of what they start.
    pub(crate) fn of_this_process() -> Self {
        set("options/event-fork", "1");
        let mut filter = OpenOptions::new()
            .append(true)
            .open(Path::new(TRACING).join("set_event_pid"))
            .expect("set_event_pid");
        for task in guest::entries("/proc/self/task") {
            // One that ended meanwhile is refused.
            let _ended = filter.write_all(task.as_bytes());
        }
        set("events/raw_syscalls/sys_enter/enable", "1");
        Self(())
    }

    /// Since the machine's start; only a difference says something.
    #[expect(clippy::unused_self, reason = "nothing counts without it")]
    pub(crate) fn count(&self) -> u64 {
        let buffers = Path::new(TRACING).join("per_cpu");
        let of_one = |cpu: &String| -> u64 {
            let path = buffers.join(cpu).join("stats");
            let stats = fs::read_to_string(path).expect("a buffer's stats");
            // The ring keeps some; what it has overwritten happened as well.
            let counted = stats.lines().filter_map(|line| {
                let (name, number) = line.split_once(": ")?;
                matches!(name, "entries" | "overrun").then(|| number.trim().parse::<u64>())
            });
            counted.map(|number| number.expect("a number")).sum()
        };
        guest::entries(&buffers).iter().map(of_one).sum()
    }
}

impl Drop for Syscalls {
    fn drop(&mut self) {
        set("events/raw_syscalls/sys_enter/enable", "0");
        set("set_event_pid", "");
    }
}

fn set(file: &str, value: &str) {
    let path = Path::new(TRACING).join(file);
    fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
