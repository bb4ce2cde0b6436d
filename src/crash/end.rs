//! Ends or stops the process at a crash point, as the environment variables say.

use std::collections::BTreeMap;
use std::env;
use std::fs::OpenOptions;
use std::io::Write;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::Mutex;

use super::Point;

/// Names a file. Each point that the process passes adds a line to it.
const LOG: &str = "LUNBD_CRASH_LOG";

/// Names the point and the pass at which the process ends: `scsi.scanned:1`.
const AT: &str = "LUNBD_CRASH_AT";

/// If this is set, the process stops at the point and does not end. The test then
/// resets the machine.
const STOP: &str = "LUNBD_CRASH_STOP";

impl Point {
    /// Counts and logs the pass, and ends or stops the process if this is the point.
    pub(crate) fn reach(self) {
        static PASSES: Mutex<BTreeMap<Point, u32>> = Mutex::new(BTreeMap::new());
        let mut passes = PASSES.lock();
        let pass = passes.entry(self).or_default();
        *pass += 1;
        let here = format!("{}:{pass}", self.as_str());
        if let Some(path) = env::var_os(LOG) {
            let log = OpenOptions::new().create(true).append(true).open(path);
            let _the_sweep_misses_it = log.and_then(|mut log| writeln!(log, "{here}"));
        }
        if env::var(AT).is_ok_and(|at| at == here) {
            if env::var_os(STOP).is_some() {
                // The kernel may deliver the signal to another thread first.
                let _stops_soon = kill(Pid::this(), Signal::SIGSTOP);
                loop {
                    std::thread::park();
                }
            }
            // After this, no thread runs on in user mode.
            let _none_returns = kill(Pid::this(), Signal::SIGKILL);
        }
    }
}
