//! The calls that run and the calls that wait for one of them.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Instant;

use super::stuck::{StuckCall, read_stack};
use crate::error::Stage;
use crate::id::{Hctl, HostNo};

/// One call, from the moment at which it queues.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) hctl: Hctl,
    pub(super) on_host: bool,
    pub(super) stage: Stage,
    pub(super) what: String,
    pub(super) begun: Instant,
    /// The `stack` file of the call's thread, once it runs.
    pub(super) stack: Option<PathBuf>,
    /// Whether its caller can do without its answer.
    pub(super) is_optional: bool,
    /// Whether its caller has given up, for a call that is not optional.
    pub(super) stuck: bool,
}

/// A call's key; later calls have larger keys.
pub(super) type Ticket = u64;

/// All calls that run or wait.
#[derive(Debug, Default)]
pub(super) struct CallTable {
    next: Ticket,
    calls: BTreeMap<Ticket, Call>,
    /// The calls of each host in the order of their arrival; the first runs.
    queues: BTreeMap<HostNo, VecDeque<Ticket>>,
}

impl CallTable {
    pub(super) fn enter(&mut self, call: Call) -> Ticket {
        let ticket = self.next;
        self.next += 1;
        if call.on_host {
            let queue = self.queues.entry(call.hctl.host).or_default();
            queue.push_back(ticket);
        }
        self.calls.insert(ticket, call);
        ticket
    }

    pub(super) fn leave(&mut self, ticket: Ticket) -> Option<Call> {
        let call = self.calls.remove(&ticket)?;
        if call.on_host
            && let Some(queue) = self.queues.get_mut(&call.hctl.host)
        {
            queue.retain(|other| *other != ticket);
            if queue.is_empty() {
                self.queues.remove(&call.hctl.host);
            }
        }
        Some(call)
    }

    /// Whether the table is empty.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.queues.is_empty()
    }

    pub(super) fn call(&mut self, ticket: Ticket) -> Option<&mut Call> {
        self.calls.get_mut(&ticket)
    }

    /// The call that runs on the host, and how many wait behind it.
    pub(super) fn running(&self, host: HostNo) -> Option<(Ticket, &Call, usize)> {
        let queue = self.queues.get(&host)?;
        let first = *queue.front()?;
        Some((first, self.calls.get(&first)?, queue.len() - 1))
    }

    /// The stuck call for which a call on the host is refused.
    pub(super) fn stuck_call_on_host(&self, host: HostNo) -> Option<&Call> {
        let (_, call, _) = self.running(host)?;
        call.stuck.then_some(call)
    }

    /// The stuck call for which a call on the device is refused.
    pub(super) fn stuck_call_on_device(&self, hctl: Hctl) -> Option<&Call> {
        let of_device = |call: &&Call| !call.on_host && call.hctl == hctl;
        self.stuck()
            .find(of_device)
            .or_else(|| self.stuck_call_on_host(hctl.host))
    }

    /// Whether an optional call to the device runs.
    pub(super) fn has_optional_call(&self, hctl: Hctl) -> bool {
        let mut calls = self.calls.values();
        calls.any(|call| call.hctl == hctl && call.is_optional)
    }

    pub(super) fn is_at_work_on(&self, hctl: Hctl) -> bool {
        let mut calls = self.calls.values();
        calls.any(|call| call.hctl == hctl && call.on_host)
    }

    pub(super) fn stuck(&self) -> impl Iterator<Item = &Call> {
        self.calls.values().filter(|call| call.stuck)
    }
}

impl Call {
    /// Reads the thread's stack, so do not call it under the lock.
    pub(super) fn describe(&self) -> StuckCall {
        StuckCall {
            host: self.hctl.host,
            hctl: self.hctl,
            whole_host: self.on_host,
            stage: self.stage,
            what: self.what.clone(),
            age: self.begun.elapsed(),
            stack: self.stack.as_deref().map(read_stack).unwrap_or_default(),
        }
    }
}
