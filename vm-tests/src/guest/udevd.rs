//! Stops, kills and starts the guest's systemd-udevd.
//!
//! Tests that share a boot use the guards, which undo the change on drop.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill as send_signal};
use nix::unistd::Pid;

const DAEMON: &str = "/lib/systemd/systemd-udevd";
const CONTROL: &str = "/run/udev/control";
const LIMIT: Duration = Duration::from_secs(60);

/// Starts the daemon and returns when it answers.
pub fn start() {
    super::enter();
    fs::create_dir_all("/run/udev").expect("/run/udev");
    super::run(&[DAEMON, "--daemon"]);
    assert!(answers(), "udevd was started and does not answer");
}

/// Whether the daemon answers a ping on its control socket.
#[must_use]
pub fn answers() -> bool {
    asked(&["control", "--ping", "--timeout=60"])
}

/// How often `udevadm` is tried.
///
/// udevd silently closes a connection whose first message arrives between its accept and its
/// request for the sender's credentials (`udev-ctrl.c`, `udev_ctrl_event_handler`:
/// `SO_PASSCRED`). `udevadm` then fails with "Broken pipe", once in some dozens of calls on a
/// busy machine.
pub const TRIES: usize = 5;

fn asked(arguments: &[&str]) -> bool {
    (0..TRIES).any(|_| {
        let asked = Command::new("udevadm").args(arguments).output();
        asked.is_ok_and(|output| output.status.success())
    })
}

/// The daemon's process, not its workers.
#[must_use]
pub fn pid() -> Option<Pid> {
    processes()
        .into_iter()
        .find(|process| process.parent == 1)
        .map(|process| process.pid)
}

/// Waits until the daemon's queue is empty, for tests that are not about settling.
pub fn settle() {
    super::enter();
    assert!(asked(&["settle", "--timeout=600"]), "udevd is busy or deaf");
}

/// Waits until the daemon's queue is empty, and ends its workers: they stay for some seconds,
/// and a search for the users of a disk looks at each of them.
pub fn settle_and_end_workers() {
    settle();
    super::wait_until("udevd's workers to end", LIMIT, || {
        let mut workers = processes();
        workers.retain(|process| process.parent != 1);
        for worker in &workers {
            let _gone_already = send_signal(worker.pid, Signal::SIGTERM);
        }
        workers.is_empty().then_some(())
    });
}

/// Like [`settle`], for the end of a guard: also returns if there is no udevd or it does not
/// finish.
pub(super) fn settle_if_it_can() {
    let _busy_or_deaf = pid().is_some() && asked(&["settle", "--timeout=60"]);
}

/// Stops the daemon and its workers (SIGSTOP). Returns when they have stopped, or are in the
/// kernel and stop when they leave it.
pub fn stop() {
    super::wait_until("udevd to stand", LIMIT, || {
        // Repeat the signal, for a worker that was started meanwhile.
        signal_all(Signal::SIGSTOP);
        let stands = |process: &Process| matches!(process.state, 'T' | 'D');
        processes().iter().all(stands).then_some(())
    });
}

/// Lets them continue (SIGCONT).
pub fn cont() {
    signal_all(Signal::SIGCONT);
}

/// Kills the daemon and its workers and removes the control socket, so that the guest is a
/// machine without udev.
pub fn kill() {
    super::wait_until("udevd to be gone", LIMIT, || {
        signal_all(Signal::SIGKILL);
        processes().is_empty().then_some(())
    });
    if Path::new(CONTROL).exists() {
        fs::remove_file(CONTROL).expect(CONTROL);
    }
}

/// udevd is stopped while this lives.
#[derive(Debug)]
#[must_use = "udevd goes on as soon as this is dropped"]
pub struct StoppedGuard(());

/// Stops udevd until the guard is dropped.
pub fn stopped() -> StoppedGuard {
    let stopped = StoppedGuard(());
    stop();
    stopped
}

impl Drop for StoppedGuard {
    fn drop(&mut self) {
        cont();
    }
}

/// No rule of udev writes a disk back, while this lives.
#[derive(Debug)]
#[must_use = "udevd writes disks back again as soon as this is dropped"]
pub struct NoWriteBackGuard(());

const NO_WRITE_BACK: &str = "/run/udev/rules.d/61-no-write-back.rules";

/// Keeps udevd from rereading the partitions of a disk that a writer has closed, which writes the
/// disk back on Linux 5.10, and from running `partx` for a path of a map, whose `fsync` does.
/// It holds for disks that are added from now on.
pub fn without_write_back() -> NoWriteBackGuard {
    fs::create_dir_all("/run/udev/rules.d").expect("udev's rules");
    // 60-block.rules watches the disk, and kpartx's 68-del-part-nodes.rules reads the variable.
    let rule = r#"SUBSYSTEM=="block", OPTIONS+="nowatch", ENV{DONT_DEL_PART_NODES}="1""#;
    fs::write(NO_WRITE_BACK, format!("{rule}\n")).expect(NO_WRITE_BACK);
    assert!(asked(&["control", "--reload"]), "udevd is deaf");
    NoWriteBackGuard(())
}

impl Drop for NoWriteBackGuard {
    fn drop(&mut self) {
        let _gone_already = fs::remove_file(NO_WRITE_BACK);
        let _deaf = asked(&["control", "--reload"]);
    }
}

/// There is no udevd while this lives.
#[derive(Debug)]
#[must_use = "udevd is started as soon as this is dropped"]
pub struct AbsentGuard(());

/// Kills udevd, which starts again when the guard is dropped.
pub fn absent() -> AbsentGuard {
    let absent = AbsentGuard(());
    kill();
    absent
}

impl Drop for AbsentGuard {
    fn drop(&mut self) {
        if pid().is_none() {
            start();
        }
    }
}

struct Process {
    pid: Pid,
    parent: i32,
    /// The state letter of `/proc/PID/stat`.
    state: char,
}

/// Workers are named `(udev-worker)`; before systemd 250 they kept the daemon's name.
fn processes() -> Vec<Process> {
    super::entries("/proc")
        .into_iter()
        .filter_map(|entry| {
            let pid: i32 = entry.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (comm, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            let mut fields = rest.split_whitespace();
            let state = fields.next()?.chars().next()?;
            let parent = fields.next()?.parse().ok()?;
            let ours = matches!(comm, "systemd-udevd" | "(udev-worker)") && state != 'Z';
            ours.then_some(Process {
                pid: Pid::from_raw(pid),
                parent,
                state,
            })
        })
        .collect()
}

fn signal_all(signal: Signal) {
    super::enter();
    // The daemon comes first, because it could start another worker meanwhile.
    let mut found = processes();
    found.sort_by_key(|process| process.parent != 1);
    for process in found {
        let _gone_already = send_signal(process.pid, signal);
    }
}
