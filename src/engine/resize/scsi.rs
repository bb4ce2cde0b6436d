//! The steps of resizing a SCSI unit: every path, then the map.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::attach::addresses::lock_addresses;
use crate::engine::call::CallContext;
use crate::engine::detach::DetachTarget;
use crate::engine::detach::resolve::{ResolvedUnit, addresses_of};
use crate::engine::detach::scsi::{named_devices, unit_of};
use crate::engine::resize::{ResizeRequest, Resized};
use crate::engine::unit::paths::paths_of;
use crate::engine::unit::{KnownPath, PathIdentity, lock_unit, mismatch};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::{self, Daemon, Map};
use crate::scsi::{self, Identity};
use crate::uevent::{self, Watch};

pub(super) fn resize_scsi(
    engine: &Engine,
    mut resolved: ResolvedUnit,
    request: &ResizeRequest,
    call: &mut CallContext,
) -> Result<Resized> {
    let deadline = call.deadline;
    for source in &request.more {
        resolved.addresses.extend(addresses_of(engine, source)?);
    }
    call.enter(Stage::Lock);
    let _locks = lock_addresses(engine, resolved.locked_addresses(), deadline)?;

    call.enter(Stage::Identify);
    let named_devices = named_devices(engine, &resolved, request.expected.as_ref())?;
    let known = paths_of(
        engine,
        &Identity::default(),
        &named_devices,
        Vec::new(),
        deadline,
    )?;
    let identity = unit_of(engine, &resolved, &known, request.expected.as_ref())?;
    call.enter(Stage::Lock);
    let _lock = lock_unit(engine, &identity.names, deadline)?;
    call.enter(Stage::Rescan);
    let paths = paths_of(engine, &identity, &named_devices, known, deadline)?;
    let unit = UnitBefore::read(&paths, &resolved, &request.target)?;
    refuse_smaller(engine, &paths, request.at_least, deadline)?;
    let size = rescan_all(engine, &paths, request.at_least, deadline)?;
    if let Some(map) = &unit.map {
        call.enter(Stage::Resize);
        resize_map(engine, map, size, deadline)?;
    }
    call.enter(Stage::Settle);
    let mut watch = engine.hub().watch(unit.disk.name());
    let mode = engine.hub().mode();
    uevent::settle_again(&mut watch, mode, engine.roots(), unit.disk.dir(), deadline)?;
    Ok(Resized {
        node: unit.disk.node(engine.roots()),
        old_size: unit.size,
        size,
        names: identity.names,
        paths: paths.iter().map(|path| path.device.hctl()).collect(),
        map: unit.map.as_ref().map(|map| map.name().to_owned()),
        changed: unit.size != size || unit.differed(size),
        phases: Vec::new(),
    })
}

/// Refuses a unit that a path reports as too small, before the kernel takes over its size. The
/// rescan reports a path that does not answer, and one that leads to another unit.
fn refuse_smaller(
    engine: &Engine,
    paths: &[KnownPath],
    at_least: Option<u64>,
    deadline: Deadline,
) -> Result<()> {
    let Some(least) = at_least else {
        return Ok(());
    };
    for path in paths {
        if other_unit(path).is_some() {
            continue;
        }
        let Some(disk) = path.device.disk()? else {
            continue;
        };
        let (roots, limit) = (engine.roots(), deadline.half());
        let read = scsi::read_capacity(roots, &engine.scheduler, &path.device, &disk, limit);
        if let Ok(size) = read
            && size < least
        {
            let hctl = path.device.hctl();
            let message = format!("{hctl} has {size} bytes, expected {least}");
            return Err(Error::new(ErrorKind::NotReady, message).at(Stage::Rescan));
        }
    }
    Ok(())
}

/// Makes the kernel read the size of each path again and compares it with the size that the
/// unit reports on that path. One of several gets half of the remaining time, so that a silent
/// path leaves time for the others.
fn rescan_all(
    engine: &Engine,
    paths: &[KnownPath],
    at_least: Option<u64>,
    deadline: Deadline,
) -> Result<u64> {
    let mut sizes = BTreeSet::new();
    let mut without = Vec::new();
    let mut cause = None;
    for path in paths {
        let limit = if paths.len() == 1 {
            deadline
        } else {
            deadline.half()
        };
        match rescan_one(engine, path, at_least, limit) {
            Ok(size) => {
                sizes.insert(size);
            }
            Err(error) => {
                without.push(format!("{}: {error}", path.device.hctl()));
                cause.get_or_insert(error);
            }
        }
    }
    if let Some(cause) = cause {
        let kind = match cause.kind() {
            kind @ (ErrorKind::TimedOut | ErrorKind::Cancelled | ErrorKind::IdentityMismatch) => {
                kind
            }
            _ => ErrorKind::NotReady,
        };
        let message = format!(
            "the new size is not on every path, so the unit was not resized: {}",
            without.join("; ")
        );
        let error = Error::new(kind, message).at(Stage::Rescan);
        return Err(error.caused_by(cause));
    }
    match sizes.pop_first() {
        Some(size) if sizes.is_empty() => Ok(size),
        _ => {
            let message = "the paths report different sizes: the array may still be resizing";
            Err(Error::new(ErrorKind::NotReady, message).at(Stage::Rescan))
        }
    }
}

/// The unit that answers in place of the path's own; without a name if there is none.
fn other_unit(path: &KnownPath) -> Option<Identity> {
    match &path.identity_now {
        PathIdentity::Replaced { now, .. } => Some(now.clone()),
        PathIdentity::NoUnit(_) => Some(Identity::default()),
        PathIdentity::Live(_) | PathIdentity::Silent(_) => None,
    }
}

fn rescan_one(
    engine: &Engine,
    path: &KnownPath,
    at_least: Option<u64>,
    deadline: Deadline,
) -> Result<u64> {
    let hctl = path.device.hctl();
    if let Some(now) = other_unit(path)
        && let Some(name) = path.identity_now.of().wwid()
    {
        return Err(mismatch(name, &hctl.to_string(), &now));
    }
    scsi::rescan(&path.device, &engine.scheduler, deadline)?;
    let gone = || Error::new(ErrorKind::Vanished, "its disk went away");
    let disk = path.device.disk()?.ok_or_else(gone)?;
    let size = scsi::read_capacity(
        engine.roots(),
        &engine.scheduler,
        &path.device,
        &disk,
        deadline,
    )?;
    let shown = disk.size()?;
    if shown != size {
        let message = format!("the unit reports {size} bytes and the kernel shows {shown}");
        return Err(Error::new(ErrorKind::NotReady, message));
    }
    match at_least {
        Some(bytes) if size < bytes => {
            let message = format!("it has {size} bytes, expected {bytes}");
            Err(Error::new(ErrorKind::NotReady, message))
        }
        _ => Ok(size),
    }
}

/// Gives the map the size of its paths, through multipathd where it runs.
fn resize_map(engine: &Engine, map: &Map, size: u64, deadline: Deadline) -> Result<()> {
    let mut watch = engine.hub().watch(map.disk().name());
    if map.disk().size()? == size {
        return Ok(());
    }
    match Daemon::find(engine.roots())? {
        Some(daemon) => resize_by_multipathd(&daemon, map, size, &mut watch, deadline)?,
        None => multipath::grow(engine.roots(), map, size, deadline)?,
    }
    loop {
        let shown = map.disk().size()?;
        if shown == size {
            return Ok(());
        }
        if watch.next(deadline).is_none() {
            let what = format!("the map {} to have {size} bytes", map.name());
            let error = Error::timed_out(Stage::Resize, deadline, &what);
            return Err(error.with_last_seen(format!("it has {shown}")));
        }
    }
}

/// Has multipathd resize the map, and retries: it refuses with only `fail` as long as udev has
/// not announced the new map to it (`cli_handlers.c`, `cli_resize`).
fn resize_by_multipathd(
    daemon: &Daemon,
    map: &Map,
    size: u64,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<()> {
    /// multipathd waits for udev no longer than this (`missing_uev_wait_timeout`, 30 s by default).
    const LONGEST: Duration = Duration::from_secs(35);
    let limit = deadline.at_most(LONGEST);
    let mut pauses = Backoff::for_other_process();
    loop {
        match daemon.resize_map(map.name(), deadline) {
            Err(error)
                if error.kind() == ErrorKind::Refused
                    && !limit.has_passed()
                    && map.is_there()
                    && map.disk().size()? != size =>
            {
                tracing::debug!(%error, "asking multipathd again");
                watch.next(limit.at_most(pauses.pause()));
            }
            answer => return answer.map(drop),
        }
    }
}

/// The unit before the resize.
struct UnitBefore {
    map: Option<Map>,
    /// The map's disk, or the first path's.
    disk: BlockDevice,
    size: u64,
    /// The sizes of the paths in bytes.
    sizes: Vec<u64>,
}

impl UnitBefore {
    fn read(paths: &[KnownPath], resolved: &ResolvedUnit, target: &DetachTarget) -> Result<Self> {
        let not_found = || {
            let message = format!("{target} is not attached");
            Error::new(ErrorKind::NotFound, message).at(Stage::Resolve)
        };
        let disks: Vec<&BlockDevice> = paths.iter().filter_map(|p| p.disk.as_ref()).collect();
        let first = *disks.first().ok_or_else(not_found)?;
        let mut map = resolved.map.clone();
        // A path may be outside the map, such as one that multipathd has given up.
        for disk in &disks {
            if map.is_none() {
                map = Map::of_path(disk)?;
            }
        }
        let disk = map.as_ref().map_or(first, Map::disk).clone();
        Ok(Self {
            size: disk.size()?,
            sizes: disks
                .iter()
                .map(|disk| disk.size())
                .collect::<Result<_>>()?,
            map,
            disk,
        })
    }

    fn differed(&self, size: u64) -> bool {
        self.sizes.iter().any(|&before| before != size)
    }
}
