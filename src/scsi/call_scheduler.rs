//! Schedules the kernel calls for each host, and records the calls that do not return.

mod call_table;
mod stuck;
#[cfg(test)]
mod tests;

use parking_lot::{Condvar, Mutex, MutexGuard};

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use call_table::{Call, CallTable, Ticket};
pub use stuck::StuckCall;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Hctl;
use crate::kernel::worker::{self, NoteThread};
use crate::kernel::{Devices, Roots};

/// Every blocking call to the kernel's SCSI layer goes through this scheduler.
///
/// The kernel runs the scans and deletes of a host one after the other (`scan_mutex`), so
/// here each host has its own queue. A call that has not returned by its caller's deadline
/// quarantines its host, or only its device if the kernel does not serialise the call.
/// Further calls then fail at once with the reason, until the call returns. So a host
/// blocks at most one thread, and a device at most those that ran at the same time.
#[derive(Debug, Clone)]
pub(crate) struct CallScheduler(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    proc: PathBuf,
    devices: Devices,
    table: Mutex<CallTable>,
    /// Signals that a call has returned or that its caller has given up.
    changed: Condvar,
}

impl CallScheduler {
    /// A scheduler without calls.
    pub(crate) fn new(roots: &Roots) -> Self {
        Self(Arc::new(Shared {
            proc: roots.proc.clone(),
            devices: roots.devices.clone(),
            table: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// The access to the devices that the calls use.
    pub(crate) fn devices(&self) -> &Devices {
        &self.0.devices
    }

    /// Queues a call that the kernel serialises for each host: a scan or a delete. Returns
    /// when the call may run. The calls of one host run in the order of their arrival, without
    /// the open files of the process, as in [`on_device_isolated`](Self::on_device_isolated).
    ///
    /// # Errors
    /// `Quarantined`; `TimedOut` at stage `queue`.
    pub(crate) fn on_host(
        &self,
        hctl: Hctl,
        stage: Stage,
        what: &str,
        deadline: Deadline,
    ) -> Result<CallSlot> {
        let mut table = self.table();
        let slot = self.enter(&mut table, hctl, Kind::OnHost, stage, what);
        loop {
            if let Some(stuck) = table.stuck_call_on_host(hctl.host).cloned() {
                drop(table);
                return Err(refusal(&stuck, stage));
            }
            let Some((first, ahead, waiting)) = table.running(hctl.host) else {
                break;
            };
            if first == slot.ticket {
                break;
            }
            if deadline.has_passed() {
                let what = format!("the calls before it on host {}", hctl.host);
                let seen = format!(
                    "{waiting} waiting behind a call at stage {} that was begun {:.1} s ago ({})",
                    ahead.stage,
                    ahead.begun.elapsed().as_secs_f64(),
                    ahead.what
                );
                drop(table);
                let error = Error::timed_out(Stage::Queue, deadline, &what);
                return Err(error.with_last_seen(seen));
            }
            self.0.changed.wait_for(&mut table, deadline.max_sleep());
        }
        drop(table);
        Ok(slot)
    }

    /// A call that the kernel does not serialise: an open, a command, a flush. It waits for no
    /// other call.
    ///
    /// # Errors
    /// `Quarantined`, for the device or its host.
    pub(crate) fn on_device(&self, hctl: Hctl, stage: Stage, what: &str) -> Result<CallSlot> {
        let mut table = self.table();
        if let Some(stuck) = table.stuck_call_on_device(hctl).cloned() {
            drop(table);
            return Err(refusal(&stuck, stage));
        }
        Ok(self.enter(&mut table, hctl, Kind::OnDevice, stage, what))
    }

    /// As [`on_device`](Self::on_device), but the call runs without the open files of the
    /// process, and must open what it uses. So if the process is killed meanwhile, its file
    /// locks are released. It is for a rescan, which the kernel may hold as long as a scan.
    pub(crate) fn on_device_isolated(
        &self,
        hctl: Hctl,
        stage: Stage,
        what: &str,
    ) -> Result<CallSlot> {
        let mut slot = self.on_device(hctl, stage, what)?;
        slot.isolated = true;
        Ok(slot)
    }

    /// Asks a device for something that its caller can do without. `None` if no answer
    /// comes by `deadline`, if an earlier such call to the device still runs, or if the
    /// device or its host is quarantined. It quarantines nothing, and a device blocks at
    /// most one thread.
    ///
    /// # Errors
    /// Those of `call`; `Cancelled`.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        hctl: Hctl,
        stage: Stage,
        what: &str,
        deadline: Deadline,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Option<T>> {
        let mut table = self.table();
        if table.has_optional_call(hctl) || table.stuck_call_on_device(hctl).is_some() {
            return Ok(None);
        }
        let slot = self.enter(&mut table, hctl, Kind::Optional, stage, what);
        drop(table);
        match slot.run(deadline, String::new, call) {
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// The calls that have not returned.
    pub(crate) fn stuck(&self) -> Vec<StuckCall> {
        let calls: Vec<Call> = self.table().stuck().cloned().collect();
        calls.iter().map(Call::describe).collect()
    }

    /// Whether this process scans or deletes the device, or has queued such a call.
    pub(crate) fn is_at_work_on(&self, hctl: Hctl) -> bool {
        self.table().is_at_work_on(hctl)
    }

    /// Whether a call at `stage` on the device has not returned.
    pub(crate) fn is_stuck_at(&self, hctl: Hctl, stage: Stage) -> bool {
        let table = self.table();
        let mut stuck = table.stuck();
        stuck.any(|call| call.hctl == hctl && call.stage == stage)
    }

    fn table(&self) -> MutexGuard<'_, CallTable> {
        self.0.table.lock()
    }

    fn enter(
        &self,
        table: &mut CallTable,
        hctl: Hctl,
        kind: Kind,
        stage: Stage,
        what: &str,
    ) -> CallSlot {
        let ticket = table.enter(Call {
            hctl,
            on_host: kind == Kind::OnHost,
            is_optional: kind == Kind::Optional,
            stage,
            what: what.to_owned(),
            begun: Instant::now(),
            stack: None,
            stuck: false,
        });
        CallSlot {
            scheduler: self.clone(),
            ticket,
            stage,
            what: what.to_owned(),
            isolated: kind == Kind::OnHost,
        }
    }

    /// Records that the call runs, on this thread.
    fn begin(&self, ticket: Ticket) {
        // The link is `PID/task/TID`, with the numbers of this /proc, which may belong to
        // another namespace.
        let thread = fs::read_link(self.0.proc.join("thread-self")).ok();
        let stack = thread.map(|thread| self.0.proc.join(thread).join("stack"));
        if let Some(call) = self.table().call(ticket) {
            call.begun = Instant::now();
            call.stack = stack;
        }
    }

    fn quarantine(&self, ticket: Ticket) {
        if let Some(call) = self.table().call(ticket) {
            call.stuck = !call.is_optional;
        }
        self.0.changed.notify_all();
    }
}

/// How calls run beside others of their kind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One after the other on a host.
    OnHost,
    /// In parallel.
    OnDevice,
    /// One at a time on a device. Its caller can do without the answer.
    Optional,
}

/// A call's entry in the table. The call's thread owns it while it runs, so the call's
/// return removes the entry even if its caller no longer waits.
#[must_use]
pub(crate) struct CallSlot {
    scheduler: CallScheduler,
    ticket: Ticket,
    stage: Stage,
    what: String,
    /// Whether the call runs without the open files of the process.
    isolated: bool,
}

impl CallSlot {
    /// Runs the call. If it has not returned by `deadline`, it goes on by itself, and its host
    /// is quarantined until it returns, or only its device if the kernel does not serialise
    /// the call. `last_seen` supplies text for the error of a timeout.
    ///
    /// # Errors
    /// Those of `call`; `TimedOut` at the call's stage.
    pub(crate) fn run<T: Send + 'static>(
        self,
        deadline: Deadline,
        last_seen: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.run_with_thread(deadline, last_seen, |_| call())
    }

    /// As [`run`](Self::run), for a call that enters the kernel on another thread: that thread
    /// runs the [`NoteThread`] first.
    pub(crate) fn run_with_thread<T: Send + 'static>(
        mut self,
        deadline: Deadline,
        last_seen: impl FnOnce() -> String,
        call: impl FnOnce(NoteThread) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (scheduler, ticket, stage) = (self.scheduler.clone(), self.ticket, self.stage);
        let given_up = || {
            scheduler.quarantine(ticket);
            last_seen()
        };
        let what = std::mem::take(&mut self.what);
        worker::run(stage, &what, deadline, given_up, move || {
            let slot = self;
            let scheduler = slot.scheduler.clone();
            scheduler.begin(ticket);
            let note_thread: NoteThread = Box::new(move || scheduler.begin(ticket));
            if !slot.isolated {
                return call(note_thread);
            }
            worker::run_with_own_fd_table(stage, move || {
                note_thread();
                call(Box::new(|| {}))
            })
        })
    }
}

impl Drop for CallSlot {
    fn drop(&mut self) {
        let call = self.scheduler.table().leave(self.ticket);
        self.scheduler.0.changed.notify_all();
        if let Some(call) = call.filter(|call| call.stuck) {
            let seconds = call.begun.elapsed().as_secs_f64();
            let Call {
                hctl, stage, what, ..
            } = call;
            tracing::info!(%hctl, %stage, what, seconds, "an abandoned call has returned");
        }
    }
}

fn refusal(stuck: &Call, stage: Stage) -> Error {
    let stuck = stuck.describe();
    Error::new(ErrorKind::Quarantined, stuck.to_string())
        .at(stage)
        .with_last_seen(stuck.place())
}
