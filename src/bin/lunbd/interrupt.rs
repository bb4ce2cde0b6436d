//! SIGINT and SIGTERM cancel the call that is under way, which then rolls back.

use std::fs;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use lunbd::{Cancel, Error, ErrorKind, Result};
use nix::sys::signal::{SigSet, Signal};

/// The first signal that was received; 0 for none.
static CAME: AtomicU8 = AtomicU8::new(0);

/// Makes the signals cancel the returned `Cancel`, from now on. A second signal ends the
/// process at once. Threads that run already are not covered, so this call comes before
/// the engine's start.
pub(crate) fn cancels() -> Result<Cancel> {
    let cancel = Cancel::new();
    let cancelled = cancel.clone();
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        if !is_ignored(signal) {
            signals.add(signal);
        }
    }
    let failed = |why: &dyn std::fmt::Display| {
        let message = format!("cannot wait for signals: {why}");
        Error::new(ErrorKind::Io, message)
    };
    signals.thread_block().map_err(|errno| failed(&errno))?;
    let wait = move || {
        while let Ok(signal) = signals.wait() {
            // No signal number is above 64.
            let number = u8::try_from(signal as i32).unwrap_or(u8::MAX);
            if CAME.swap(number, Ordering::Relaxed) != 0 {
                std::process::exit(i32::from(code_of(number)));
            }
            cancelled.cancel();
        }
    };
    let thread = thread::Builder::new().name("lunbd-signals".to_owned());
    thread.spawn(wait).map_err(|error| failed(&error))?;
    Ok(cancel)
}

/// The exit code of a call that failed after a signal, by the convention of shells.
pub(crate) fn exit_code() -> Option<u8> {
    match CAME.load(Ordering::Relaxed) {
        0 => None,
        number => Some(code_of(number)),
    }
}

fn code_of(number: u8) -> u8 {
    number.saturating_add(128)
}

/// Whether the process ignores the signal, as after `nohup` and in a shell's background
/// jobs.
fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.unwrap_or(0) >> (signal as i32 - 1) & 1 == 1
}
