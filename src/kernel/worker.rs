//! Kernel calls that may block for minutes, each on a thread of its own.

#[cfg(test)]
pub(crate) mod events_elsewhere;
mod idle;

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use idle::FdTable;

use super::threads;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};

/// How long a cancelled call gets to return. The rollback can undo only a call that has
/// returned, and almost every call returns sooner.
const CANCEL_GRACE: Duration = Duration::from_secs(3);

/// Runs `call` on a thread of its own and waits for it until `deadline`.
///
/// A call in the kernel cannot be cancelled. After a timeout, and three seconds after a
/// cancellation, its thread stays until the kernel returns, and its result is dropped.
/// The error of a timeout contains what `last_seen` returns.
///
/// # Errors
/// Those of `call`, with `stage`; `TimedOut`, also if the deadline had passed before the
/// call began.
pub(crate) fn run<T: Send + 'static>(
    stage: Stage,
    what: &str,
    deadline: Deadline,
    last_seen: impl FnOnce() -> String,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let timed_out = || Error::timed_out(stage, deadline, what);
    if deadline.has_passed() {
        return Err(timed_out().with_last_seen("not begun: the deadline had passed"));
    }
    let pending = start(stage, call)?;
    let mut result = pending.wait(deadline);
    if result.is_none() && deadline.is_cancelled() {
        result = pending.wait(deadline.despite_cancel().at_most(CANCEL_GRACE));
    }
    if let Some(result) = result {
        return result;
    }
    tracing::warn!(%stage, what, "the kernel has not returned; its thread stays");
    Err(timed_out().with_last_seen(last_seen()))
}

/// Notes the thread that runs it as the one that is in the kernel for a call, so that the report
/// of a stuck call shows the stack of that thread.
pub(crate) type NoteThread = Box<dyn FnOnce() + Send>;

/// A call that has begun.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    stage: Stage,
    result: Receiver<(Result<T>, Vec<Event>)>,
}

/// An event of a call, which the thread that takes the call's result emits.
type Event = Box<dyn FnOnce() + Send>;

thread_local! {
    /// The events of the call that this thread runs.
    static EVENTS: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
}

/// Emits an event. If this thread has left the open files of the process, the thread that takes
/// the call's result emits it: a subscriber may write to one of those files. The event is lost if
/// no thread takes the result.
pub(crate) fn emit(event: impl FnOnce() + Send + 'static) {
    match idle::fd_table() {
        FdTable::Shared => event(),
        FdTable::Own => EVENTS.with_borrow_mut(|events| events.push(Box::new(event))),
    }
}

/// Starts `call` on a thread that does nothing else until `call` returns.
pub(crate) fn start<T: Send + 'static>(
    stage: Stage,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Pending<T>> {
    let span = tracing::Span::current();
    start_with(FdTable::Shared, stage, move || span.in_scope(call))
}

fn start_with<T: Send + 'static>(
    fd_table: FdTable,
    stage: Stage,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Pending<T>> {
    let (done, result) = mpsc::sync_channel(1);
    let call = move || {
        let result = call();
        // No caller waits any more after a timeout.
        let _ = done.send((result, EVENTS.take()));
    };
    let name = format!("lunbd-{stage}");
    idle::run(name, fd_table, Box::new(call))
        .map_err(|error| threads::not_started(&error).at(stage))?;
    Ok(Pending { stage, result })
}

fn died(stage: Stage) -> Error {
    Error::new(ErrorKind::Io, "the thread of a kernel call died").at(stage)
}

/// Like [`start`], for a call that the kernel may hold for minutes after the process was
/// killed, such as a read of a device whose connection is dead. The process ends only
/// when the call returns, and its locks would stay held until then. So the thread does
/// not share the open files of the process, and `call` must open what it uses itself. It
/// enters no span, and [`emit`]s its events.
pub(crate) fn start_with_own_fd_table<T: Send + 'static>(
    stage: Stage,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Pending<T>> {
    start_with(FdTable::Own, stage, move || {
        unshare_fds();
        call()
    })
}

fn unshare_fds() {
    if idle::fd_table() == FdTable::Own {
        return;
    }
    match lunbd_sys::files::unshare_fd_table() {
        Ok(()) => idle::set_fd_table(FdTable::Own),
        Err(errno) => tracing::debug!(%errno, "the thread shares the files of the process"),
    }
}

/// Runs `call` like [`start_with_own_fd_table`], for a thread that needs the open files of the
/// process afterwards. The calling thread waits for the call, and can be killed
/// meanwhile.
pub(crate) fn run_with_own_fd_table<T: Send + 'static>(
    stage: Stage,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    start_with_own_fd_table(stage, call)?.wait_without_limit()
}

/// Runs `call` like [`run_with_own_fd_table`], on a thread that also has `file`. The process has
/// `file` open until the call has ended.
///
/// If the process is killed meanwhile, its other files are closed and its locks released,
/// while the kernel still holds the thread and `file`.
pub(crate) fn run_with_own_fd_table_and<T: Send + 'static>(
    stage: Stage,
    file: Arc<File>,
    call: impl FnOnce(&File) -> Result<T> + Send + 'static,
) -> Result<T> {
    let shared = Arc::clone(&file);
    let call = move || match lunbd_sys::files::unshare_fd_table_keeping(shared.as_fd()) {
        Ok(own) => {
            idle::set_fd_table(FdTable::Own);
            // This closes nothing: the caller has the file until the call has ended.
            drop(shared);
            call(&File::from(own))
        }
        Err(errno) => {
            tracing::debug!(%errno, "the thread shares the files of the process");
            call(&shared)
        }
    };
    // The call must begin on a thread that has `file`.
    let result = start_with(FdTable::Shared, stage, call)?.wait_without_limit();
    drop(file);
    result
}

impl<T> Pending<T> {
    /// The result of the call, with its stage; `None` if it has not returned by
    /// `deadline`.
    pub(crate) fn wait(&self, deadline: Deadline) -> Option<Result<T>> {
        let stage = self.stage;
        loop {
            match self.result.recv_timeout(deadline.max_sleep()) {
                Ok(ended) => return Some(result_of(ended).map_err(|error| error.at(stage))),
                Err(RecvTimeoutError::Timeout) if !deadline.has_passed() => {}
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => return Some(Err(died(stage))),
            }
        }
    }

    /// The result of the call. **Blocks** until the kernel returns.
    pub(crate) fn wait_without_limit(&self) -> Result<T> {
        let ended = self.result.recv();
        ended.map_or_else(|_| Err(died(self.stage)), result_of)
    }
}

fn result_of<T>((result, events): (Result<T>, Vec<Event>)) -> Result<T> {
    events.into_iter().for_each(emit);
    result
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Instant;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;
    use crate::deadline::Cancel;

    #[test]
    fn a_call_that_returns_soon_after_it_was_cancelled_is_not_lost() {
        let cancel = Cancel::new();
        let deadline = Deadline::after(Duration::from_secs(600)).cancelled_by(&cancel);
        let call = move || {
            cancel.cancel();
            Ok(7)
        };
        let returned = run(Stage::Scan, "the write", deadline, String::new, call);
        assert_eq!(returned.unwrap(), 7);
    }

    #[test]
    fn a_call_that_is_cancelled_and_hangs_does_not_take_the_rest_of_the_deadline() {
        let (release, hang) = mpsc::channel::<()>();
        let cancel = Cancel::new();
        let deadline = Deadline::after(Duration::from_secs(600)).cancelled_by(&cancel);
        let began = Instant::now();
        let call = move || {
            cancel.cancel();
            Ok(hang.recv().is_ok())
        };
        let error = run(Stage::Scan, "the write", deadline, String::new, call).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert!(began.elapsed() < Duration::from_secs(60));
        drop(release);
    }

    #[test]
    fn a_call_that_hangs_does_not_hang_the_caller() {
        let (release, hang) = mpsc::channel::<()>();
        let deadline = Deadline::after(Duration::from_millis(20));
        let error = run(
            Stage::Delete,
            "the write",
            deadline,
            || "state=blocked".to_owned(),
            move || Ok(hang.recv().is_ok()),
        )
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.stage(), Some(Stage::Delete));
        assert_eq!(error.last_seen(), Some("state=blocked"));
        drop(release);
    }

    #[test]
    fn a_file_that_a_thread_apart_has_is_closed_when_its_call_has_ended() {
        let pipe = io::pipe().unwrap();
        let file = Arc::new(File::from(std::os::fd::OwnedFd::from(pipe.1)));
        let call = |file: &File| {
            let number = std::os::fd::AsRawFd::as_raw_fd(file);
            let own = std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
            let link = std::fs::read_link(format!("/proc/self/fd/{number}"));
            Ok((own, link.is_ok()))
        };
        let (own, the_process_has_it) =
            run_with_own_fd_table_and(Stage::Flush, Arc::clone(&file), call).unwrap();
        // The three standard streams, this file, and the directory that is read.
        assert!(own <= 5, "{own}");
        assert!(the_process_has_it);
        drop(file);
        let mut end = [PollFd::new(pipe.0.as_fd(), PollFlags::POLLIN)];
        let ready = poll(&mut end, PollTimeout::from(20_000_u16)).unwrap();
        assert_eq!(ready, 1, "somebody has it still");
    }

    #[test]
    fn the_events_of_a_thread_with_its_own_files_are_emitted_by_the_thread_that_takes_the_result() {
        assert_eq!(events_elsewhere::seen(), [""; 0]);
        let file = Arc::new(tempfile::tempfile().unwrap());
        for _ in 0..20 {
            let _span = tracing::info_span!("call").entered();
            let (told, tables) = mpsc::channel();
            let call = move || {
                emit(move || {
                    tracing::info!("an event of the call");
                    told.send(idle::fd_table()).unwrap();
                });
                Ok(())
            };
            run_with_own_fd_table(Stage::Flush, call.clone()).unwrap();
            let with_file = run_with_own_fd_table_and(Stage::Flush, Arc::clone(&file), |_| call());
            with_file.unwrap();
            assert_eq!(tables.iter().collect::<Vec<_>>(), [FdTable::Shared; 2]);
        }
        assert_eq!(events_elsewhere::seen(), [""; 0]);
    }

    #[test]
    fn nothing_is_begun_after_the_deadline() {
        let (began, seen) = mpsc::channel();
        let result = run(
            Stage::Scan,
            "the write",
            Deadline::after(Duration::ZERO),
            String::new,
            move || Ok(began.send(()).is_ok()),
        );
        assert_eq!(result.unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(seen.recv().is_err());
    }
}
