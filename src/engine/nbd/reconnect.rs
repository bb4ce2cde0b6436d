//! Heals one NBD device.

mod content;
mod evidence;
mod offer;
mod probe;
mod receivers;
mod replace;

use std::time::{Duration, Instant};

use crate::deadline::{Backoff, Deadline, jittered};
use crate::engine::Engine;
use crate::engine::attach::nbd_options::ContentRule;
use crate::engine::nbd::dialled_connection::{DIAL_LIMIT, DialledConnection};
use crate::engine::nbd::outcome::{HealOutcome, HealReport};
use crate::engine::nbd::queue_facts::learn_queue_facts;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex, NbdUri, Source};
use crate::kernel::worker::Pending;
use crate::nbd::{Connection, Difference, KnownContent, LinkState, NbdDevice, NewTimeouts};

/// A device, and what is known of its link.
#[derive(Debug)]
pub(in crate::engine) struct NbdReconnect {
    device: NbdDevice,
    uri: NbdUri,
    backend: BackendId,
    /// The timeouts that the device gets; it has them already if this process attached it.
    timeouts: NewTimeouts,
    rule: ContentRule,
    /// A connection that is proven already, and is offered first.
    proven: Option<DialledConnection>,
    /// A read that is under way. On a dead link it waits for a new one, and its return proves
    /// that there is one.
    probe: Option<Pending<()>>,
    /// Every connection of ours had ended when that read began, so a connection of another
    /// process answers it.
    own_connections_had_ended: bool,
    /// How the export of the taken connections differs from the earlier one. It is kept
    /// until the caller gets it.
    adopted: Option<Vec<Difference>>,
    /// The kernel did not take the connection that it was offered last.
    no_slot_is_dead: bool,
    /// How many offers in a row the kernel did not take. A turn may end between two.
    refused_offers: u32,
    /// How many receivers ran without a live connection of this process after a wait for their
    /// end.
    known_surplus: usize,
    died: Option<Instant>,
    lost_connection: LostConnection,
    /// The dead-connection timeout has passed: requests fail already, so no waiting request
    /// can be lost any more.
    budget_is_spent: bool,
    pauses: Backoff,
    dials: u32,
    /// No attempt is made before this time.
    next_try: Option<Instant>,
    last_attempt: Option<Instant>,
}

impl NbdReconnect {
    pub(in crate::engine) fn new(
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
            rule: ContentRule::default(),
            proven: None,
            probe: None,
            own_connections_had_ended: false,
            adopted: None,
            no_slot_is_dead: false,
            refused_offers: 0,
            known_surplus: 0,
            died: None,
            lost_connection: LostConnection::None,
            budget_is_spent: false,
            pauses: Backoff::new(Duration::from_millis(20), Duration::from_secs(2)),
            dials: 0,
            next_try: None,
            last_attempt: None,
        }
    }

    /// Sets what its content must be.
    pub(super) fn with_content(mut self, rule: ContentRule) -> Self {
        self.rule = rule;
        self
    }

    /// Sets a connection that is offered first, and is known to lead to the device's volume.
    pub(in crate::engine) fn with_proven(
        mut self,
        connection: Connection,
        content: KnownContent,
        differences: Vec<Difference>,
    ) -> Self {
        self.proven = Some(DialledConnection::new(
            connection,
            Some(content),
            differences,
        ));
        self
    }

    pub(in crate::engine) fn index(&self) -> NbdIndex {
        self.device.index()
    }

    /// Delays the next attempt: the last one failed at once, and the next would too.
    pub(in crate::engine) fn back_off(&mut self) {
        /// For a device that may have all of its connections.
        const IF_UNSURE: Duration = Duration::from_secs(30);
        let pause = match self.lost_connection {
            LostConnection::Possible => IF_UNSURE,
            LostConnection::None | LostConnection::Seen => self.pauses.pause(),
        };
        self.next_try = Some(Instant::now() + jittered(pause));
    }

    /// When the next attempt may begin; `None` if it may begin now.
    pub(super) fn next_try(&self) -> Option<Instant> {
        self.next_try.filter(|until| *until > Instant::now())
    }

    /// When the last attempt began.
    pub(in crate::engine) fn last_attempt(&self) -> Option<Instant> {
        self.last_attempt
    }

    /// Notes that a link of it has died.
    pub(super) fn note_connection_died(&mut self) {
        self.died.get_or_insert_with(Instant::now);
        if std::mem::replace(&mut self.lost_connection, LostConnection::Seen)
            == LostConnection::Possible
        {
            self.next_try = None;
        }
    }

    /// Heals the device, or reports by `deadline` what prevents it.
    #[tracing::instrument(skip_all, fields(index = %self.index(), uri = %self.uri))]
    pub(in crate::engine) fn reconnect(
        &mut self,
        engine: &Engine,
        deadline: Deadline,
    ) -> HealReport {
        self.last_attempt = Some(Instant::now());
        let outcome = self
            .try_reconnect(engine, deadline)
            .unwrap_or_else(HealOutcome::Failed);
        tracing::info!(?outcome, "ended an attempt to heal the device");
        if outcome.serves() {
            self.died = None;
            self.budget_is_spent = false;
            if !matches!(outcome, HealOutcome::Degraded(_)) {
                self.refused_offers = 0;
                self.lost_connection = LostConnection::None;
            }
        }
        if let HealOutcome::Adopted(differences) = &outcome {
            self.note_other_content(engine, differences);
        }
        self.report(outcome)
    }

    /// Whether both are of a device with the same id.
    pub(super) fn has_id_of(&self, other: &Self) -> bool {
        self.backend == other.backend
    }

    /// The report with this outcome.
    pub(in crate::engine) fn report(&self, outcome: HealOutcome) -> HealReport {
        let budget = self.died.zip(self.timeouts.dead_connection);
        HealReport {
            index: self.index(),
            source: Source::Nbd(self.uri.clone()),
            backend: self.backend.clone(),
            budget_left: budget.map(|(died, budget)| budget.saturating_sub(died.elapsed())),
            outcome,
            dials: self.dials,
        }
    }

    fn try_reconnect(&mut self, engine: &Engine, deadline: Deadline) -> Result<HealOutcome> {
        /// Longer than a working server takes for one block.
        const READ_LIMIT: Duration = Duration::from_secs(1);
        self.keep_or_close_earlier_offer(engine, deadline)?;
        self.no_slot_is_dead = false;
        let state = self.link_state(engine)?;
        let is_dead = state.is_dead() || (self.died.is_some() && !state.has_several());
        let limit = if is_dead { Duration::ZERO } else { READ_LIMIT };
        match self.probe_io(engine, deadline.at_most(limit))? {
            ProbeResult::Answers => {
                learn_queue_facts(engine, &self.device, deadline);
                return self.restore_connections(engine, deadline);
            }
            ProbeResult::Fails => {
                self.require_configured(engine, deadline)?;
                self.budget_is_spent = true;
            }
            ProbeResult::Waits => {}
        }
        self.reconnect_dead(engine, deadline)
    }

    /// Replaces the lost connections of a device that serves I/O.
    fn restore_connections(&mut self, engine: &Engine, deadline: Deadline) -> Result<HealOutcome> {
        // The kernel may have run the command of an earlier offer just now.
        self.keep_or_close_earlier_offer(engine, deadline)?;
        if self.own_connections_had_ended && self.adopted.is_none() {
            // It serves over connections of another process.
            self.forget_dead_connections(engine);
        }
        self.note_receivers_if_each_runs(engine);
        let state = self.link_state(engine)?;
        let may_lack_some = (state.has_several() || state.may_have_more) && !state.is_whole();
        if (state.dead > 0 || may_lack_some)
            && let Some(failure) = self.fill_slots(engine, deadline)?
            && let Some(lack) = self.missing_connection_error(self.link_state(engine)?, failure)
        {
            return Ok(HealOutcome::Degraded(lack));
        }
        if self.adopted.is_some()
            && let Some(failure) = self.receive_over_each(engine, deadline)?
        {
            return Ok(HealOutcome::Degraded(failure));
        }
        let adopted = self.adopted.take();
        Ok(adopted.map_or(HealOutcome::Healthy, HealOutcome::Adopted))
    }

    /// Why a device that serves I/O is not known to have all of its connections, after
    /// `failure` prevented a further one. `None` if it may well have no more than one.
    fn missing_connection_error(&mut self, state: LinkState, failure: Error) -> Option<Error> {
        if state.dead > 0 {
            return Some(failure);
        }
        let leads_elsewhere = failure.kind() == ErrorKind::IdentityMismatch;
        if !state.has_several() && !leads_elsewhere {
            return None;
        }
        if self.lost_connection == LostConnection::None {
            self.lost_connection = LostConnection::Possible;
        }
        let message = format!(
            "nbd{} serves I/O, and is not known to have all of its connections: another process \
             may have made some, and no further one can be made",
            self.index()
        );
        let error = Error::new(failure.kind(), message);
        let error = error.at(failure.stage().unwrap_or(Stage::Dial));
        Some(error.caused_by(failure))
    }

    /// Offers new connections for a device whose I/O waits or fails, until a read returns.
    fn reconnect_dead(&mut self, engine: &Engine, deadline: Deadline) -> Result<HealOutcome> {
        self.note_connection_died();
        let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
        let mut unproven = None;
        let mut offered = false;
        loop {
            let state = self.link_state(engine)?;
            if state.live == 0 {
                let server = match self.dial(engine, deadline)? {
                    Dialled::Connection(server) => server,
                    Dialled::NotNeeded(outcome) => return Ok(outcome),
                };
                if server.prevents_reattach() {
                    return Ok(HealOutcome::GeometryChanged(server.differences));
                }
                offered = true;
                self.wait_for_old_receivers(engine, deadline);
                unproven = self.offer(engine, server, deadline)?;
            }
            if self.link_state(engine)?.live > 0 {
                // The waiting read may need only one connection, so a failure is ignored.
                self.fill_slots(engine, deadline)?;
            }
            let pause = deadline.at_most(pauses.pause());
            match self.probe_io(engine, pause)? {
                ProbeResult::Answers => break,
                ProbeResult::Fails => self.pause(engine, pause),
                ProbeResult::Waits => self.end_connections_that_block_receivers(engine),
            }
            if deadline.has_passed() {
                let what = format!("a read of nbd{} over its connections", self.index());
                let error = Error::timed_out(Stage::Reconfigure, deadline, &what);
                return Err(error.with_last_seen(self.device.disk().describe()));
            }
        }
        if let Some(unproven) = unproven {
            self.keep_if_server_replied(engine, unproven, deadline)?;
        }
        if offered && self.adopted.is_none() {
            if self.own_connections_had_ended {
                self.forget_dead_connections(engine);
            }
            return Ok(HealOutcome::DiscardedByKernel);
        }
        self.restore_connections(engine, deadline)
    }

    /// Dials until a server answers, the old link comes back, or the kernel lets requests
    /// fail.
    fn dial(&mut self, engine: &Engine, deadline: Deadline) -> Result<Dialled> {
        if let Some(server) = self.proven.take() {
            return Ok(Dialled::Connection(server));
        }
        let mut last: Option<Error> = None;
        loop {
            // A server may serve one client alone, and that may be an earlier offer.
            self.keep_or_close_earlier_offer(engine, deadline)?;
            self.dials += 1;
            let limit = deadline.at_most(DIAL_LIMIT);
            let failure = match self.dial_once(engine, limit) {
                Ok(server) => return Ok(Dialled::Connection(server)),
                Err(error) => error,
            };
            let may_return = matches!(
                failure.kind(),
                ErrorKind::Unreachable
                    | ErrorKind::TimedOut
                    | ErrorKind::NotFound
                    | ErrorKind::NotReady
                    | ErrorKind::Quarantined
                    | ErrorKind::Io
            );
            if !may_return {
                return Err(failure);
            }
            if deadline.has_passed() {
                // An attempt that the deadline cut short tells less than the one before.
                let cut_short = failure.kind().is_timeout_or_cancel();
                return Err(last.filter(|_| cut_short).unwrap_or(failure));
            }
            last = Some(failure);
            let pause = deadline.at_most(jittered(self.pauses.pause()));
            if self.budget_is_spent {
                // Reads fail at once, so only a server is worth waiting for.
                self.pause(engine, pause);
                self.require_connected()?;
                continue;
            }
            match self.probe_io(engine, pause)? {
                ProbeResult::Answers => {
                    let outcome = self.restore_connections(engine, deadline)?;
                    return Ok(Dialled::NotNeeded(outcome));
                }
                ProbeResult::Fails => {
                    self.budget_is_spent = true;
                    return Ok(Dialled::NotNeeded(HealOutcome::BudgetSpent));
                }
                ProbeResult::Waits => {
                    self.require_connected()?;
                }
            }
        }
    }

    /// Waits until `deadline`. The device may go away meanwhile.
    fn pause(&self, engine: &Engine, deadline: Deadline) {
        let mut watch = engine.hub().watch(&self.index().name());
        while watch.next(deadline).is_some() {}
    }
}

/// What is known of a lost connection that was not replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LostConnection {
    None,
    /// The device serves I/O, and could get no further connection.
    Possible,
    /// The kernel's notice or a read has shown the loss.
    Seen,
}

/// The result of the read.
enum ProbeResult {
    Answers,
    Waits,
    Fails,
}

/// The result of dialling.
enum Dialled {
    Connection(DialledConnection),
    NotNeeded(HealOutcome),
}
