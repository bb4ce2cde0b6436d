//! The connections whose receivers in the kernel may still begin.

use super::Link;
use crate::nbd::held_socket::HeldSocket;

impl Link {
    /// Records that the kernel's receivers of the live connections have begun.
    pub(crate) fn note_receivers_began(&mut self) {
        let live = self.held_sockets.iter_mut();
        for held in live.filter(|held| !held.has_hung_up()) {
            held.receiver_may_begin_later = false;
        }
    }

    /// Records that the kernel's receiver of the newest connection has begun, after one more
    /// receiver began. It records nothing if that may be the one of another live connection.
    pub(crate) fn note_newest_receiver_began(&mut self) {
        if let Some((newest, others)) = self.held_sockets.split_last_mut() {
            let is_late = |held: &HeldSocket| held.receiver_may_begin_later && !held.has_hung_up();
            newest.receiver_may_begin_later &= others.iter().any(is_late);
        }
    }

    /// Whether a live connection has a receiver that is not known to have begun.
    pub(crate) fn has_live_without_receiver(&self) -> bool {
        let mut live = self.held_sockets.iter().filter(|held| !held.has_hung_up());
        live.any(|held| held.receiver_may_begin_later)
    }

    /// Records that no receiver of the connections that have ended is left.
    pub(crate) fn note_receivers_of_dead_ended(&mut self) {
        let dead = self.held_sockets.iter_mut();
        for held in dead.filter(|held| held.has_hung_up()) {
            held.receiver_may_begin_later = false;
        }
    }

    /// Whether a connection has ended of which the receiver may not have begun.
    pub(crate) fn has_dead_without_receiver(&self) -> bool {
        let mut dead = self.held_sockets.iter().filter(|held| held.has_hung_up());
        dead.any(|held| held.receiver_may_begin_later)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::super::tests::link;

    #[test]
    fn a_receiver_that_was_not_seen_to_begin_before_its_connection_ended_may_begin_later() {
        let (one, peer_of_one) = UnixStream::pair().unwrap();
        let (two, peer_of_two) = UnixStream::pair().unwrap();
        let mut link = link(vec![one.into()]);
        link.note_receivers_began();
        link.held_sockets.push(OwnedFd::from(two).into());
        drop(peer_of_one);
        assert!(!link.has_dead_without_receiver());
        drop(peer_of_two);
        link.note_receivers_began();
        assert!(link.has_dead_without_receiver());
        link.note_receivers_of_dead_ended();
        assert!(!link.has_dead_without_receiver());
    }

    #[test]
    fn one_more_receiver_is_that_of_the_newest_connection_unless_another_one_waits_for_its_own() {
        let pairs = [(); 3].map(|()| UnixStream::pair().unwrap());
        let [
            (one, _peer_of_one),
            (two, peer_of_two),
            (three, peer_of_three),
        ] = pairs;
        let mut link = link(vec![one.into()]);
        link.held_sockets.push(OwnedFd::from(two).into());
        link.note_newest_receiver_began();
        assert!(link.has_live_without_receiver());
        drop(peer_of_two);
        assert!(link.has_dead_without_receiver());
        link.note_receivers_began();
        assert!(!link.has_live_without_receiver());
        link.held_sockets.push(OwnedFd::from(three).into());
        drop(peer_of_three);
        link.note_receivers_of_dead_ended();
        let mut newest = link.held_sockets.pop().unwrap();
        newest.receiver_may_begin_later = true;
        link.held_sockets.push(newest);
        link.note_newest_receiver_began();
        assert!(!link.has_dead_without_receiver());
    }
}
