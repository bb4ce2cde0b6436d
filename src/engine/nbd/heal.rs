//! Heals NBD devices whose server went away and came back.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::engine::attach::nbd_options::ContentRule;
use crate::engine::nbd::backend::device_of_backend;
use crate::engine::nbd::known::{current_links, refuse_tls_downgrade};
use crate::engine::nbd::reconnect::NbdReconnect;
use crate::engine::telemetry::{self, Call};
use crate::engine::{Engine, HealOutcome, HealReport, NbdOptions};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex, NbdUri, Source};
use crate::kernel::pool;
use crate::nbd::{DeadLinks, LinkNotice, LinkWatch, NbdDevice, NewTimeouts};

impl Engine {
    /// Looks at every NBD device that was attached by its URI, by this process or an earlier
    /// one, and heals those whose server went away and is back. It compares the export, and
    /// gives the kernel one new connection for each dead one. Live connections stay. The
    /// socket itself shows that the kernel took it, and a read shows that the device serves
    /// I/O. Servers are dialled again until `deadline`, with growing pauses: 64 at once, and
    /// if there are more devices, each in turns of two seconds.
    ///
    /// A device that serves I/O over its other connections is read at some places, which the
    /// [guide](crate::guide::nbd#several-connections) lists. A server that serves other bytes
    /// there on a new connection is refused, and the device is
    /// [`Degraded`](HealOutcome::Degraded) with `IdentityMismatch`.
    ///
    /// If another process made the connections of a device, this process does not see which
    /// of several are dead: it dials and offers one, and closes it if none is dead. If it can
    /// make none, the device is [`Degraded`](HealOutcome::Degraded) too, since a connection of
    /// it may be dead.
    ///
    /// The kernel may take a connection after `deadline`. The engine keeps such a connection open.
    /// The next heal of the device finds out whether the kernel took it, as far as the socket
    /// shows that; a detach closes it.
    ///
    /// A server that hangs without ending its connection is left to the kernel, which takes
    /// the connection for dead when a request has timed out ([`NbdOptions::io_timeout`]). A
    /// device that was disconnected and is still open is not healed: `Failed` with `Vanished`.
    ///
    /// A process does this once when it starts, because devices outlive processes. Devices
    /// with other backend ids are not touched; [`heal_source`](Self::heal_source) is for ids
    /// that the caller gave. Linux 5.14, for backend ids.
    ///
    /// # Errors
    /// If sysfs cannot be read; the failure of one device is its
    /// [`HealOutcome::Failed`].
    pub fn heal(&self, deadline: Deadline) -> Result<Vec<HealReport>> {
        telemetry::measured(Call::Heal, || {
            let mut reconnects = reconnects(self)?;
            let reconnected = heal_all(self, reconnects.values_mut(), deadline).into_iter();
            let without_turn = |reconnect: &NbdReconnect| {
                let what = format!("a thread that heals nbd{}", reconnect.index());
                let error = Error::timed_out(Stage::Resolve, deadline, &what);
                let error = error
                    .with_last_seen(format!("{} devices are healed at once", pool::MAX_THREADS));
                reconnect.report(HealOutcome::Failed(error))
            };
            let mut healings: Vec<HealReport> = reconnected
                .map(|(reconnect, healing)| healing.unwrap_or_else(|| without_turn(reconnect)))
                .collect();
            healings.sort_by_key(|healing| healing.index);
            Ok(healings)
        })
    }

    /// Heals the device of one source that was attached with these options. The device gets
    /// the timeouts that the options set, and keeps the others.
    ///
    /// # Errors
    /// `NotFound` if no device has its backend id; `InvalidInput` if it is no NBD source;
    /// `InUse` if the device is known to use TLS and the source does not.
    pub fn heal_source(
        &self,
        source: &Source,
        options: &NbdOptions,
        deadline: Deadline,
    ) -> Result<HealReport> {
        telemetry::measured(Call::Heal, || {
            Ok(self
                .reconnect_handle(source, options)?
                .proceed(self, deadline))
        })
    }

    /// Heals one device in several turns: the next turn continues with what one turn has
    /// found out, and with a read that the kernel holds until the device has a server.
    ///
    /// # Errors
    /// As [`heal_source`](Self::heal_source).
    pub fn reconnect_handle(
        &self,
        source: &Source,
        options: &NbdOptions,
    ) -> Result<ReconnectHandle> {
        let Source::Nbd(uri) = source else {
            let message = format!("{source} is no NBD source: only those are healed");
            return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
        };
        let backend = options.backend_of(source);
        let Some(device) = device_of_backend(self, &backend)? else {
            let message = format!("no NBD device has backend id {backend}");
            return Err(Error::new(ErrorKind::NotFound, message).at(Stage::Resolve));
        };
        refuse_tls_downgrade(self, &device, uri, &backend)?;
        let reconnect = NbdReconnect::new(device, uri.clone(), backend, options.timeouts);
        Ok(ReconnectHandle(
            reconnect.with_content(options.content_rule()),
        ))
    }

    /// As [`reconnect_handle`](Self::reconnect_handle), for a volume of the journal: with its
    /// options, and the names that its content had last.
    ///
    /// # Errors
    /// As [`heal_source`](Self::heal_source).
    #[cfg(feature = "journal")]
    pub fn reconnect_handle_of(
        &self,
        record: &crate::engine::journal::Record,
    ) -> Result<ReconnectHandle> {
        let Some(source) = record.spec.sources.first() else {
            let error = Error::new(ErrorKind::InvalidInput, "the volume has no source");
            return Err(error.at(Stage::Resolve));
        };
        self.reconnect_handle(source, &record.nbd_options())
    }

    /// Returns a healer, which heals links as they die until it is dropped.
    ///
    /// # Errors
    /// `Io` if this process cannot listen to the kernel's multicasts; `TimedOut`.
    pub fn healer(&self, deadline: Deadline) -> Result<Healer<'_>> {
        let dead_links = DeadLinks::listen(deadline)?;
        Ok(Healer {
            engine: self,
            deaths: dead_links.watch(None),
            pending: reconnects(self)?,
            next_link_check: Instant::now() + LINK_CHECK_INTERVAL,
        })
    }
}

/// Every device whose server is known: by our own link, or by a backend id
/// that is a URI.
fn reconnects(engine: &Engine) -> Result<BTreeMap<NbdIndex, NbdReconnect>> {
    engine
        .nbd_offers
        .close_those_of_gone_devices(engine.roots());
    let mut reconnects = BTreeMap::new();
    for device in NbdDevice::all(engine.roots())? {
        reconnects
            .extend(reconnect(engine, device)?.map(|reconnect| (reconnect.index(), reconnect)));
    }
    Ok(reconnects)
}

fn reconnect(engine: &Engine, device: NbdDevice) -> Result<Option<NbdReconnect>> {
    let Some(backend) = device.backend()?.filter(|_| device.disk().dir().exists()) else {
        return Ok(None);
    };
    let Ok(backend) = backend.parse::<BackendId>() else {
        return Ok(None);
    };
    if let Some(link) = current_links(engine, &device).get(&device.index())
        && link.backend == backend
    {
        let (uri, timeouts) = (link.uri.clone(), link.timeouts);
        let rule = ContentRule {
            expected: link.expected.clone(),
            ..ContentRule::default()
        };
        let reconnect = NbdReconnect::new(device, uri, backend, timeouts);
        return Ok(Some(reconnect.with_content(rule)));
    }
    // Another process has connected it: the device keeps the timeouts of that process.
    let unknown = NewTimeouts::default();
    let uri = backend.as_str().parse::<NbdUri>().ok();
    Ok(uri.map(|uri| NbdReconnect::new(device, uri, backend, unknown)))
}

/// Heals all, [as many at once](pool::MAX_THREADS) as the pool has threads. If there are
/// more, those whose last turn is longest ago come first, and none has a second turn
/// before all have had one. The result of a device whose turn did not come by
/// `deadline` is `None`.
fn heal_all<'a>(
    engine: &Engine,
    reconnects: impl Iterator<Item = &'a mut NbdReconnect>,
    deadline: Deadline,
) -> Vec<(&'a mut NbdReconnect, Option<HealReport>)> {
    /// Longer than a working device and a working server take to answer.
    const TURN: Duration = Duration::from_secs(2);
    let mut reconnects: Vec<&mut NbdReconnect> = reconnects.collect();
    reconnects.sort_by_key(|reconnect| reconnect.last_attempt());
    let turn = if reconnects.len() > pool::MAX_THREADS {
        TURN
    } else {
        Duration::MAX
    };
    let each = reconnects.iter_mut().map(|reconnect| &mut **reconnect);
    let one = |reconnect: &mut NbdReconnect| {
        let limit = deadline.at_most(turn);
        let healing = reconnect.reconnect(engine, limit);
        let is_over = healing.outcome.serves() || !limit.has_passed();
        (healing, is_over)
    };
    let reconnected = pool::round_robin(Stage::Resolve, each, deadline, one);
    let failed = |reconnect: &NbdReconnect, error| reconnect.report(HealOutcome::Failed(error));
    let reconnected = reconnects
        .into_iter()
        .zip(reconnected)
        .map(|(reconnect, reconnected)| {
            let healing =
                reconnected.map(|one| one.unwrap_or_else(|error| failed(reconnect, error)));
            if let Some(healing) = &healing {
                telemetry::heal_report(healing.outcome.as_str());
            }
            (reconnect, healing)
        });
    reconnected.collect()
}

/// The reconnect of one NBD device: see [`Engine::reconnect_handle`].
#[derive(Debug)]
pub struct ReconnectHandle(NbdReconnect);

impl ReconnectHandle {
    /// Heals the device, or reports by `deadline` what prevents it. It dials the server until
    /// then, with growing pauses.
    pub fn proceed(&mut self, engine: &Engine, deadline: Deadline) -> HealReport {
        let healing = self.0.reconnect(engine, deadline);
        telemetry::heal_report(healing.outcome.as_str());
        healing
    }
}

/// The interval between two checks of this process's sockets: the kernel may have no memory
/// for its notice of a dead link.
const LINK_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Heals links as they die: see [`Engine::healer`].
#[derive(Debug)]
pub struct Healer<'a> {
    engine: &'a Engine,
    deaths: LinkWatch,
    /// The devices to look at, and those that lack a connection.
    pending: BTreeMap<NbdIndex, NbdReconnect>,
    /// The time of the next check of this process's sockets.
    next_link_check: Instant,
}

impl Healer<'_> {
    /// Waits for the next reports and returns them: at first for every device, then for those
    /// that lose a connection, and again for each that still lacks one, until it has all or
    /// is detached. If a server answers and refuses, or serves another export, the pauses grow
    /// up to 2 s; they are 15 to 30 s for a device that serves I/O over connections of another
    /// process and is not known to lack one. The result is empty if the deadline passes without
    /// a report.
    ///
    /// # Errors
    /// If sysfs cannot be read.
    pub fn next(&mut self, deadline: Deadline) -> Result<Vec<HealReport>> {
        /// A link that dies meanwhile waits no longer than this.
        const TURN: Duration = Duration::from_secs(5);
        loop {
            let rests = self.pending.values().map(NbdReconnect::next_try);
            let wakes = match rests.min() {
                // A device is due now.
                Some(None) => break,
                Some(Some(until)) => until.min(self.next_link_check),
                None => self.next_link_check,
            };
            // The kernel may have no memory for its notice, and sends none to other network
            // namespaces. Then only this process's sockets show a death.
            let turn = wakes.saturating_duration_since(Instant::now());
            let turn = deadline.at_most(turn);
            match self.deaths.next(turn) {
                Some(notice) => self.handle_notice(notice)?,
                None if deadline.has_passed() => return Ok(Vec::new()),
                None if self.next_link_check <= Instant::now() => {
                    self.next_link_check = Instant::now() + LINK_CHECK_INTERVAL;
                    self.add_dead_links()?;
                }
                None => {}
            }
        }
        while let Some(notice) = self.deaths.next(Deadline::after(Duration::ZERO)) {
            self.handle_notice(notice)?;
        }
        let turn = deadline.at_most(TURN);
        let due = self.pending.values_mut();
        let due = due.filter(|reconnect| reconnect.next_try().is_none());
        let reconnected = heal_all(self.engine, due, turn).into_iter();
        let mut reports: Vec<HealReport> = reconnected.filter_map(|(_, healing)| healing).collect();
        reports.sort_by_key(|healing| healing.index);
        for healing in &reports {
            let is_over = match &healing.outcome {
                HealOutcome::Failed(error) => error.kind() == ErrorKind::Vanished,
                HealOutcome::Degraded(_) => false,
                outcome => outcome.serves(),
            };
            if is_over {
                self.pending.remove(&healing.index);
            } else if !turn.has_passed()
                && let Some(reconnect) = self.pending.get_mut(&healing.index)
            {
                reconnect.back_off();
            }
        }
        Ok(reports)
    }

    fn add_dead_links(&mut self) -> Result<()> {
        let links = self.engine.links.lock();
        let dead: Vec<_> = links
            .iter()
            .filter(|(_, link)| link.state().dead > 0)
            .map(|(index, _)| *index)
            .collect();
        drop(links);
        dead.into_iter()
            .try_for_each(|index| self.handle_notice(LinkNotice::Dead(index)))
    }

    fn handle_notice(&mut self, notice: LinkNotice) -> Result<()> {
        match notice {
            LinkNotice::Dead(index) => {
                let device = NbdDevice::find(self.engine.roots(), index)?;
                let reconnect = device
                    .map(|device| reconnect(self.engine, device))
                    .transpose()?;
                if let Some(reconnect) = reconnect.flatten() {
                    self.add_device(index, reconnect).note_connection_died();
                }
            }
            LinkNotice::Resync => {
                for (index, reconnect) in reconnects(self.engine)? {
                    self.add_device(index, reconnect);
                }
            }
        }
        Ok(())
    }

    /// Adds a device. A known entry stays, unless the device has another id now.
    fn add_device(&mut self, index: NbdIndex, reconnect: NbdReconnect) -> &mut NbdReconnect {
        match self.pending.entry(index) {
            Entry::Occupied(known) => {
                let known = known.into_mut();
                if !known.has_id_of(&reconnect) {
                    *known = reconnect;
                }
                known
            }
            Entry::Vacant(place) => place.insert(reconnect),
        }
    }
}
