//! A daemon of the guest, as a child of the test.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// How long it may take to end when it is asked to.
const PATIENCE: Duration = Duration::from_secs(10);

/// A running daemon that stays in the foreground; dropping it ends it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    what: String,
}

impl Daemon {
    /// Starts it; returns when `answers` does.
    #[must_use]
    pub fn start<S: AsRef<OsStr> + std::fmt::Debug>(
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
        super::wait_until(&what, Duration::from_secs(60), || {
            if let Ok(Some(status)) = daemon.child.try_wait() {
                panic!("{what}: {status}");
            }
            answers().then_some(())
        });
        daemon
    }

    /// Holds it and all that it started (SIGSTOP).
    pub fn hold(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets it go on (SIGCONT).
    pub fn go_on(&self) {
        self.signal(Signal::SIGCONT);
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
