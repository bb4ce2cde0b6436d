//! The offer of a connection to the kernel, and whether the kernel took it.
//!
//! The kernel may run the command that offers a connection after the deadline of its heal. Then
//! the engine keeps the connection, and the next heal of the device finds out what became of it.
//! Without it this process would hold no socket of a connection of the device.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::nbd::dialled_connection::DialledConnection;
use crate::engine::nbd::known::current_links;
use crate::engine::nbd::offers::Offer;
use crate::engine::nbd::receivers;
use crate::engine::nbd::reconnect::NbdReconnect;
use crate::error::Result;
use crate::id::NbdServer;
use crate::nbd::{self, Adoption, Link, NewTimeouts, Reconfigure};

impl NbdReconnect {
    /// Offers the kernel a connection once. If the kernel took it, it is kept here; if that
    /// cannot be seen, it is returned; else it is closed. If an earlier offer turns out to have
    /// been taken, the connection is closed and not offered.
    pub(super) fn offer(
        &mut self,
        engine: &Engine,
        server: DialledConnection,
        deadline: Deadline,
    ) -> Result<Option<Offer>> {
        let roots = engine.roots();
        let lock = Arc::new(DeviceLock::take(roots, &self.lock_name(), deadline)?);
        if self.keep_or_close_undecided_offer(engine, deadline)?
            || self.require_no_late_receiver(engine).is_err()
        {
            // This was no refusal.
            self.no_slot_is_dead = false;
            return Ok(None);
        }
        let connected_by = self.require_connected()?;
        let offer = Offer {
            timeouts: self.timeouts,
            received: lunbd_sys::socket::tcp_bytes_received(&server.stream).ok(),
            receivers_before: receivers::count(roots, self.index()),
            replaces_dead: self.link_state(engine)?.dead > 0,
            server,
        };
        // The other half is for the removal of the mark.
        let limit = if offer.is_marked() {
            deadline.half()
        } else {
            deadline
        };
        let sent = self
            .reconfigure(nbd::timeouts_that_mark(offer.timeouts))
            .sockets(nbd::duplicate([&offer.server.stream])?)
            .send_under(Box::new(Arc::clone(&lock)), roots, limit);
        let has_returned = Arc::strong_count(&lock) == 1;
        if has_returned {
            let restored = offer.is_marked().then_some(self.timeouts);
            let unproven = self.decide(engine, offer, restored, deadline);
            return sent.and(unproven);
        }
        if offer.is_marked() {
            // The kernel runs it after the offer, also if this process does not heal again.
            let begin = Deadline::after(Duration::from_millis(50));
            let restore = self.reconfigure(offer.timeouts);
            if let Err(error) = restore.send_under(Box::new(Arc::clone(&lock)), roots, begin) {
                tracing::debug!(%error, "the timeouts are not restored yet");
            }
        }
        let backend = self.backend.clone();
        let offers = &engine.nbd_offers;
        offers.insert(self.index(), offer, backend, connected_by);
        sent.map(|()| None)
    }

    /// Keeps the connection of an earlier offer if the kernel took it after the deadline of that
    /// heal; otherwise closes it. It leaves an offer alone of which the command has not returned.
    pub(super) fn keep_or_close_earlier_offer(
        &mut self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<()> {
        if engine.nbd_offers.contains(self.index())
            && let Some(_lock) = DeviceLock::try_take(engine.roots(), &self.lock_name())?
        {
            self.keep_or_close_undecided_offer(engine, deadline)?;
        }
        Ok(())
    }

    /// The same, under the lock of the connections. Returns whether the connection is kept.
    fn keep_or_close_undecided_offer(
        &mut self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<bool> {
        let Some(mut offer) = engine.nbd_offers.take(&self.device, &self.backend) else {
            return Ok(false);
        };
        offer.receivers_before = None;
        let live = self.link_state(engine)?.live;
        let adopted = self.adopted.take();
        // Another process may have set the timeouts that this heal does not set.
        let wanted = Some(self.timeouts).filter(|wanted| *wanted != NewTimeouts::default());
        let decided = match self.decide(engine, offer, wanted, deadline) {
            Ok(Some(unproven)) if unproven.replaces_dead && live > 0 => {
                self.keep_taken(engine, unproven, deadline)
            }
            // For a unix socket only a later read would show that.
            Ok(Some(unproven)) if unproven.received.is_some() => {
                self.keep_if_server_replied(engine, unproven, deadline)
            }
            decided => decided.map(|_| ()),
        };
        let is_kept = self.link_state(engine)?.live > live;
        if !is_kept {
            self.adopted = adopted;
            self.count_refusal();
        }
        // A slot may have died since.
        self.no_slot_is_dead = false;
        decided.map(|()| is_kept)
    }

    /// Keeps an offered connection if the kernel took it, and returns it if that cannot be seen.
    /// The command has returned. Then the device gets the `wanted` timeouts, if there are any.
    fn decide(
        &mut self,
        engine: &Engine,
        offer: Offer,
        wanted: Option<NewTimeouts>,
        deadline: Deadline,
    ) -> Result<Option<Offer>> {
        let marking = nbd::timeouts_that_mark(offer.timeouts);
        let restored = wanted.map_or(Ok(()), |wanted| {
            self.reconfigure(wanted).send(engine.roots(), deadline)
        });
        let stream = &offer.server.stream;
        let adoption = nbd::adoption(stream, marking);
        let unmarked = if offer.is_marked() {
            nbd::unmark(stream)
        } else {
            Ok(())
        };
        tracing::debug!(?adoption, "offered a connection");
        self.no_slot_is_dead = adoption != Adoption::Taken;
        let mut unproven = None;
        match adoption {
            Adoption::Taken => {
                self.refused_offers = 0;
                self.learn_timeout(stream);
                self.keep_taken(engine, offer, deadline)?;
            }
            Adoption::NotTaken => {}
            Adoption::Unseen => unproven = Some(offer),
        }
        unmarked.and(restored)?;
        Ok(unproven)
    }

    fn lock_name(&self) -> String {
        DeviceLock::of_connections(&self.backend)
    }

    /// A command for the device, under its own id.
    fn reconfigure(&self, timeouts: NewTimeouts) -> Reconfigure {
        Reconfigure::new(self.index(), timeouts).backend(self.backend.clone())
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
        unproven: Offer,
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
        self.keep_taken(engine, unproven, deadline)
    }

    /// Keeps a connection that the kernel took, and waits until the kernel receives over it.
    pub(super) fn keep_taken(
        &mut self,
        engine: &Engine,
        taken: Offer,
        deadline: Deadline,
    ) -> Result<()> {
        let server = taken.server;
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
        self.wait_for_new_receiver(engine, taken.receivers_before, deadline);
        Ok(())
    }

    fn link(&self, slots: nbd::Slots) -> Link {
        let (uri, backend) = (self.uri.clone(), self.backend.clone());
        let connected_by = self.device.pid().ok().flatten();
        Link::of_another(uri, backend, slots, self.timeouts, connected_by)
    }
}
