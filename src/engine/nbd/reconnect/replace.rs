//! Replaces the dead connections of a device, and no others.
//!
//! The kernel puts an offered socket into the first slot whose connection is dead, and does
//! not check whether another slot has it (`drivers/block/nbd.c`, `nbd_reconnect_socket`). In
//! two slots a socket would have two receivers, and a read could return the bytes of another.
//! So every connection that is dialled is offered once.

use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::nbd::known::current_links;
use crate::engine::nbd::receivers;
use crate::engine::nbd::reconnect::NbdReconnect;
use crate::engine::nbd::reconnect::server::{DIAL_LIMIT, Server};
use crate::engine::nbd::same_volume::require_same_volume;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::NbdServer;
use crate::nbd::{
    self, Adoption, Connection, Difference, KnownContent, Link, LinkState, Reconfigure,
};

/// A connection that does not show whether the kernel took it.
pub(super) struct UnprovenOffer {
    server: Server,
    /// How many bytes it had received before it was offered; `None` if its socket does not
    /// count them.
    received: Option<u64>,
    /// How many receivers ran before it was offered.
    receivers_before: Option<usize>,
}

impl NbdReconnect {
    /// What is known of the kernel's connections.
    pub(super) fn link_state(&self, engine: &Engine) -> Result<LinkState> {
        let own = |link: &&Link| link.backend == self.backend;
        let state = current_links(engine, &self.device)
            .get(&self.index())
            .filter(own)
            .map(Link::state);
        match state {
            Some(state) => Ok(state),
            None => Ok(LinkState::of_another(self.device.slots(engine.roots())?)),
        }
    }

    /// Dials once, and compares what the server serves with what the kernel was told and with
    /// what the volume held.
    pub(super) fn dial_once(&self, engine: &Engine, deadline: Deadline) -> Result<Server> {
        let (connection, mut differences) = self.dial_export(deadline)?;
        let mut content = None;
        if !differences.iter().any(Difference::prevents_reattach) {
            // The counter is read first, since the read of the content may miss later
            // writes.
            let written = self.device.written()?;
            let read = connection.content(deadline)?;
            differences.extend(self.other_content(engine, &read, deadline)?);
            content = KnownContent::of(read, written);
        }
        Ok(Server::new(connection, content, differences))
    }

    /// Dials once for a device that serves I/O, and compares what the server serves on the
    /// new connection with the device itself.
    ///
    /// # Errors
    /// Every reason not to give the connection to the device.
    fn dial_for_serving_device(&self, engine: &Engine, deadline: Deadline) -> Result<Server> {
        let (connection, differences) = self.dial_export(deadline)?;
        if let Some(refusal) = refused(&connection, &differences) {
            return Err(refusal);
        }
        let written = self.device.written()?;
        let first = require_same_volume(engine, &self.device, &connection, deadline)?;
        self.require_expected(&first.names)?;
        let content = Some(KnownContent { first, written });
        Ok(Server::new(connection, content, differences))
    }

    fn dial_export(&self, deadline: Deadline) -> Result<(Connection, Vec<Difference>)> {
        let connection = nbd::dial_for_device(&self.uri, self.timeouts.request, deadline)?;
        let differences = self
            .device
            .differences_of(connection.export.clone(), deadline)?;
        Ok((connection, differences))
    }

    /// Offers the kernel a connection once. If the kernel took it, it is kept here; if that
    /// cannot be seen, it is returned; else it is closed.
    pub(super) fn offer(
        &mut self,
        engine: &Engine,
        server: Server,
        deadline: Deadline,
    ) -> Result<Option<UnprovenOffer>> {
        let _lock = DeviceLock::take(
            engine.roots(),
            &DeviceLock::of_connections(&self.backend),
            deadline,
        )?;
        self.require_connected()?;
        let received = lunbd_sys::socket::tcp_bytes_received(&server.stream).ok();
        let receivers_before = receivers::count(engine.roots(), self.index());
        let marking = nbd::timeouts_that_mark(self.timeouts);
        let reconfigure =
            |timeouts| Reconfigure::new(self.index(), timeouts).backend(self.backend.clone());
        let is_marked = marking != self.timeouts;
        // The other half is for the removal of the mark.
        let limit = if is_marked { deadline.half() } else { deadline };
        let offered = reconfigure(marking)
            .sockets(nbd::duplicate([&server.stream])?)
            .send(engine.roots(), limit);
        let restored = if is_marked {
            reconfigure(self.timeouts).send(engine.roots(), deadline)
        } else {
            Ok(())
        };
        let adoption = nbd::adoption(&server.stream, marking);
        let unmarked = if is_marked {
            nbd::unmark(&server.stream)
        } else {
            Ok(())
        };
        tracing::debug!(?adoption, "offered a connection");
        self.no_slot_is_dead = adoption != Adoption::Taken;
        let mut unproven = None;
        match adoption {
            Adoption::Taken => {
                self.learn_timeout(&server.stream);
                self.keep_taken(engine, server, receivers_before, deadline)?;
            }
            Adoption::NotTaken => {}
            Adoption::Unseen => {
                unproven = Some(UnprovenOffer {
                    server,
                    received,
                    receivers_before,
                });
            }
        }
        unmarked.and(restored).and(offered)?;
        Ok(unproven)
    }

    /// If another process gave the device its request timeout, takes that from the socket that
    /// the kernel took. TCP gives up the connection after the same time.
    fn learn_timeout(&mut self, taken: &OwnedFd) {
        if self.timeouts.request.is_some() {
            return;
        }
        self.timeouts.request = nbd::request_timeout_of(taken);
        if let Some(limit) = self.timeouts.request
            && let Err(error) = nbd::give_up_after(taken, limit)
        {
            tracing::warn!(%error, index = %self.index(), "TCP gives up the connection after 30 s");
        }
    }

    /// Keeps the connection if it has received a reply since it was offered. Only TCP counts
    /// received bytes: for a unix socket the read that came back counts as the proof.
    pub(super) fn keep_if_server_replied(
        &mut self,
        engine: &Engine,
        unproven: UnprovenOffer,
        deadline: Deadline,
    ) -> Result<()> {
        /// A simple reply without data (`proto.md`): magic, error, cookie.
        const SHORTEST_REPLY: u64 = 16;
        /// The least that TLS adds to it: header and tag. An alert over TLS is shorter than
        /// such a reply over TLS.
        const OF_TLS: u64 = 5 + 16;
        let is_tls = matches!(self.uri.server(), NbdServer::Tls { .. });
        let shortest = SHORTEST_REPLY + if is_tls { OF_TLS } else { 0 };
        let now = lunbd_sys::socket::tcp_bytes_received(&unproven.server.stream).ok();
        let brought = now.zip(unproven.received);
        if brought.is_some_and(|(now, before)| now < before + shortest) {
            return Ok(());
        }
        self.keep_taken(engine, unproven.server, unproven.receivers_before, deadline)
    }

    /// Keeps a connection that the kernel took, and waits until the kernel receives over it.
    fn keep_taken(
        &mut self,
        engine: &Engine,
        server: Server,
        receivers_before: Option<usize>,
        deadline: Deadline,
    ) -> Result<()> {
        let slots = self.device.slots(engine.roots())?;
        let mut links = current_links(engine, &self.device);
        let link = links
            .entry(self.index())
            .or_insert_with(|| self.link(slots));
        if link.backend != self.backend {
            *link = self.link(slots);
        }
        link.timeouts.request = self.timeouts.request.or(link.timeouts.request);
        link.replace_dead(server.stream);
        if server.content.is_some() {
            link.content = server.content;
        }
        link.tls = server.tls;
        drop(links);
        engine.nbd_reads.note_new_connection(self.index());
        self.adopted = Some(server.differences);
        self.wait_for_new_receiver(engine, receivers_before, deadline);
        Ok(())
    }

    fn link(&self, slots: nbd::Slots) -> Link {
        let (uri, backend) = (self.uri.clone(), self.backend.clone());
        let connected_by = self.device.pid().ok().flatten();
        Link::of_another(uri, backend, slots, self.timeouts, connected_by)
    }

    /// Forgets the connections of ours that have ended: they are no longer the device's.
    pub(super) fn forget_dead_connections(&self, engine: &Engine) {
        if let Some(link) = engine.links.lock().get_mut(&self.index())
            && link.backend == self.backend
        {
            link.forget_dead();
        }
    }

    /// Dials and offers one connection after the other until every slot has one, as far as
    /// that can be known. Returns the error that prevented it.
    pub(super) fn fill_slots(
        &mut self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<Option<Error>> {
        /// For a connection that may not be needed.
        const SHORT_DIAL_LIMIT: Duration = Duration::from_secs(2);
        /// How often the kernel is asked to replace a connection that has ended here: the
        /// kernel may not have seen that yet, or another process may have replaced it.
        const MOST_TRIES: u32 = 5;
        let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_millis(800));
        let mut tries = 0;
        loop {
            let state = self.link_state(engine)?;
            if state.is_whole() || (state.dead == 0 && self.no_slot_is_dead) {
                return Ok(None);
            }
            let limit = if state.dead > 0 {
                DIAL_LIMIT
            } else {
                SHORT_DIAL_LIMIT
            };
            if let Err(error) = self.require_no_late_receiver(engine) {
                return Ok(Some(error));
            }
            self.dials += 1;
            let server = match self.dial_for_serving_device(engine, deadline.at_most(limit)) {
                Ok(server) => server,
                Err(error) => return Ok(Some(error)),
            };
            // Another connection may have ended meanwhile, and the kernel may choose its slot.
            self.wait_for_receivers_of_dead(engine, deadline);
            if let Err(error) = self.require_no_late_receiver(engine) {
                return Ok(Some(error));
            }
            if let Some(unproven) = self.offer(engine, server, deadline)?
                && state.dead > 0
            {
                // The connection that it replaces has ended, so the kernel has room for it.
                let before = unproven.receivers_before;
                self.keep_taken(engine, unproven.server, before, deadline)?;
            }
            let now = self.link_state(engine)?;
            if now.live > state.live {
                continue;
            }
            if now.dead == 0 {
                self.note_that_no_slot_is_dead(engine, now);
                return Ok(None);
            }
            tries += 1;
            if tries == MOST_TRIES && self.no_slot_is_dead {
                self.forget_dead_connections(engine);
                return Ok(None);
            }
            if tries == MOST_TRIES {
                return Ok(Some(self.connections_end_again()));
            }
            self.pause(engine, deadline.at_most(pauses.pause()));
        }
    }

    fn connections_end_again(&self) -> Error {
        let message = format!(
            "each new connection of nbd{} has ended again; see the log of the server",
            self.index()
        );
        Error::new(ErrorKind::NotReady, message).at(Stage::Reconfigure)
    }

    fn note_that_no_slot_is_dead(&self, engine: &Engine, state: LinkState) {
        if state.unknown == 0
            && let Some(link) = engine.links.lock().get_mut(&self.index())
            && link.backend == self.backend
        {
            link.set_slots_exact();
        }
    }
}

/// Why a device that serves I/O gets no further connection to this server.
fn refused(connection: &Connection, differences: &[Difference]) -> Option<Error> {
    let refused = |kind, message: &str| {
        let error = Error::new(
            kind,
            format!("a dead connection is not replaced: {message}"),
        );
        Some(error.at(Stage::Handshake))
    };
    if differences.iter().any(Difference::prevents_reattach) {
        let told: Vec<String> = differences.iter().map(ToString::to_string).collect();
        let message = format!("the server has another export now: {}", told.join("; "));
        return refused(ErrorKind::IdentityMismatch, &message);
    }
    if !connection.export.can_multi_conn() {
        let message = "the server allows one connection alone now (no CAN_MULTI_CONN)";
        return refused(ErrorKind::NotSupported, message);
    }
    None
}
