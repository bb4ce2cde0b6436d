//! Every event, for a permanent listener.

use std::sync::Arc;

use super::event::Notice;
use super::queue::Queue;
use super::subscription::Subscription;
use crate::deadline::Deadline;

/// A subscription to every event of the kernel, and udev's of block devices, for
/// a permanent listener. It remembers nothing, and without events it does not
/// look at sysfs instead. Dropping it ends it.
#[derive(Debug)]
pub struct Stream(Subscription);

impl Stream {
    pub(super) fn new(subscription: Subscription) -> Self {
        Self(subscription)
    }

    /// Waits for the next notice; `None` when the deadline has passed. Without
    /// events ([`Mode::SysfsPoll`](super::Mode::SysfsPoll)) it delivers only
    /// those that are [fed](super::Hub::feed).
    pub fn next(&mut self, deadline: Deadline) -> Option<Notice> {
        self.0.next(deadline)
    }

    /// A handle that ends a wait from another thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(self.0.queue())
    }
}

/// Ends the waits of a [`Stream`].
#[derive(Debug, Clone)]
pub struct Waker(Arc<Queue>);

impl Waker {
    /// Sends the stream a [`Notice::Resync`], unless one is unread.
    pub fn wake(&self) {
        self.0.resync();
    }
}
