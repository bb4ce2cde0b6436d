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
use crate::engine::nbd::known::current_links;
use crate::engine::nbd::receivers::{self, ReceiverCheck, UNREAD_LIMIT};
use crate::engine::nbd::reconnect::NbdReconnect;
use crate::error::{Error, Result};
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
            let unread_for = || self.unread_for(engine);
            let (reads, roots) = (&engine.nbd_reads, engine.roots());
            let checked = receivers::check(
                reads,
                &self.device,
                roots,
                connections,
                unread_for,
                deadline,
            );
            match checked {
                Ok(ReceiverCheck::AllReceive) => break,
                Ok(ReceiverCheck::NotAllReceive) => self.free_receivers(engine),
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
            if is_done {
                return;
            }
            if since.elapsed() >= UNREAD_LIMIT || deadline.has_passed() {
                let index = self.index();
                tracing::warn!(%index, "the receiver of an ended connection is not done");
                return;
            }
            deadline.pause(pauses.pause());
        }
    }

    fn has_unread_of_dead(&self, engine: &Engine) -> bool {
        let mut links = current_links(engine, &self.device);
        let link = links.get_mut(&self.index());
        let own = link.filter(|link| link.backend == self.backend);
        own.is_some_and(Link::has_unread_of_dead)
    }

    /// If a reply stays unread in a connection, ends the others: the receiver of that
    /// connection may wait for one of theirs.
    pub(super) fn free_receivers(&self, engine: &Engine) {
        if self.unread_for(engine) < UNREAD_LIMIT {
            return;
        }
        tracing::warn!(index = %self.index(), "the kernel does not receive over each connection");
        let mut links = current_links(engine, &self.device);
        if let Some(link) = links.get_mut(&self.index()) {
            link.shut_down_connections_without_unread_reply();
        }
    }

    fn unread_for(&self, engine: &Engine) -> Duration {
        let mut links = current_links(engine, &self.device);
        let link = links.get_mut(&self.index());
        let own = link.filter(|link| link.backend == self.backend);
        own.map_or(Duration::ZERO, Link::unread_for)
    }

    fn has_dead(&self, engine: &Engine) -> bool {
        self.link_state(engine).is_ok_and(|state| state.dead > 0)
    }
}
