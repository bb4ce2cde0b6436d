//! Replaces the dead connections of a device, and no others.
//!
//! The kernel puts an offered socket into the first slot whose connection is dead, and does
//! not check whether another slot has it (`drivers/block/nbd.c`, `nbd_reconnect_socket`). In
//! two slots a socket would have two receivers, and a read could return the bytes of another.
//! So every connection that is dialled is offered once.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::nbd::dialled_connection::{DIAL_LIMIT, DialledConnection};
use crate::engine::nbd::known::current_links;
use crate::engine::nbd::queue_facts::queue_facts;
use crate::engine::nbd::reconnect::NbdReconnect;
use crate::engine::nbd::same_volume::require_same_volume;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::nbd::{self, Connection, Difference, KnownContent, Link, LinkState, QueueFacts};

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
    pub(super) fn dial_once(
        &self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<DialledConnection> {
        let (connection, mut differences, facts) = self.dial_export(engine, deadline)?;
        let mut content = None;
        if !differences.iter().any(Difference::prevents_reattach) {
            // The counter is read first, since the read of the content may miss later
            // writes.
            let written = self.device.written(facts.counts_requests)?;
            let read = connection.content(deadline)?;
            differences.extend(self.other_content(engine, &read, &facts, deadline)?);
            content = KnownContent::of(read, written);
        }
        Ok(DialledConnection::new(connection, content, differences))
    }

    /// Dials once for a device that serves I/O, and compares what the server serves on the
    /// new connection with the device itself.
    ///
    /// # Errors
    /// Every reason not to give the connection to the device.
    fn dial_for_serving_device(
        &self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<DialledConnection> {
        let (connection, differences, facts) = self.dial_export(engine, deadline)?;
        if let Some(refusal) = refused(&connection, &differences) {
            return Err(refusal);
        }
        let written = self.device.written(facts.counts_requests)?;
        let first = require_same_volume(engine, &self.device, &connection, deadline)?;
        self.require_expected(&first.names)?;
        let content = Some(KnownContent { first, written });
        Ok(DialledConnection::new(connection, content, differences))
    }

    fn dial_export(
        &self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<(Connection, Vec<Difference>, QueueFacts)> {
        let connection = nbd::dial_for_device(&self.uri, self.timeouts.request, deadline)?;
        let facts = queue_facts(engine, &self.device, deadline)?;
        let differences = facts.differences_of(connection.export.clone());
        Ok((connection, differences, facts))
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
        const MOST_OFFERS: u32 = 5;
        let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_millis(800));
        let mut offers = 0;
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
                && unproven.replaces_dead
            {
                // The connection that it replaces has ended, so the kernel has room for it.
                self.keep_taken(engine, unproven, deadline)?;
            }
            let now = self.link_state(engine)?;
            if now.live > state.live {
                self.refused_offers = 0;
                continue;
            }
            if now.dead == 0 {
                self.refused_offers = 0;
                self.note_that_no_slot_is_dead(engine, now);
                return Ok(None);
            }
            offers += 1;
            self.count_refusal();
            if self.refused_offers >= MOST_OFFERS {
                self.refused_offers = 0;
                self.forget_dead_connections(engine);
                return Ok(None);
            }
            if offers >= MOST_OFFERS {
                return Ok(Some(self.connections_end_again()));
            }
            self.pause(engine, deadline.at_most(pauses.pause()));
        }
    }

    /// Counts the last offer if the kernel did not take it.
    pub(super) fn count_refusal(&mut self) {
        self.refused_offers = if self.no_slot_is_dead {
            self.refused_offers + 1
        } else {
            0
        };
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
