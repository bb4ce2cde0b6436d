//! The threads of calls. A thread whose call has returned waits a moment for another:
//! most calls are short, and the start and the end of a thread take twenty system
//! calls.

use std::cell::Cell;
use std::ffi::CString;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

use nix::sys::prctl;
use nix::sys::signal::SigSet;
use parking_lot::Mutex;

pub(super) type Call = Box<dyn FnOnce() + Send>;

/// Which open files a thread has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FdTable {
    /// The open files of the process.
    Shared,
    /// Its own, initially none.
    Own,
}

/// How long a thread waits for another call. No pause within an attach is longer.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The most threads of each kind that wait.
const MAX_IDLE: usize = 8;

/// The waiting threads. The thread that came last is taken first.
static WAITING: Mutex<Waiting> = Mutex::new(Waiting {
    next: 0,
    threads: Vec::new(),
});

struct Waiting {
    next: u64,
    threads: Vec<Thread>,
}

struct Thread {
    number: u64,
    fd_table: FdTable,
    calls: SyncSender<Call>,
}

thread_local! {
    static FD_TABLE: Cell<FdTable> = const { Cell::new(FdTable::Shared) };
}

/// Which files the calling thread has.
pub(super) fn fd_table() -> FdTable {
    FD_TABLE.get()
}

/// Records what the calling thread has done to its files. A thread cannot go back.
pub(super) fn set_fd_table(files: FdTable) {
    FD_TABLE.set(files);
}

/// Runs `call` on a thread that has this name meanwhile. A waiting thread of the kind
/// `Own` has [left](set_fd_table) the files of the process in an earlier call. If no
/// such thread waits, `call` must leave them itself.
///
/// # Errors
/// Fails if no thread waits and none can be started.
pub(super) fn run(name: String, fd_table: FdTable, call: Call) -> io::Result<()> {
    let call: Call = Box::new(move || {
        if let Ok(name) = CString::new(name) {
            let _only_for_people = prctl::set_name(&name);
        }
        call();
    });
    let call = match take(fd_table) {
        Some(thread) => match thread.calls.send(call) {
            Ok(()) => return Ok(()),
            Err(mpsc::SendError(call)) => call,
        },
        None => call,
    };
    thread::Builder::new()
        .spawn(move || run_all(call))
        .map(drop)
}

fn take(fd_table: FdTable) -> Option<Thread> {
    let threads = &mut WAITING.lock().threads;
    let last = threads
        .iter()
        .rposition(|thread| thread.fd_table == fd_table)?;
    Some(threads.remove(last))
}

/// Runs a call, and those that come while the thread waits. The thread takes no
/// signal: those of the process are for the caller's own threads. A write past a limit
/// (`SIGXFSZ`) is an error of the call and does not end the process.
fn run_all(first: Call) {
    let _stays_as_it_was = SigSet::all().thread_block();
    let mut call = first;
    loop {
        call();
        let Some((number, calls)) = wait() else {
            return;
        };
        call = match calls.recv_timeout(IDLE_TIMEOUT) {
            Ok(next) => next,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let mut waiting = WAITING.lock();
                let before = waiting.threads.len();
                waiting.threads.retain(|thread| thread.number != number);
                let is_taken = waiting.threads.len() == before;
                drop(waiting);
                // Another thread has taken this one, and sends the call.
                match is_taken.then(|| calls.recv()) {
                    Some(Ok(next)) => next,
                    _ => return,
                }
            }
        };
    }
}

/// Adds the calling thread to those that wait. `None` if enough wait.
fn wait() -> Option<(u64, Receiver<Call>)> {
    let files = fd_table();
    let mut waiting = WAITING.lock();
    let alike = waiting.threads.iter().filter(|it| it.fd_table == files);
    if alike.count() >= MAX_IDLE {
        return None;
    }
    // The channel holds one call, so the thread that sends it never waits.
    let (sender, calls) = mpsc::sync_channel(1);
    let number = waiting.next;
    waiting.next += 1;
    waiting.threads.push(Thread {
        number,
        fd_table: files,
        calls: sender,
    });
    Some((number, calls))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn on_a_thread<T: Send + 'static>(
        files: FdTable,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let (done, result) = mpsc::sync_channel(1);
        let call = Box::new(move || {
            let _ = done.send(call());
        });
        run("lunbd-test".to_owned(), files, call).unwrap();
        result.recv_timeout(LIMIT).unwrap()
    }

    #[test]
    fn successive_calls_share_threads_and_concurrent_calls_do_not() {
        let own = nix::unistd::gettid;
        let next = move || on_a_thread(FdTable::Shared, own);
        // Other tests take threads too.
        let limit = Instant::now() + LIMIT;
        while next() != next() {
            assert!(Instant::now() < limit, "no thread is taken twice");
        }
        let (release, hang) = mpsc::channel::<()>();
        let (begun, thread) = mpsc::channel();
        let call = Box::new(move || {
            begun.send(own()).unwrap();
            let _ = hang.recv();
        });
        run("lunbd-test".to_owned(), FdTable::Shared, call).unwrap();
        let thread = thread.recv_timeout(LIMIT).unwrap();
        for _ in 0..20 {
            assert_ne!(next(), thread);
        }
        drop(release);
    }

    #[test]
    fn a_call_never_runs_on_a_thread_that_has_other_files_than_it_needs() {
        for _ in 0..5 {
            // Leave the files in fact, because calls of other tests may take the thread.
            on_a_thread(FdTable::Own, || {
                lunbd_sys::files::unshare_fd_table().unwrap();
                set_fd_table(FdTable::Own);
            });
            let found = on_a_thread(FdTable::Shared, fd_table);
            assert_eq!(found, FdTable::Shared);
        }
        let found = on_a_thread(FdTable::Own, fd_table);
        assert!(matches!(found, FdTable::Own | FdTable::Shared));
    }

    #[test]
    fn a_call_that_panics_ends_its_thread_and_no_other_call() {
        let panics = Box::new(|| panic!("on purpose"));
        run("lunbd-test".to_owned(), FdTable::Shared, panics).unwrap();
        for number in 0..20 {
            assert_eq!(on_a_thread(FdTable::Shared, move || number), number);
        }
    }
}
