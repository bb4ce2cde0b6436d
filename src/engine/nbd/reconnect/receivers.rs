//! Connections over which the kernel does not receive, because their receivers wait until
//! other receivers end.
//!
//! Such a connection itself must not end. A receiver that begins late reads the socket that
//! its slot has by then, together with the receiver that began with that socket
//! (`drivers/block/nbd.c`, `recv_work`, `nbd_reconnect_socket`). So this process ends the
//! other connections, the device is served over the late one, and the others are replaced.

use std::time::{Duration, Instant};

use super::NbdReconnect;
use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::nbd::receivers::{self, Receives, UNREAD};
use crate::error::{Error, Result};
use crate::kernel::process;
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
            let looked = receivers::look(
                reads,
                &self.device,
                roots,
                connections,
                unread_for,
                deadline,
            );
            match looked {
                Ok(Receives::OverEach) => break,
                Ok(Receives::NotOverEach) => self.free_receivers(engine),
                Err(error) => return Ok(Some(error)),
            }
            let failure = self.fill(engine, deadline)?;
            if let Some(failure) = failure.filter(|_| self.has_dead(engine)) {
                return Ok(Some(failure));
            }
        }
        Ok(None)
    }

    /// Waits until the kernel's receivers of the connections that have ended are done, for at
    /// most two seconds. A receiver looks up the socket of its slot for each reply, so that one
    /// that still reads the old connection would go on with the new one, beside the new one's
    /// own receiver (`drivers/block/nbd.c`, `recv_work`). Where `/proc` shows no kernel threads,
    /// a receiver counts as done when no reply is unread.
    pub(super) fn wait_for_old_receivers(&self, engine: &Engine, deadline: Deadline) {
        let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));
        let since = Instant::now();
        loop {
            let is_done = match self.runs_an_old_receiver(engine) {
                Some(runs) => !runs,
                None => !self.has_unread_of_dead(engine),
            };
            if is_done {
                return;
            }
            if since.elapsed() >= UNREAD || deadline.has_passed() {
                let index = self.index();
                tracing::warn!(%index, "the receiver of an ended connection is not done");
                return;
            }
            deadline.pause(pauses.pause());
        }
    }

    /// Whether every slot of the device has a receiver, although all connections of this
    /// process have ended; `None` if that cannot be seen. Beside a live connection it is not
    /// known which slots another process has filled since, so that no receiver counts as old.
    fn runs_an_old_receiver(&self, engine: &Engine) -> Option<bool> {
        let state = self.link_state(engine).ok()?;
        if state.dead == 0 || state.live > 0 {
            return Some(false);
        }
        if state.more {
            return None;
        }
        let queue = format!("nbd{}-recv", self.index());
        let running = process::running_items(engine.roots(), &queue).ok()??;
        Some(running >= state.live + state.dead + state.unknown)
    }

    fn has_unread_of_dead(&self, engine: &Engine) -> bool {
        let mut links = engine.links_beside(&self.device);
        let link = links.get_mut(&self.index());
        let own = link.filter(|link| link.backend == self.backend);
        own.is_some_and(Link::has_unread_of_dead)
    }

    /// If a reply stays unread in a connection, ends the others: the receiver of that
    /// connection may wait for one of theirs.
    pub(super) fn free_receivers(&self, engine: &Engine) {
        if self.unread_for(engine) < UNREAD {
            return;
        }
        tracing::warn!(index = %self.index(), "the kernel does not receive over each connection");
        let mut links = engine.links_beside(&self.device);
        if let Some(link) = links.get_mut(&self.index()) {
            link.shut_down_those_that_are_read();
        }
    }

    fn unread_for(&self, engine: &Engine) -> Duration {
        let mut links = engine.links_beside(&self.device);
        let link = links.get_mut(&self.index());
        let own = link.filter(|link| link.backend == self.backend);
        own.map_or(Duration::ZERO, Link::unread_for)
    }

    fn has_dead(&self, engine: &Engine) -> bool {
        self.link_state(engine).is_ok_and(|state| state.dead > 0)
    }
}
