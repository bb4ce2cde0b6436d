//! Every event, for one who stays.

use std::sync::Arc;

use super::event::Notice;
use super::queue::Queue;
use super::subscription::Subscription;
use crate::deadline::Deadline;

/// A subscription to every event of the kernel, and udev's of block devices, for
/// one who listens for good: it remembers nothing, and where no events come it
/// does not look at sysfs instead. Dropping it ends it.
#[derive(Debug)]
pub struct Stream(Subscription);

impl Stream {
    pub(super) fn new(subscription: Subscription) -> Self {
        Self(subscription)
    }

    /// Waits for the next notice; `None` when the deadline has passed. Where no
    /// events come ([`Mode::SysfsPoll`](super::Mode::SysfsPoll)) none does, but
    /// for those that are [fed](super::Hub::feed).
    pub fn next(&mut self, deadline: Deadline) -> Option<Notice> {
        self.0.next(deadline)
    }

    /// What ends a wait from another thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(self.0.queue())
    }
}

/// Ends the waits of a [`Stream`].
#[derive(Debug, Clone)]
pub struct Waker(Arc<Queue>);

impl Waker {
    /// Hands the stream a [`Notice::Resync`], unless one is unread.
    pub fn wake(&self) {
        self.0.resync();
    }
}
