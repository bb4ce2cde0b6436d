//! The healing of one NBD device.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::Engine;
use super::attach_nbd::lease_of;
use super::heal::{HealOutcome, Healing};
use super::lease::Lease;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex, NbdUri, Source};
use crate::kernel::worker::{self, Pending};
use crate::nbd::{self, Difference, Link, NbdDevice, NewTimeouts, Reconfigure};

/// A device, and what is known of its link.
#[derive(Debug)]
pub(super) struct Patient {
    device: NbdDevice,
    uri: NbdUri,
    backend: BackendId,
    /// What it is to have, and has where it was attached here.
    timeouts: NewTimeouts,
    /// A read that is under way: on a dead link it waits for the next, and its
    /// return is the proof that there is one.
    pulse: Option<Pending<()>>,
    /// Our own link had ended when that read began: what answers it is another's.
    ended_before: bool,
    died: Option<Instant>,
    /// Requests fail already, so nothing that waits can be lost any more.
    spent: bool,
    pauses: Backoff,
    dials: u32,
    /// It is not treated before.
    rests_until: Option<Instant>,
}

impl Patient {
    pub(super) fn new(
        device: NbdDevice,
        uri: NbdUri,
        backend: BackendId,
        timeouts: NewTimeouts,
    ) -> Self {
        Self {
            device,
            uri,
            backend,
            timeouts,
            pulse: None,
            ended_before: false,
            died: None,
            spent: false,
            pauses: Backoff::new(Duration::from_millis(20), Duration::from_secs(2)),
            dials: 0,
            rests_until: None,
        }
    }

    pub(super) fn index(&self) -> NbdIndex {
        self.device.index()
    }

    /// Leaves it alone for a moment: it failed at once, and would again.
    pub(super) fn rest(&mut self) {
        self.rests_until = Some(Instant::now() + jittered(self.pauses.pause()));
    }

    /// Until when it is left alone.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        self.rests_until.filter(|until| *until > Instant::now())
    }

    /// The kernel said that a link of it has died.
    pub(super) fn link_died(&mut self) {
        self.died.get_or_insert_with(Instant::now);
    }

    /// Heals it, or says what stands in the way, by `deadline`.
    #[tracing::instrument(skip_all, fields(index = %self.index(), uri = %self.uri))]
    pub(super) fn treat(&mut self, engine: &Engine, deadline: Deadline) -> Healing {
        let outcome = self
            .try_treat(engine, deadline)
            .unwrap_or_else(HealOutcome::Failed);
        tracing::info!(?outcome, "treated");
        if outcome.serves() {
            self.died = None;
            self.spent = false;
            if self.ended_before && !matches!(outcome, HealOutcome::Adopted(_)) {
                self.let_go_of_link(engine);
            }
        }
        self.healing(outcome)
    }

    /// What is to be told of it.
    pub(super) fn healing(&self, outcome: HealOutcome) -> Healing {
        let budget = self.died.zip(self.timeouts.dead_connection);
        Healing {
            index: self.index(),
            source: Source::Nbd(self.uri.clone()),
            backend: self.backend.clone(),
            budget_left: budget.map(|(died, budget)| budget.saturating_sub(died.elapsed())),
            outcome,
            dials: self.dials,
        }
    }

    fn try_treat(&mut self, engine: &Engine, deadline: Deadline) -> Result<HealOutcome> {
        /// Longer than a server that works takes for one block.
        const PATIENCE: Duration = Duration::from_secs(1);
        let patience = if self.is_known_dead(engine) {
            Duration::ZERO
        } else {
            PATIENCE
        };
        match self.feel_pulse(engine, Deadline::after(deadline.remaining().min(patience)))? {
            Pulse::Beats => return Ok(HealOutcome::Healthy),
            Pulse::Fails => self.spent = true,
            Pulse::Waits => {}
        }
        self.link_died();
        let (sockets, differences) = match self.dial(engine, deadline)? {
            Dialled::Server(sockets, differences) => (sockets, differences),
            Dialled::NotNeeded(outcome) => return Ok(outcome),
        };
        if differences.iter().any(Difference::prevents_reattach) {
            return Ok(HealOutcome::GeometryChanged(differences));
        }
        self.hand_over(engine, sockets, differences, deadline)
    }

    /// By our own end, or by the kernel's word.
    fn is_known_dead(&self, engine: &Engine) -> bool {
        self.died.is_some() || self.own_link_ended(engine)
    }

    fn own_link_ended(&self, engine: &Engine) -> bool {
        let ended = |link: &Link| link.backend == self.backend && link.is_dead();
        engine.links().get(&self.index()).is_some_and(ended)
    }

    /// It serves by another's hand: that our link is dead is no news of it. One that
    /// lives is of another treatment here.
    fn let_go_of_link(&self, engine: &Engine) {
        if let Some(link) = engine.links().get_mut(&self.index())
            && link.backend == self.backend
            && link.is_dead()
        {
            link.let_go();
        }
    }

    fn feel_pulse(&mut self, engine: &Engine, deadline: Deadline) -> Result<Pulse> {
        let pulse = if let Some(pulse) = self.pulse.take() {
            pulse
        } else {
            self.ended_before = self.own_link_ended(engine);
            let (disk, roots) = (self.device.disk().clone(), engine.roots().clone());
            worker::start_apart(Stage::Probe, move || disk.read_first_block(&roots))?
        };
        match pulse.wait(deadline) {
            Some(Ok(())) => Ok(Pulse::Beats),
            Some(Err(error)) => {
                tracing::debug!(%error, "a read failed");
                self.still_there()?;
                Ok(Pulse::Fails)
            }
            None => {
                self.pulse = Some(pulse);
                Ok(Pulse::Waits)
            }
        }
    }

    /// Dials until a server answers, the old link comes back, or the kernel's
    /// patience ends.
    fn dial(&mut self, engine: &Engine, deadline: Deadline) -> Result<Dialled> {
        /// One server's time to answer.
        const ONE_TRY: Duration = Duration::from_secs(10);
        let mut last: Option<Error> = None;
        loop {
            self.dials += 1;
            let one = Deadline::after(deadline.remaining().min(ONE_TRY));
            let failure = match self.dial_once(one) {
                Ok(server) => return Ok(server),
                Err(error) => error,
            };
            let may_come = matches!(
                failure.kind(),
                ErrorKind::Unreachable
                    | ErrorKind::TimedOut
                    | ErrorKind::NotFound
                    | ErrorKind::NotReady
                    | ErrorKind::Io
            );
            if !may_come {
                return Err(failure);
            }
            if deadline.has_passed() {
                // A try that the deadline cut short says less than one before.
                let cut_short = failure.kind() == ErrorKind::TimedOut;
                return Err(last.filter(|_| cut_short).unwrap_or(failure));
            }
            last = Some(failure);
            let pause = jittered(self.pauses.pause());
            let turn = Deadline::after(deadline.remaining().min(pause));
            if self.spent {
                // Reads fail at once: only the server is worth waiting for.
                self.pause(engine, turn);
                self.still_there()?;
                continue;
            }
            match self.feel_pulse(engine, turn)? {
                Pulse::Beats => return Ok(Dialled::NotNeeded(HealOutcome::Healthy)),
                Pulse::Fails => {
                    self.spent = true;
                    return Ok(Dialled::NotNeeded(HealOutcome::BudgetSpent));
                }
                Pulse::Waits => self.still_there()?,
            }
        }
    }

    fn dial_once(&self, deadline: Deadline) -> Result<Dialled> {
        let first = nbd::dial(&self.uri, deadline)?;
        let mut served = first.export.clone();
        served.size = first.export.geometry(nbd::page_size()?)?.size;
        let before = self.device.served(self.uri.export())?;
        let mut differences = served.differences_from(&before);
        // What the server prefers, or can do beside, is not in sysfs.
        differences.retain(|difference| {
            let harmless = matches!(
                difference,
                Difference::Flags { .. } | Difference::BlockSizes { .. }
            );
            !harmless || difference.prevents_reattach()
        });
        let mut sockets = vec![first.stream];
        let wanted = self.device.connections()?;
        while sockets.len() < wanted && first.export.can_multi_conn() {
            let next = nbd::dial(&self.uri, deadline)?;
            if next.export != first.export {
                let message = "the NBD server says of one export another thing on each connection";
                return Err(Error::new(ErrorKind::Protocol, message).at(Stage::Handshake));
            }
            sockets.push(next.stream);
        }
        Ok(Dialled::Server(sockets, differences))
    }

    /// Ends the old links and gives the kernel the new ones until a read comes
    /// back. The kernel says success as well when it dropped the socket because
    /// it did not know the old link for dead yet; given again, it does no harm.
    fn hand_over(
        &mut self,
        engine: &Engine,
        sockets: Vec<OwnedFd>,
        differences: Vec<Difference>,
        deadline: Deadline,
    ) -> Result<HealOutcome> {
        let _lease = Lease::take(engine.roots(), &lease_of(&self.backend), deadline)?;
        self.still_there()?;
        if let Some(link) = engine.links().get(&self.index())
            && link.backend == self.backend
        {
            link.shut_down();
        }
        let before = received(&sockets);
        let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
        loop {
            Reconfigure::new(self.index(), self.timeouts)
                .backend(self.backend.clone())
                .sockets(nbd::duplicate(&sockets)?)
                .send(engine.roots(), deadline)?;
            let turn = Deadline::after(deadline.remaining().min(pauses.pause()));
            match self.feel_pulse(engine, turn)? {
                Pulse::Beats => break,
                Pulse::Fails => self.pause(engine, turn),
                Pulse::Waits => {}
            }
            if deadline.has_passed() {
                let what = format!("a read of nbd{} over the new connection", self.index());
                let error = Error::timed_out(Stage::Reconfigure, deadline.elapsed(), &what);
                return Err(error.with_last_seen(self.device.disk().describe()));
            }
        }
        // Only TCP counts what it brought; of a unix socket the read is taken
        // for the proof.
        let brought = received(&sockets).zip(before);
        if brought.is_some_and(|(now, before)| now < before + SHORTEST_REPLY) {
            return Ok(HealOutcome::DiscardedByKernel);
        }
        let (uri, backend) = (self.uri.clone(), self.backend.clone());
        let link = Link::new(uri, backend, sockets, self.timeouts);
        engine.links().insert(self.index(), link);
        Ok(HealOutcome::Adopted(differences))
    }

    /// Lets time pass in which the device may go away.
    fn pause(&self, engine: &Engine, deadline: Deadline) {
        let mut watch = engine.hub().watch(&self.index().name());
        while watch.next(deadline).is_some() {}
    }

    /// The device is connected, and with its own id: not detached meanwhile.
    fn still_there(&self) -> Result<()> {
        let there = self.device.pid()?.is_some()
            && self.device.backend()?.as_deref() == Some(self.backend.as_str());
        if there {
            return Ok(());
        }
        let message = format!(
            "nbd{} is no longer connected under backend id {}",
            self.index(),
            self.backend
        );
        Err(Error::new(ErrorKind::Vanished, message).at(Stage::Reconfigure))
    }
}

/// What became of the read.
enum Pulse {
    Beats,
    Waits,
    Fails,
}

/// What the dialling came to.
enum Dialled {
    Server(Vec<OwnedFd>, Vec<Difference>),
    NotNeeded(HealOutcome),
}

/// A simple reply without data (`proto.md`): magic, error, cookie.
const SHORTEST_REPLY: u64 = 16;

/// Bytes that the connections have brought; `None` where one does not count.
fn received(sockets: &[OwnedFd]) -> Option<u64> {
    sockets
        .iter()
        .map(|socket| lunbd_sys::socket::tcp_bytes_received(socket).ok())
        .sum()
}

/// Between half of `pause` and all of it, so that the devices of one server do
/// not all dial at once.
pub(super) fn jittered(pause: Duration) -> Duration {
    let noise = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |now| now.subsec_nanos());
    pause / 2 + (pause / 2).mul_f64(f64::from(noise % 1000) / 1000.0)
}
