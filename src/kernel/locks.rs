//! The process that holds a lock of `flock(2)`.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use nix::sys::stat::{major, minor};

use super::{Roots, proc_file, sysfs};

/// The process that holds the lock on this file, in words; `None` if none does, or the kernel
/// does not show it: `/proc/locks` shows the processes of our PID namespace.
pub(crate) fn holder(roots: &Roots, file: &File) -> Option<String> {
    let metadata = file.metadata().ok()?;
    let device = metadata.dev();
    let place = format!(
        "{:02x}:{:02x}:{}",
        major(device),
        minor(device),
        metadata.ino()
    );
    let table = proc_file::read_text(&roots.proc.join("locks")).ok()?;
    let pid = pid_in(&table, &place)?;
    let command = sysfs::read(&roots.proc.join(format!("{pid}/comm"))).unwrap_or_default();
    Some(format!("process {pid} ({command})"))
}

/// The process in a line of `/proc/locks` (`lock_get_status` of `fs/locks.c`), such as `1:
/// FLOCK ADVISORY WRITE 812 00:15:77 0 EOF`. The line of a process that waits has `->` before
/// the kind.
fn pid_in(table: &str, place: &str) -> Option<u32> {
    table.lines().find_map(|line| {
        let mut columns = line.split_ascii_whitespace().skip(1);
        let is_flock = columns.next()? == "FLOCK";
        let pid = columns.nth(2)?.parse().ok()?;
        (is_flock && columns.next()? == place).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_that_holds_a_lock_is_found_among_more_locks_than_one_read_returns() {
        const MANY: usize = 200;
        let locked = |_| {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.lock().unwrap();
            file
        };
        let files: Vec<File> = (0..MANY).map(locked).collect();
        let own = format!("process {} (", std::process::id());
        for file in &files {
            let holder = holder(&Roots::default(), file).expect("a holder");
            assert!(holder.starts_with(&own), "{holder}");
        }
    }

    #[test]
    fn a_lock_is_found_by_its_file_among_others_and_a_waiting_process_holds_none() {
        let table = "\
1: POSIX  ADVISORY  WRITE 11 00:15:77 0 EOF
2: FLOCK  ADVISORY  WRITE 812 fd:01:77 0 EOF
3: -> FLOCK  ADVISORY  WRITE 12 00:15:77 0 EOF
4: FLOCK  ADVISORY  WRITE 813 00:15:77 0 EOF
";
        assert_eq!(pid_in(table, "00:15:77"), Some(813));
        assert_eq!(pid_in(table, "00:15:78"), None);
    }
}
