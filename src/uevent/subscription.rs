//! One waiter's subscription at the hub.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::dispatch::{Dispatch, Interest, WaiterId};
use super::event::Notice;
use super::queue::Queue;
use crate::deadline::{Backoff, Deadline};

/// An entry in the dispatch and its queue. Dropping it removes both.
#[derive(Debug)]
pub(super) struct Subscription {
    dispatch: Arc<Dispatch>,
    interest: Interest,
    id: WaiterId,
    queue: Arc<Queue>,
    /// How long until the next look at sysfs; `None` if events come.
    poll: Option<Backoff>,
}

impl Subscription {
    pub(super) fn new(dispatch: &Arc<Dispatch>, interest: Interest) -> Self {
        let (id, queue) = dispatch.subscribe(&interest);
        Self {
            dispatch: Arc::clone(dispatch),
            interest,
            id,
            queue,
            poll: None,
        }
    }

    /// For a process that gets no events: sends a [`Notice::Resync`] after each pause.
    pub(super) fn polling(mut self) -> Self {
        self.poll = Some(Backoff::for_kernel_state());
        self
    }

    /// As [`Watch::next`](super::Watch::next).
    pub(super) fn next(&mut self, deadline: Deadline) -> Option<Notice> {
        let start = Instant::now();
        let may_wait = !deadline.has_passed();
        let limit = match &mut self.poll {
            Some(pauses) => deadline.at_most(pauses.pause()),
            None => deadline,
        };
        let mut notice = self.queue.take(limit.max_sleep());
        while notice.is_none() && !limit.has_passed() {
            notice = self.queue.take(limit.max_sleep());
        }
        if notice.is_none() && self.poll.is_some() && may_wait {
            notice = Some(Notice::Resync);
        }
        match &notice {
            // The hub may have ended before its watch. No event comes then.
            Some(Notice::Resync) if self.poll.is_none() && self.queue.is_closed() => {
                self.poll = Some(Backoff::for_kernel_state());
            }
            _ => {}
        }
        match notice {
            Some(_) => self.dispatch.counts().wait(start.elapsed()),
            None => self.dispatch.counts().wait_in_vain(),
        }
        notice
    }

    pub(super) fn queue(&self) -> Arc<Queue> {
        Arc::clone(&self.queue)
    }

    /// The next notice that has come already, without waiting.
    pub(super) fn try_next(&mut self) -> Option<Notice> {
        self.queue.take(Duration::ZERO)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.dispatch.unsubscribe(&self.interest, self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uevent::event::tests::event;

    fn subscribe(dispatch: &Arc<Dispatch>) -> Subscription {
        Subscription::new(dispatch, Interest::Everything)
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(10))
    }

    #[test]
    fn a_dropped_subscription_is_gone_from_the_dispatch() {
        let dispatch = Arc::<Dispatch>::default();
        let subscription = subscribe(&dispatch);
        assert_eq!(dispatch.counters().watches, 1);
        drop(subscription);
        assert_eq!(dispatch.counters().watches, 0);
    }

    #[test]
    fn the_hubs_end_turns_a_wait_into_looks_at_sysfs_with_pauses() {
        let dispatch = Arc::<Dispatch>::default();
        let mut before = subscribe(&dispatch);
        dispatch.close();
        let mut after = subscribe(&dispatch);
        for subscription in [&mut before, &mut after] {
            for _ in 0..4 {
                let notice = subscription.next(soon());
                assert!(matches!(notice, Some(Notice::Resync)), "{notice:?}");
            }
            // The pauses have grown, so it does not spin.
            let pauses = subscription.poll.as_mut().unwrap();
            assert!(pauses.pause() >= Duration::from_millis(8));
        }
    }

    #[test]
    fn waits_are_counted_by_how_they_ended() {
        let dispatch = Arc::<Dispatch>::default();
        let mut subscription = subscribe(&dispatch);
        dispatch.deliver("/x", || false, || Some(event("/x")));
        assert!(subscription.next(soon()).is_some());
        dispatch.resync();
        assert!(subscription.next(soon()).is_some());
        assert!(
            subscription
                .next(Deadline::after(Duration::from_millis(1)))
                .is_none()
        );
        let counters = dispatch.counters();
        assert_eq!((counters.waits, counters.waits_in_vain), (2, 1));
    }
}
