//! Finds the multipath map of a unit by its paths.

use std::collections::BTreeMap;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::multipath_map::other_paths::{
    refuse_other_units_below, refuse_paths_outside_map,
};
use crate::engine::attach::multipathd::Answers;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::attach::{AttachRequest, Multipath};
use crate::engine::call::CallContext;
use crate::engine::usage::{Extent, Removal, users_of_each};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::{Daemon, Map};
use crate::scsi::Identity;
use crate::uevent::{SettledDevice, Watch};

/// Finds the map of a unit. It is prepared while udev handles the paths.
pub(super) struct MapWaiter {
    /// Sees every new map, since each map is a virtual device.
    watch: Watch,
    daemon: Option<Daemon>,
    wanted: MapPolicy,
}

/// Whether multipathd is told to make a map that it does not make by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MapPolicy {
    /// The attach fails without one.
    Required,
    /// Several paths were named, so the caller expects a map.
    Preferred,
    /// A single path needs no map.
    No,
}

/// The outcome of the search for a map.
#[derive(Debug, Default)]
pub(super) struct UnitMap {
    pub(in crate::engine) map: Option<(Map, SettledDevice)>,
    /// Why there is no map where one was wanted.
    pub(in crate::engine) why_none: Option<String>,
    /// The refused paths that are not in the map, by the name of the disk.
    refused: BTreeMap<String, Error>,
}

impl UnitMap {
    /// # Errors
    /// `Refused`, with the reason, where multipathd refused this path.
    pub(super) fn require_in_map(&mut self, path: &ProbedPath) -> Result<()> {
        self.refused.remove(path.disk.name()).map_or(Ok(()), Err)
    }
}

/// Returns `None` where the request turns multipath off. `named` is the number of
/// paths in the attach.
///
/// # Errors
/// `NotPermitted` or `Io` where it is unknown whether multipathd runs.
pub(super) fn map_waiter(
    engine: &Engine,
    request: &AttachRequest,
    named: usize,
) -> Result<Option<MapWaiter>> {
    let wanted = match request.multipath {
        Multipath::Off => return Ok(None),
        Multipath::Require => MapPolicy::Required,
        Multipath::Prefer if named > 1 => MapPolicy::Preferred,
        Multipath::Prefer => MapPolicy::No,
    };
    Ok(Some(MapWaiter {
        watch: engine.hub().watch("virtual"),
        daemon: Daemon::find(engine.roots())?,
        wanted,
    }))
}

/// Waits for the map of these paths, which udev has handled, and for udev to handle
/// the map. Returns no map where none is required.
///
/// The call tells multipathd of each path, even one known from udev: multipathd
/// answers when it has made the map or decided not to. Where it decided not to and a
/// map is wanted, the call tells it to make the map, unless a path is in use.
///
/// # Errors
/// `NotSupported` where a map is required and there is no multipathd; `Unreachable`
/// where multipathd closed the connection twice; `Refused` where a map is required and
/// multipathd makes none of these paths, or one of them is in use; `IdentityMismatch`
/// where a path is in the map of another unit, or the map holds a path to one; `Refused` or
/// `Unreachable` where the unit has a map that holds none of these paths;
/// `TimedOut` at stage `map`.
pub(super) fn wait_for_map(
    engine: &Engine,
    map_waiter: MapWaiter,
    paths: &[ProbedPath],
    identity: &Identity,
    call: &mut CallContext,
) -> Result<UnitMap> {
    let deadline = call.deadline;
    call.enter(Stage::Map);
    let mut search = SearchForMap::begin(map_waiter, paths, deadline)?;
    let Some(map) = search_for_map(engine, &mut search, paths, identity, deadline)? else {
        let answers = search.daemon.is_some();
        refuse_paths_outside_map(engine, paths, identity, answers, deadline)?;
        return Ok(UnitMap {
            why_none: (search.wanted != MapPolicy::No).then_some(search.why_none.1),
            ..UnitMap::default()
        });
    };
    refuse_other_units_below(engine, &map, paths, identity, deadline)?;
    // Uses a barrier, since the event that made the map may precede the watch.
    let mode = engine.hub().mode();
    let dir = map.disk().dir();
    let proof =
        crate::uevent::settle_again(&mut search.watch, mode, engine.roots(), dir, deadline)?;
    Ok(UnitMap {
        map: Some((map, proof)),
        why_none: None,
        refused: search.answers.refused,
    })
}

/// Waits until the map holds the paths. Returns `None` if none will be made, and none is
/// required.
fn search_for_map(
    engine: &Engine,
    search: &mut SearchForMap,
    paths: &[ProbedPath],
    identity: &Identity,
    deadline: Deadline,
) -> Result<Option<Map>> {
    let mut is_requested = false;
    loop {
        match map_of_paths(paths, &mut search.answers.refused, identity)? {
            MapState::Whole(map) => return Ok(Some(map)),
            MapState::None if !search.answers.delayed => {
                if search.wanted == MapPolicy::No {
                    return Ok(None);
                }
                if let Some(daemon) = search.daemon.as_ref().filter(|_| !is_requested) {
                    is_requested = true;
                    if let Some(none) =
                        request_map(engine, daemon, paths, &mut search.answers, deadline)?
                    {
                        search.why_none = none;
                    }
                    // The next turn reads the map itself, whatever multipathd answered.
                    continue;
                }
                if search.wanted == MapPolicy::Required {
                    return Err(search.no_map());
                }
                return Ok(None);
            }
            MapState::None | MapState::Partial(_) if search.watch.next(deadline).is_some() => {}
            MapState::Partial(map) => {
                return Err(timed_out(&format!("it holds {map}"), deadline));
            }
            MapState::None => return Err(timed_out("there is no map", deadline)),
        }
    }
}

/// Tells multipathd to make a map over these paths, unless one of them is in use. Returns
/// why there will be none.
fn request_map(
    engine: &Engine,
    daemon: &Daemon,
    paths: &[ProbedPath],
    answers: &mut Answers,
    deadline: Deadline,
) -> Result<Option<(ErrorKind, String)>> {
    if let Some(users) = users_of_paths(engine, paths, answers, deadline)? {
        return Ok(Some((ErrorKind::Refused, users)));
    }
    match retry_once_if_restarted(|| answers.request_map(daemon, paths, deadline)) {
        Err(error) if error.kind() == ErrorKind::Unreachable => {
            Ok(Some((error.kind(), error.to_string())))
        }
        refusal => Ok(refusal?.map(|why| (ErrorKind::Refused, why))),
    }
}

/// Why no map may be made over these paths, where one of them is in use. The disk and
/// the map have separate caches: data written to one is not visible through the other.
/// device-mapper refuses a mounted disk, but accepts one that a process has open for
/// writing.
fn users_of_paths(
    engine: &Engine,
    paths: &[ProbedPath],
    answers: &Answers,
    deadline: Deadline,
) -> Result<Option<String>> {
    let disks = paths.iter().map(|path| &path.disk);
    let taken = disks.filter(|disk| !answers.refused.contains_key(disk.name()));
    let disks: Vec<&BlockDevice> = taken.collect();
    let looked = users_of_each(engine, &disks, Extent::All, deadline);
    let looked = looked.map_err(|error| error.at(Stage::Map))?;
    for (disk, users) in disks.iter().zip(&looked) {
        if let Err(in_use) = users.refuse_busy(engine.roots(), disk, Removal::FlushedDisk) {
            return Ok(Some(format!(
                "{in_use}: multipathd was not told to make a map over it; end that use and \
                 attach again"
            )));
        }
    }
    Ok(None)
}

/// The map over these paths. It need not hold the paths that multipathd refused. A
/// refused path that the map holds nevertheless is taken out of `refused`.
fn map_of_paths(
    paths: &[ProbedPath],
    refused: &mut BTreeMap<String, Error>,
    identity: &Identity,
) -> Result<MapState> {
    let mut whole: Option<Map> = None;
    let mut outside = false;
    for path in paths {
        let Some(map) = Map::of_path(&path.disk)? else {
            outside |= !refused.contains_key(path.disk.name());
            continue;
        };
        refused.remove(path.disk.name());
        // A setting of multipathd may spell the unit's name differently.
        let other_name = map.wwid().is_some_and(|wwid| {
            !identity.is(&wwid) && Identity::of([wwid]).compare(identity).is_different()
        });
        let other_map = whole.as_ref().is_some_and(|whole| *whole != map);
        if other_name || other_map {
            let message = format!(
                "{} says that it is {identity} and is in the map {} ({})",
                path.disk.name(),
                map.name(),
                map.uuid()
            );
            let error = Error::new(ErrorKind::IdentityMismatch, message);
            return Err(error.at(Stage::Map).with_found(&identity.names));
        }
        whole = Some(map);
    }
    Ok(match whole {
        Some(map) if outside => {
            let held = map.paths()?;
            let held: Vec<&str> = held.iter().map(BlockDevice::name).collect();
            MapState::Partial(format!("only {}", held.join(", ")))
        }
        Some(map) => MapState::Whole(map),
        None => MapState::None,
    })
}

/// Repeats `call` once if multipathd closed the connection. systemd keeps the socket of a
/// multipathd that restarts, so the next connection waits for the new process.
fn retry_once_if_restarted<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    call().or_else(|error| match error.kind() {
        ErrorKind::Unreachable => call(),
        _ => Err(error),
    })
}

/// The search for a map, after multipathd has been told of each path.
struct SearchForMap {
    watch: Watch,
    /// `None` also if it closed the connection.
    daemon: Option<Daemon>,
    wanted: MapPolicy,
    answers: Answers,
    /// Why there is no map, if there is none.
    why_none: (ErrorKind, String),
}

impl SearchForMap {
    fn begin(map_waiter: MapWaiter, paths: &[ProbedPath], deadline: Deadline) -> Result<Self> {
        let MapWaiter {
            watch,
            mut daemon,
            wanted,
        } = map_waiter;
        let no_daemon = "no multipathd answers in this network namespace".to_owned();
        let mut why_none = (ErrorKind::NotSupported, no_daemon);
        let mut answers = Answers::default();
        if let Some(there) = &daemon {
            why_none.0 = ErrorKind::Refused;
            match retry_once_if_restarted(|| Answers::add_paths(there, paths, deadline)) {
                Ok(received) => answers = received,
                // A map that is there already needs no daemon.
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    why_none = (error.kind(), error.to_string());
                    daemon = None;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            watch,
            daemon,
            wanted,
            answers,
            why_none,
        })
    }

    fn no_map(&self) -> Error {
        let (kind, why) = &self.why_none;
        let message = format!("a multipath map is required and there is none: {why}");
        Error::new(*kind, message).at(Stage::Map)
    }
}

enum MapState {
    /// The map holds every path that multipathd has not refused.
    Whole(Map),
    /// The map holds only some of the paths; the text names them.
    Partial(String),
    None,
}

fn timed_out(seen: &str, deadline: Deadline) -> Error {
    let what = "the multipath map to hold every path";
    Error::timed_out(Stage::Map, deadline, what).with_last_seen(seen)
}

mod other_paths;
#[cfg(test)]
mod tests;
