//! What happened, for whoever follows.

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::plan::StepKind;
use crate::deadline::Deadline;
use crate::engine::SessionRecoveryReport;
use crate::error::Error;
use crate::id::VolumeId;

/// What happened to a volume.
#[derive(Debug, Clone, serde::Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// It is attached, and what was handed out was read back.
    Attached {
        /// The volume.
        volume: VolumeId,
        /// The device.
        node: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// It has another size, which was read back: as large as it is wanted.
    Resized {
        /// The volume.
        volume: VolumeId,
        /// Its size in bytes before.
        old_size: u64,
        /// Its size in bytes.
        size: u64,
    },
    /// It was attached and is otherwise now: another device, other paths.
    Changed {
        /// The volume.
        volume: VolumeId,
        /// The device.
        node: PathBuf,
        /// The paths that lead to a SCSI unit.
        paths: usize,
        /// Those that its sources name and that do not.
        missing: Vec<String>,
    },
    /// Nothing of it is left on this machine.
    Detached {
        /// The volume.
        volume: VolumeId,
        /// All that was written to it was proven to be on the array or server:
        /// see [`Detachment::safe_to_unmap`](crate::Detachment::safe_to_unmap).
        safe_to_unmap: bool,
    },
    /// A step failed.
    Failed {
        /// The volume.
        volume: VolumeId,
        /// What was tried.
        step: StepKind,
        /// Why it failed.
        #[serde(serialize_with = "shared")]
        error: Arc<Error>,
        /// In how long it is tried again; `None` where that is not before
        /// something changes. Seconds when serialised.
        #[serde(rename = "next_try_seconds", serialize_with = "as_seconds")]
        next_try: Option<Duration>,
    },
    /// It stands and does not serve.
    Lost {
        /// The volume.
        volume: VolumeId,
        /// Why, in words.
        why: String,
        /// How long requests to an NBD device wait before they fail with `EIO`,
        /// from the death of its link on; `None` where nobody saw when that was.
        /// Seconds when serialised.
        #[serde(rename = "budget_left_seconds", serialize_with = "as_seconds")]
        budget_left: Option<Duration>,
    },
    /// It serves again.
    Healed {
        /// The volume.
        volume: VolumeId,
    },
    /// An iSCSI session that was made here was lost, or serves again.
    Session(#[serde(serialize_with = "shared")] Arc<SessionRecoveryReport>),
    /// This many events were lost, since they were not read in time.
    Missed {
        /// How many.
        count: u64,
    },
}

#[expect(clippy::ref_option, reason = "serde's signature")]
fn as_seconds<S: serde::Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&time.map(|time| time.as_secs_f64()), serializer)
}

fn shared<T: serde::Serialize, S: serde::Serializer>(
    of: &Arc<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    T::serialize(of, serializer)
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attached { volume, node, size } => {
                write!(f, "{volume}: attached as {}, {size} bytes", node.display())
            }
            Self::Resized {
                volume,
                old_size,
                size,
            } => write!(f, "{volume}: has {size} bytes, {old_size} before"),
            Self::Changed {
                volume,
                node,
                paths,
                missing,
            } => {
                write!(f, "{volume}: is {} now, {paths} paths", node.display())?;
                missing
                    .iter()
                    .try_for_each(|path| write!(f, "; missing {path}"))
            }
            Self::Detached {
                volume,
                safe_to_unmap: true,
            } => write!(f, "{volume}: detached, all was written back"),
            Self::Detached { volume, .. } => write!(f, "{volume}: detached"),
            Self::Failed {
                volume,
                step,
                error,
                next_try,
            } => {
                write!(f, "{volume}: {step} failed: {error:#}")?;
                match next_try {
                    Some(wait) => write!(f, "; again in {:.1} s", wait.as_secs_f64()),
                    None => f.write_str("; not again before something changes"),
                }
            }
            Self::Lost {
                volume,
                why,
                budget_left,
            } => {
                write!(f, "{volume}: does not serve: {why}")?;
                budget_left.map_or(Ok(()), |left| {
                    write!(f, "; I/O waits {:.0} s more", left.as_secs_f64())
                })
            }
            Self::Healed { volume } => write!(f, "{volume}: serves again"),
            Self::Session(kept) => kept.fmt(f),
            Self::Missed { count } => write!(f, "{count} events were missed"),
        }
    }
}

/// Events one follower may leave unread. Past that the oldest are dropped and
/// counted: what is newer says more.
const LONGEST: usize = 1024;

/// One follower's end. Dropping it ends it.
#[derive(Debug)]
pub struct Events(Arc<Queue>);

#[derive(Debug, Default)]
struct Queue {
    inner: Mutex<Inner>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    events: VecDeque<Event>,
    missed: u64,
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code under this lock can leave the queue half changed.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Events {
    /// Waits for the next event; `None` when the deadline has passed, or when the
    /// reconciler is gone and all was read.
    pub fn next(&mut self, deadline: Deadline) -> Option<Event> {
        let idle =
            |inner: &mut Inner| inner.events.is_empty() && inner.missed == 0 && !inner.closed;
        let mut inner = self.0.lock();
        loop {
            let woken = self
                .0
                .filled
                .wait_timeout_while(inner, deadline.turn(), idle);
            inner = woken.unwrap_or_else(PoisonError::into_inner).0;
            if deadline.has_passed() || !idle(&mut inner) {
                break;
            }
        }
        match std::mem::take(&mut inner.missed) {
            0 => inner.events.pop_front(),
            count => Some(Event::Missed { count }),
        }
    }
}

/// Those who follow.
#[derive(Debug, Default)]
pub(super) struct Followers(Mutex<Vec<Weak<Queue>>>);

impl Followers {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Queue>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self) -> Events {
        let queue = Arc::<Queue>::default();
        self.lock().push(Arc::downgrade(&queue));
        Events(queue)
    }

    pub(super) fn tell(&self, event: &Event) {
        tracing::info!(%event, "reconciled");
        self.lock().retain(|follower| {
            let Some(queue) = follower.upgrade() else {
                return false;
            };
            let mut inner = queue.lock();
            if inner.events.len() >= LONGEST {
                inner.events.pop_front();
                inner.missed += 1;
            }
            inner.events.push_back(event.clone());
            drop(inner);
            queue.filled.notify_one();
            true
        });
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        for queue in self.lock().iter().filter_map(Weak::upgrade) {
            queue.lock().closed = true;
            queue.filled.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healed(number: usize) -> Event {
        Event::Healed {
            volume: format!("pvc-{number}").parse().unwrap(),
        }
    }

    #[test]
    fn a_follower_who_does_not_read_is_told_how_many_it_missed_and_has_the_newest() {
        let followers = Followers::default();
        let (mut slow, now) = (followers.add(), Deadline::after(Duration::ZERO));
        for number in 0..LONGEST + 5 {
            followers.tell(&healed(number));
        }
        assert!(matches!(slow.next(now), Some(Event::Missed { count: 5 })));
        let read: Vec<String> = std::iter::from_fn(|| slow.next(now))
            .map(|event| event.to_string())
            .collect();
        assert_eq!(read.len(), LONGEST);
        assert_eq!(read[0], "pvc-5: serves again");
        assert!(slow.next(now).is_none());
    }

    #[test]
    fn a_follower_reads_to_the_end_when_nobody_tells_any_more() {
        let followers = Followers::default();
        let mut events = followers.add();
        followers.tell(&healed(1));
        drop(followers);
        let long = Deadline::after(Duration::from_secs(60));
        assert!(events.next(long).is_some());
        assert!(events.next(long).is_none());
        assert!(!long.has_passed());
    }
}
