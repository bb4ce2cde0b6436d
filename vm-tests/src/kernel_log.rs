//! The messages that a kernel's log must not have.

/// The line in place of records that the kernel overwrote before the lab could read them.
pub const OVERWRITTEN: &str = "the kernel has overwritten records of its log";

/// A line with one of these reports a defect of the kernel, or of what was asked of it.
const SIGNS: &[&str] = &[
    OVERWRITTEN,
    "WARNING: ",
    "BUG: ",
    // SLUB's message, which continues with the cache's name.
    "] BUG ",
    "Objects remaining in ",
    // RCU's messages.
    "detected stall",
    "detected expedited stalls",
    "hard LOCKUP",
    "kernel BUG at ",
    "Oops: ",
    "Kernel panic",
    "general protection fault",
    // A hung task, which since Linux 7.1 may be "blocked in I/O wait for more than".
    "INFO: task ",
    // lockdep's message, where a kernel does not call it a warning.
    "INFO: possible ",
    // sysfs: a name that exists twice.
    "cannot create duplicate",
    "UBSAN: ",
    "KASAN: ",
    // NBD: two receivers read one connection, or a reply came over another connection than its
    // request.
    "Unexpected reply from different sock",
    "Wrong magic (",
];

/// The lines of a log that report a defect. A warning's own text is between the line that opens
/// its report and the line with its place. The text comes before the place in the result.
pub fn alarms(log: &str) -> impl Iterator<Item = String> {
    let mut text: Option<Vec<&str>> = None;
    log.lines().filter_map(move |line| {
        if line.ends_with(REPORT_BEGINS) {
            text = Some(Vec::new());
        } else if SIGNS.iter().any(|sign| line.contains(sign)) {
            let mut alarm = text.take().unwrap_or_default();
            alarm.push(line);
            return Some(alarm.join("; "));
        } else if let Some(text) = &mut text {
            text.push(line);
        }
        None
    })
}

/// The line that the kernel writes before the text and the place of a warning.
const REPORT_BEGINS: &str = "------------[ cut here ]------------";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defects_differ_from_what_a_kernel_logs_about_a_test() {
        let defects = [
            OVERWRITTEN,
            "[   10.1] WARNING: CPU: 1 PID: 77 at fs/sysfs/group.c:280 sysfs_remove_group+0x76",
            "[   10.1] WARNING: possible circular locking dependency detected",
            "[   10.1] INFO: possible recursive locking detected",
            "[   10.1] INFO: task nbd:12 blocked for more than 120 seconds.",
            "[   10.1] INFO: task nbd:12 blocked in I/O wait for more than 122 seconds.",
            "[   10.1] sysfs: cannot create duplicate filename '/devices/virtual/bdi/43:0'",
            "[   10.1] BUG: kernel NULL pointer dereference, address: 0000000000000008",
            "[   10.1] watchdog: BUG: soft lockup - CPU#0 stuck for 22s!",
            "[   10.1] block nbd0: Wrong magic (0x6f6e6d6c)",
            "[   10.1] block nbd0: Unexpected reply from different sock 1 (expected 0)",
            "[   10.1] BUG kmalloc-64 (Not tainted): Right Redzone overwritten",
            "[   10.1] BUG bio-0 (Not tainted): Poison overwritten",
            "[   10.1] rcu: INFO: rcu_preempt self-detected stall on CPU",
            "[   10.1] rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 1-... }",
            "[   10.1] watchdog: Watchdog detected hard LOCKUP on cpu 1",
            "[   10.1] Oops: 0000 [#1] PREEMPT SMP",
            "[   10.1] Kernel panic - not syncing: Fatal exception",
        ];
        let ordinary = [
            "[    0.0] Kernel command line: panic=-1 oops=panic",
            "[   10.1] sd 2:0:0:1: [sdb] Attached SCSI disk",
            "[   10.1] block nbd0: Connection timed out",
            "[   10.1] I/O error, dev nbd0, sector 0 op 0x0:(READ) flags 0x0",
            "[   10.1] potentially unexpected fatal signal 6.",
            "[   10.1] device-mapper: multipath: 254:0: Failing path 8:16.",
        ];
        for line in defects {
            assert_eq!(alarms(line).collect::<Vec<_>>(), [line]);
        }
        assert_eq!(alarms(&ordinary.join("\n")).count(), 0);
    }

    #[test]
    fn a_warning_is_reported_with_its_text() {
        let log = "\
[    5.1] ------------[ cut here ]------------
[    5.1] workqueue: WQ_MEM_RECLAIM a is flushing !WQ_MEM_RECLAIM b
[    5.1] WARNING: kernel/workqueue.c:3856 at check_flush_dependency.part.0+0xa0/0x110
[    5.2] scsi host0: iSCSI Initiator over TCP/IP
[    5.3] WARNING: CPU: 1 PID: 77 at fs/sysfs/group.c:280 sysfs_remove_group+0x76";
        let told: Vec<String> = alarms(log).collect();
        assert_eq!(told.len(), 2);
        assert!(told[0].starts_with("[    5.1] workqueue: WQ_MEM_RECLAIM a is"));
        assert!(told[0].ends_with("check_flush_dependency.part.0+0xa0/0x110"));
        assert_eq!(told[1], log.lines().last().unwrap());
    }
}
