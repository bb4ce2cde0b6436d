//! Connections over which the kernel does not receive, because their receivers wait until
//! other receivers end.
//!
//! Such a connection itself must not end. A receiver that begins late reads the socket that
//! its slot has by then, together with the receiver that began with that socket
//! (`drivers/block/nbd.c`, `recv_work`, `nbd_reconnect_socket`). So this process ends the
//! other connections, the device is served over the late one, and the others are replaced.

use std::time::{Duration, Instant};

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::nbd::known::change_own_link;
use crate::engine::nbd::receivers::{self, ReceiverCheck, UNREAD_LIMIT};
use crate::engine::nbd::reconnect::NbdReconnect;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::nbd::Link;

impl NbdReconnect {
    /// Proves that the kernel receives over each connection of this process, and replaces
    /// connections until it does. Returns the error that prevented it.
    pub(super) fn receive_over_each(
        &mut self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<Option<Error>> {
        loop {
            let connections = self.link_state(engine)?.live;
            if connections < 2 {
                break;
            }
            let checked =
                receivers::check_own(engine, &self.device, &self.backend, connections, deadline);
            match checked {
                Ok(ReceiverCheck::AllReceive) => break,
                Ok(check) if self.unread_for(engine).is_zero() && !self.has_dead(engine) => {
                    return Ok(check.require(&self.device).err());
                }
                Ok(ReceiverCheck::NotAllReceive) => {
                    self.end_connections_that_block_receivers(engine);
                }
                Err(error) => return Ok(Some(error)),
            }
            let failure = self.fill_slots(engine, deadline)?;
            if let Some(failure) = failure.filter(|_| self.has_dead(engine)) {
                return Ok(Some(failure));
            }
        }
        Ok(None)
    }

    /// Waits until the kernel has no receiver of the device, for at most two seconds. The device
    /// does not answer, so that each receiver is of a connection that has ended. A receiver looks
    /// up the socket of its slot for each reply, so that it would go on with a new one, beside the
    /// new one's own receiver; if no process holds the old socket, it would read freed memory
    /// (`drivers/block/nbd.c`, `recv_work`, `nbd_reconnect_socket`). Where `/proc` shows no kernel
    /// threads, a receiver counts as done when no reply is unread.
    pub(super) fn wait_for_old_receivers(&self, engine: &Engine, deadline: Deadline) {
        let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));
        let since = Instant::now();
        loop {
            let is_done = match receivers::count(engine.roots(), self.index()) {
                Some(receivers) => receivers == 0,
                None => !self.has_unread_of_dead(engine),
            };
            let is_late = since.elapsed() >= UNREAD_LIMIT || deadline.has_passed();
            if is_late {
                let index = self.index();
                tracing::warn!(%index, "the receiver of an ended connection is not done");
            }
            if is_done || is_late {
                // A further wait would leave the device without a server.
                self.change_own_link(engine, Link::note_receivers_of_dead_ended);
                return;
            }
            deadline.pause(pauses.pause());
        }
    }

    /// Waits until the receiver of a new connection runs, for at most two seconds, and then
    /// records that it has begun. `before` is how many ran before the kernel got the connection.
    /// Where this process does not see the kernel's threads, it records that at once. It also
    /// does so if it has seen none, or if another process has connections of the device: then
    /// the numbers prove nothing.
    pub(super) fn wait_for_new_receiver(
        &self,
        engine: &Engine,
        before: Option<usize>,
        deadline: Deadline,
    ) {
        let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));
        let until = deadline.at_most(UNREAD_LIMIT);
        loop {
            let running = receivers::count(engine.roots(), self.index());
            let one_more_runs = running
                .zip(before)
                .is_some_and(|(running, before)| running > before);
            let own_live = self.own_live(engine);
            let each_runs = running.is_none() || own_live == running;
            let is_late = until.has_passed();
            let proves_nothing = running.max(before) == Some(0) || own_live.is_none();
            if each_runs || is_late && proves_nothing {
                self.change_own_link(engine, Link::note_receivers_began);
            }
            // The newest connection may have ended already. That its receiver has begun is then
            // likely and not proven. Of a late offer it is not even likely.
            let newest_began = each_runs && (before.is_some() || running.is_none());
            if one_more_runs || newest_began {
                self.change_own_link(engine, Link::note_newest_receiver_began);
            }
            if one_more_runs || each_runs || is_late {
                return;
            }
            until.pause(pauses.pause());
        }
    }

    /// Records that the receivers of all connections have begun, if as many run as live. A heal
    /// that ran out of time may not have seen that.
    pub(super) fn note_receivers_if_each_runs(&self, engine: &Engine) {
        let is_unknown = self.change_own_link(engine, |link| link.has_live_without_receiver());
        if is_unknown == Some(true)
            && let Some(running) = receivers::count(engine.roots(), self.index())
            && self.own_live(engine) == Some(running)
        {
            self.change_own_link(engine, Link::note_receivers_began);
        }
    }

    /// If more receivers run than connections live, another process may have replaced the dead
    /// connection. Then the kernel takes no new one for it.
    ///
    /// # Errors
    /// `NotReady` if a connection has ended and its receiver may not have begun: a new connection
    /// in its slot could have two receivers, and a read could return wrong bytes.
    pub(super) fn require_no_late_receiver(&self, engine: &Engine) -> Result<()> {
        let is_late = self.change_own_link(engine, |link| link.has_dead_without_receiver());
        let running = receivers::count(engine.roots(), self.index());
        if is_late != Some(true) || running > self.own_live(engine) {
            return Ok(());
        }
        let message = format!(
            "a dead connection of nbd{} is not replaced: its receiver in the kernel may not have \
             begun, and a new connection could have two receivers; detach the volume and attach \
             it again",
            self.index()
        );
        Err(Error::new(ErrorKind::NotReady, message).at(Stage::Reconfigure))
    }

    /// Waits until as many receivers run as connections live, for at most two seconds: then no
    /// receiver of a dead connection runs. More may run for good if another process has replaced
    /// a connection of this one, so that it waits for each surplus once. It does not wait where
    /// it cannot see both numbers.
    pub(super) fn wait_for_receivers_of_dead(&mut self, engine: &Engine, deadline: Deadline) {
        let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));
        let until = deadline.half().at_most(UNREAD_LIMIT);
        loop {
            let running = receivers::count(engine.roots(), self.index());
            let both = running.zip(self.own_live(engine));
            let surplus = both.map_or(0, |(running, live)| running.saturating_sub(live));
            if surplus <= self.known_surplus {
                self.known_surplus = surplus;
                return;
            }
            if until.has_passed() {
                let index = self.index();
                tracing::warn!(%index, surplus, "more receivers run than connections live");
                self.known_surplus = surplus;
                return;
            }
            until.pause(pauses.pause());
        }
    }

    /// How many connections live, if this process has made all of the device.
    fn own_live(&self, engine: &Engine) -> Option<usize> {
        let state = self.link_state(engine).ok();
        let own = state.filter(|state| state.unknown == 0 && !state.may_have_more);
        own.map(|state| state.live)
    }

    fn change_own_link<T>(
        &self,
        engine: &Engine,
        change: impl FnOnce(&mut Link) -> T,
    ) -> Option<T> {
        change_own_link(engine, &self.device, &self.backend, change)
    }

    fn has_unread_of_dead(&self, engine: &Engine) -> bool {
        self.change_own_link(engine, Link::has_unread_of_dead)
            .unwrap_or(false)
    }

    /// If a reply has stayed unread in a connection for [`UNREAD_LIMIT`], ends the connections
    /// without an unread reply: the receiver of the former may wait for one of theirs.
    pub(super) fn end_connections_that_block_receivers(&self, engine: &Engine) {
        if self.unread_for(engine) < UNREAD_LIMIT {
            return;
        }
        tracing::warn!(index = %self.index(), "the kernel does not receive over each connection");
        self.change_own_link(engine, Link::shut_down_connections_without_unread_reply);
    }

    fn unread_for(&self, engine: &Engine) -> Duration {
        self.change_own_link(engine, Link::unread_for)
            .unwrap_or(Duration::ZERO)
    }

    fn has_dead(&self, engine: &Engine) -> bool {
        self.link_state(engine).is_ok_and(|state| state.dead > 0)
    }
}
