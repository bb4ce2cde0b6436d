//! Which of the steps that wait for a worker is next.

use std::collections::{BTreeMap, VecDeque};

use super::jobs::Job;
use super::workers::Room;
use crate::id::Source;

/// A queue of steps, in the order in which steps are taken from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Priority {
    /// What goes. No attach is before it.
    Leaving,
    /// It failed before, and what it failed for may be over.
    Called,
    /// It has not failed.
    Fresh,
    /// It goes, and failed before.
    LeavingAgain,
    /// It failed before, and it is time for its next try.
    Again,
}

#[derive(Default)]
pub(super) struct Queues {
    lanes: BTreeMap<Priority, VecDeque<Job>>,
}

impl Queues {
    /// Those that waited are thought over: these take their place. What was due first is
    /// taken first.
    pub(super) fn fill(&mut self, mut jobs: Vec<Job>) {
        self.lanes.clear();
        jobs.sort_by_key(|job| job.due);
        for job in jobs {
            self.lanes.entry(job.lane).or_default().push_back(job);
        }
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = &Job> {
        self.lanes.values().flatten()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.values().all(VecDeque::is_empty)
    }

    /// Whether one of them may begin now.
    pub(super) fn has_one(&self, room: &Room) -> bool {
        self.waiting()
            .any(|job| room.is_for(job.lane, job.place.as_deref()))
    }

    pub(super) fn take(&mut self, room: &Room) -> Option<Job> {
        self.lanes.values_mut().find_map(|lane| {
            let is_next = |job: &Job| room.is_for(job.lane, job.place.as_deref());
            let at = lane.iter().position(is_next)?;
            lane.remove(at)
        })
    }
}

/// Which server, target or host a source leads to: where one of its volumes hangs the
/// others may hang as well.
pub(super) fn place_of(source: &Source) -> String {
    match source {
        Source::Nbd(uri) => format!("{:?}", uri.server()),
        Source::Iscsi(uri) => uri.target().to_string().to_lowercase(),
        Source::Fc(uri) => format!("{:?}", uri.ports()),
        Source::Scsi(hctl) => format!("host{}", hctl.host),
    }
}

#[cfg(test)]
mod tests;
