//! Counts the system calls of this process and its children, with the kernel's own tracepoint.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use nix::mount::umount;

/// debugfs mounts tracefs here at the first access.
const TRACING: &str = "/sys/kernel/debug/tracing";

/// Counts while it lives. Every system call is slower meanwhile.
#[derive(Debug)]
pub struct SystemCalls(());

impl SystemCalls {
    /// Counts for each existing thread, and for everything that they start.
    #[must_use]
    pub fn of_this_process() -> Self {
        super::enter();
        set("options/event-fork", "1");
        let mut filter = OpenOptions::new()
            .append(true)
            .open(Path::new(TRACING).join("set_event_pid"))
            .expect("set_event_pid");
        for task in super::entries("/proc/self/task") {
            // The kernel refuses a thread that ended meanwhile.
            let _ended = filter.write_all(task.as_bytes());
        }
        set("events/raw_syscalls/sys_enter/enable", "1");
        Self(())
    }

    /// The count since the machine's start; only a difference means something.
    #[must_use]
    pub fn count(&self) -> u64 {
        let buffers = Path::new(TRACING).join("per_cpu");
        let of_one = |cpu: &String| -> u64 {
            let path = buffers.join(cpu).join("stats");
            let stats = fs::read_to_string(path).expect("a buffer's stats");
            // The ring buffer keeps some calls; those that it has overwritten count too.
            let counted = stats.lines().filter_map(|line| {
                let (name, number) = line.split_once(": ")?;
                matches!(name, "entries" | "overrun").then(|| number.trim().parse::<u64>())
            });
            counted.map(|number| number.expect("a number")).sum()
        };
        super::entries(&buffers).iter().map(of_one).sum()
    }
}

impl Drop for SystemCalls {
    fn drop(&mut self) {
        set("events/raw_syscalls/sys_enter/enable", "0");
        set("set_event_pid", "");
        // A test leaves the guest as it found it.
        umount(TRACING).expect("umount of tracefs");
    }
}

fn set(file: &str, value: &str) {
    let path = Path::new(TRACING).join(file);
    fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
