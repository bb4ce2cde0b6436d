//! Which kernel calls are under way for which host, who waits for whom, and
//! which have not come back.

mod call_table;
mod stuck;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use call_table::{Call, CallTable, Ticket};
pub use stuck::StuckCall;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Hctl;
use crate::kernel::{Devices, Roots, worker};

/// The way of every blocking call to the kernel's SCSI layer.
///
/// The kernel does scans and deletes one after the other for each host
/// (`scan_mutex`), so here each host has a queue, and hosts know nothing of each
/// other. A call that does not come back by its caller's deadline quarantines
/// its host, or its device where the kernel serialises nothing: what comes next
/// is refused at once and told why, until the call returns. So at most one
/// thread is lost to a host, and to a device at most those that were under way
/// together.
#[derive(Debug, Clone)]
pub(crate) struct CallScheduler(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    proc: PathBuf,
    devices: Devices,
    register: Mutex<CallTable>,
    /// A call has returned or is given up.
    changed: Condvar,
}

impl CallScheduler {
    /// With nothing under way.
    pub(crate) fn new(roots: &Roots) -> Self {
        Self(Arc::new(Shared {
            proc: roots.proc.clone(),
            devices: roots.devices.clone(),
            register: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// How the devices are reached that the calls are about.
    pub(crate) fn devices(&self) -> &Devices {
        &self.0.devices
    }

    /// Runs what the kernel serialises for each host: a scan or a delete. Calls
    /// on one host run in the order in which they came.
    ///
    /// A call that is not back by `deadline` goes on by itself, and its host is
    /// quarantined until it returns. `last_seen` is asked for the error of a
    /// timeout. It has none of the open files of the process, and must open what it
    /// uses: where the process is killed meanwhile, its locks are gone.
    ///
    /// # Errors
    /// Those of `call`; `Quarantined`, and nothing was begun; `TimedOut` at
    /// stage `queue`, and nothing was begun, or at `stage`.
    pub(crate) fn on_host<T: Send + 'static>(
        &self,
        hctl: Hctl,
        stage: Stage,
        what: &str,
        deadline: Deadline,
        last_seen: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut register = self.register();
        let slot = self.enter(&mut register, hctl, Kind::OnHost, stage, what);
        loop {
            if let Some(stuck) = register.against_host(hctl.host).cloned() {
                drop(register);
                return Err(refusal(&stuck, stage));
            }
            let Some((first, ahead, waiting)) = register.running(hctl.host) else {
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
                drop(register);
                let error = Error::timed_out(Stage::Queue, deadline, &what);
                return Err(error.with_last_seen(seen));
            }
            (register, _) = self
                .0
                .changed
                .wait_timeout(register, deadline.turn())
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(register);
        slot.run_apart(stage, what, deadline, last_seen, call)
    }

    /// Runs what the kernel does not serialise: an open, a command, a flush. Nothing
    /// waits here for anything else.
    ///
    /// A call that is not back by `deadline` goes on by itself, and its device
    /// is quarantined until it returns. `last_seen` is asked for the error of a
    /// timeout.
    ///
    /// # Errors
    /// Those of `call`; `Quarantined`, for the device or its host, and nothing
    /// was begun; `TimedOut` at `stage`.
    pub(crate) fn on_device<T: Send + 'static>(
        &self,
        hctl: Hctl,
        stage: Stage,
        what: &str,
        deadline: Deadline,
        last_seen: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let slot = self.beside_others(hctl, stage, what)?;
        slot.run(stage, what, deadline, last_seen, call)
    }

    /// As [`on_device`](Self::on_device), with none of the open files of the process,
    /// as [`on_host`](Self::on_host): a rescan, which the kernel may hold as long as a
    /// scan.
    pub(crate) fn on_device_apart<T: Send + 'static>(
        &self,
        hctl: Hctl,
        stage: Stage,
        what: &str,
        deadline: Deadline,
        last_seen: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let slot = self.beside_others(hctl, stage, what)?;
        slot.run_apart(stage, what, deadline, last_seen, call)
    }

    /// Asks a device something that its caller can do without. `None` where no answer
    /// comes by `deadline`, where an earlier question about the device is still under
    /// way, and where the device or its host is quarantined. It quarantines nothing,
    /// and at most one thread is lost to a device.
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
        let mut register = self.register();
        if register.is_asked(hctl) || register.against_device(hctl).is_some() {
            return Ok(None);
        }
        let slot = self.enter(&mut register, hctl, Kind::Question, stage, what);
        drop(register);
        match slot.run(stage, what, deadline, String::new, call) {
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(None),
            answer => answer.map(Some),
        }
    }

    fn beside_others(&self, hctl: Hctl, stage: Stage, what: &str) -> Result<CallSlot> {
        let mut register = self.register();
        if let Some(stuck) = register.against_device(hctl).cloned() {
            drop(register);
            return Err(refusal(&stuck, stage));
        }
        Ok(self.enter(&mut register, hctl, Kind::OnDevice, stage, what))
    }

    /// What has not come back.
    pub(crate) fn stuck(&self) -> Vec<StuckCall> {
        let calls: Vec<Call> = self.register().stuck().cloned().collect();
        calls.iter().map(Call::describe).collect()
    }

    /// Whether this process scans or deletes the device, or is about to.
    pub(crate) fn is_at_work_on(&self, hctl: Hctl) -> bool {
        self.register().is_at_work_on(hctl)
    }

    /// Whether a call at `stage` on the device has not come back.
    pub(crate) fn is_stuck_at(&self, hctl: Hctl, stage: Stage) -> bool {
        let register = self.register();
        let mut stuck = register.stuck();
        stuck.any(|call| call.hctl == hctl && call.stage == stage)
    }

    fn register(&self) -> MutexGuard<'_, CallTable> {
        // No code under this lock can leave it half changed.
        self.0
            .register
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(
        &self,
        register: &mut CallTable,
        hctl: Hctl,
        kind: Kind,
        stage: Stage,
        what: &str,
    ) -> CallSlot {
        let ticket = register.enter(Call {
            hctl,
            on_host: kind == Kind::OnHost,
            is_question: kind == Kind::Question,
            stage,
            what: what.to_owned(),
            begun: Instant::now(),
            stack: None,
            stuck: false,
        });
        CallSlot {
            scheduler: self.clone(),
            ticket,
        }
    }

    /// Notes that the call runs, on this thread.
    fn begin(&self, ticket: Ticket) {
        // As this /proc counts processes, which may be that of another
        // namespace: `PID/task/TID`.
        let thread = fs::read_link(self.0.proc.join("thread-self")).ok();
        let stack = thread.map(|thread| self.0.proc.join(thread).join("stack"));
        if let Some(call) = self.register().call(ticket) {
            call.begun = Instant::now();
            call.stack = stack;
        }
    }

    fn quarantine(&self, ticket: Ticket) {
        if let Some(call) = self.register().call(ticket) {
            call.stuck = !call.is_question;
        }
        self.0.changed.notify_all();
    }
}

/// How calls of this kind are kept apart.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One after the other on a host.
    OnHost,
    /// Beside each other.
    OnDevice,
    /// One at a time on a device, and its caller can do without.
    Question,
}

/// A place in a lane. The call's thread has it while it runs, so that its return
/// frees the place whether anybody waits for it or not.
struct CallSlot {
    scheduler: CallScheduler,
    ticket: Ticket,
}

impl CallSlot {
    fn run<T: Send + 'static>(
        self,
        stage: Stage,
        what: &str,
        deadline: Deadline,
        last_seen: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (scheduler, ticket) = (self.scheduler.clone(), self.ticket);
        let given_up = || {
            scheduler.quarantine(ticket);
            last_seen()
        };
        worker::run(stage, what, deadline, given_up, move || {
            let slot = self;
            slot.scheduler.begin(slot.ticket);
            call()
        })
    }

    fn run_apart<T: Send + 'static>(
        self,
        stage: Stage,
        what: &str,
        deadline: Deadline,
        last_seen: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (scheduler, ticket) = (self.scheduler.clone(), self.ticket);
        self.run(stage, what, deadline, last_seen, move || {
            worker::apart(stage, move || {
                // The one that the kernel has.
                scheduler.begin(ticket);
                call()
            })
        })
    }
}

impl Drop for CallSlot {
    fn drop(&mut self) {
        let call = self.scheduler.register().leave(self.ticket);
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
