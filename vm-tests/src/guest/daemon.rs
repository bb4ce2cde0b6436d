//! A daemon of the guest, as a child of the test.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// How long a daemon may take to answer, or to stop.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a daemon may take to end when it is asked to. Some never receive the request.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running daemon that stays in the foreground; dropping it ends it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    what: String,
}

impl Daemon {
    /// Starts the daemon; returns when `answers` does.
    #[must_use]
    pub fn start<S: AsRef<OsStr> + fmt::Debug>(
        command: &[S],
        mut answers: impl FnMut() -> bool,
    ) -> Self {
        super::enter();
        let what = format!("{command:?}");
        let child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut daemon = Self { child, what };
        let what = format!("{} to answer", daemon.what);
        super::wait_until(&what, LIMIT, || {
            if let Ok(Some(status)) = daemon.child.try_wait() {
                panic!("{what}: {status}");
            }
            answers().then_some(())
        });
        daemon
    }

    /// Stops the daemon and everything that it started (SIGSTOP). Returns when each of its own
    /// threads has stopped, or is in the kernel and stops when it leaves it.
    pub fn hold(&self) {
        self.signal(Signal::SIGSTOP);
        super::wait_until(&format!("{} to stand", self.what), LIMIT, || {
            stands(self.child.id()).then_some(())
        });
    }

    /// Lets it continue (SIGCONT).
    pub fn go_on(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills the daemon and everything that it started, at once (SIGKILL). None of them is left
    /// when this returns.
    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        let _status = self.child.wait();
        let group = i32::try_from(self.child.id()).expect("a pid");
        super::wait_until(&format!("{} to be gone", self.what), LIMIT, || {
            killpg(Pid::from_raw(group), None).err()
        });
    }

    fn signal(&self, signal: Signal) {
        if let Ok(group) = i32::try_from(self.child.id()) {
            let _ended_already = killpg(Pid::from_raw(group), signal);
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.try_wait().ok().flatten().is_some() {
            return;
        }
        self.signal(Signal::SIGCONT);
        self.signal(Signal::SIGTERM);
        let start = Instant::now();
        while self.child.try_wait().ok().flatten().is_none() {
            if start.elapsed() > PATIENCE {
                eprintln!("{} does not end when it is asked to", self.what);
                self.signal(Signal::SIGKILL);
                let _status = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Whether no thread of the process runs or is about to run.
pub(super) fn stands(pid: impl fmt::Display) -> bool {
    let tasks = format!("/proc/{pid}/task");
    let stands = |task: &String| {
        let stat = fs::read_to_string(format!("{tasks}/{task}/stat"));
        // The file is `TID (NAME) STATE ...`. A thread that has ended counts as stopped.
        let state = stat.ok().and_then(|stat| {
            let (_, rest) = stat.rsplit_once(") ")?;
            rest.chars().next()
        });
        !matches!(state, Some('R' | 'S'))
    };
    super::entries(&tasks).iter().all(stands)
}
