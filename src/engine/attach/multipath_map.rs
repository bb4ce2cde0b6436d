//! From the paths of a unit to its multipath map.

use std::collections::BTreeMap;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::multipathd::Answers;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::attach::{AttachRequest, Multipath};
use crate::engine::timing::StageTimer;
use crate::engine::usage::{Act, Extent};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::{Daemon, Map};
use crate::scsi::{Identity, ScsiDevice};
use crate::uevent::{Proof, Watch};

/// What finds the map of a unit: got ready while udev is at work on the paths.
pub(super) struct MapWaiter {
    /// Every map is a virtual device: one watch sees the one that comes.
    watch: Watch,
    daemon: Option<Daemon>,
    wanted: MapPolicy,
}

/// Whether multipathd is to make a map that it does not make by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MapPolicy {
    /// The attach fails without one.
    Required,
    /// Several paths were named, so the caller counts on one.
    Preferred,
    /// One path alone is as good without.
    No,
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct UnitMap {
    pub(in crate::engine) map: Option<(Map, Proof)>,
    /// Why there is no map that was wanted.
    pub(in crate::engine) why_none: Option<String>,
    /// The paths that are not in the map, since multipathd refused them.
    refused: BTreeMap<String, Error>,
}

impl UnitMap {
    /// # Errors
    /// Why this path is not in the map: `Refused`.
    pub(super) fn require_in_map(&mut self, path: &ProbedPath) -> Result<()> {
        self.refused.remove(path.disk.name()).map_or(Ok(()), Err)
    }
}

impl Engine {
    /// `None` where no map is wanted. `named` is how many paths the attach names.
    ///
    /// # Errors
    /// `NotPermitted` or `Io` where it cannot be seen whether multipathd runs.
    pub(super) fn map_waiter(
        &self,
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
            watch: self.hub().watch("virtual"),
            daemon: Daemon::find(self.roots())?,
            wanted,
        }))
    }

    /// The settled map of these paths, which udev has handled, where there is to
    /// be one.
    ///
    /// multipathd is told of each path, which it may have learnt from udev
    /// already; its answer comes when it has made the map or decided not to. Where it
    /// decided not to and a map is wanted, it is told to make the map, unless a path is
    /// in use.
    ///
    /// # Errors
    /// `NotSupported` where a map is required and there is no multipathd; `Unreachable`
    /// where multipathd went away twice;
    /// `Refused` where a map is required and multipathd makes none of these paths, or
    /// one of them is in use;
    /// `IdentityMismatch` where a path is in the map of another unit, or the map holds a path
    /// of one; `TimedOut` at stage `map`.
    pub(super) fn wait_for_map(
        &self,
        map_waiter: MapWaiter,
        paths: &[ProbedPath],
        identity: &Identity,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<UnitMap> {
        let MapWaiter {
            mut watch,
            mut daemon,
            wanted,
        } = map_waiter;
        timer.enter(Stage::Map);
        let mut kind_of_none = ErrorKind::NotSupported;
        let mut why_none = "no multipathd answers in this network namespace".to_owned();
        let mut answers = Answers::default();
        if let Some(there) = &daemon {
            kind_of_none = ErrorKind::Refused;
            match told_again(|| Answers::about(there, paths, deadline)) {
                Ok(said) => answers = said,
                // A map that is there needs no daemon.
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    kind_of_none = error.kind();
                    why_none = error.to_string();
                    daemon = None;
                }
                Err(error) => return Err(error),
            }
        }
        let mut told = false;
        let map = loop {
            match Self::map_of_paths(paths, &mut answers.refused, identity)? {
                MapSearch::Whole(map) => break map,
                MapSearch::None if !answers.delayed => {
                    match &daemon {
                        _ if wanted == MapPolicy::No => return Ok(UnitMap::default()),
                        Some(daemon) if !told => {
                            told = true;
                            let refusal = match self.users_of_paths(paths, &answers, deadline)? {
                                None => {
                                    match told_again(|| {
                                        answers.have_map_made(daemon, paths, deadline)
                                    }) {
                                        Err(error) if error.kind() == ErrorKind::Unreachable => {
                                            kind_of_none = error.kind();
                                            Some(error.to_string())
                                        }
                                        said => said?,
                                    }
                                }
                                users => users,
                            };
                            why_none = refusal.unwrap_or(why_none);
                            // What stands now decides, whatever it answered.
                            continue;
                        }
                        _ => {}
                    }
                    if wanted == MapPolicy::Required {
                        return Err(no_map(kind_of_none, &why_none));
                    }
                    return Ok(UnitMap {
                        why_none: Some(why_none),
                        ..UnitMap::default()
                    });
                }
                MapSearch::None | MapSearch::StageTimings(_) if watch.next(deadline).is_some() => {}
                MapSearch::StageTimings(map) => {
                    return Err(timed_out(&format!("it holds {map}"), deadline));
                }
                MapSearch::None => return Err(timed_out("there is no map", deadline)),
            }
        };
        self.refuse_strangers_below(&map, paths, identity, deadline)?;
        // By a barrier: the event that made the map may lie before the watch.
        let mode = self.hub().mode();
        let dir = map.disk().dir();
        let proof = crate::uevent::settle_again(&mut watch, mode, self.roots(), dir, deadline)?;
        Ok(UnitMap {
            map: Some((map, proof)),
            why_none: None,
            refused: answers.refused,
        })
    }

    /// Why no map may be made over these paths, where one of them is in use. The disk and
    /// the map have caches of their own: what is written to the one is not seen in the
    /// other. device-mapper refuses a disk that is mounted, and takes one that a process
    /// has open for writing.
    fn users_of_paths(
        &self,
        paths: &[ProbedPath],
        answers: &Answers,
        deadline: Deadline,
    ) -> Result<Option<String>> {
        let disks = paths.iter().map(|path| &path.disk);
        let taken = disks.filter(|disk| !answers.refused.contains_key(disk.name()));
        let disks: Vec<&BlockDevice> = taken.collect();
        let looked = self.users_of_each(&disks, Extent::All, deadline);
        let looked = looked.map_err(|error| error.at(Stage::Map))?;
        for (disk, users) in disks.iter().zip(&looked) {
            if let Err(in_use) = users.refuse_busy(self.roots(), disk, Act::TakeFlushed) {
                return Ok(Some(format!(
                    "{in_use}: multipathd was not told to make a map over it; end that use and \
                     attach again"
                )));
            }
        }
        Ok(None)
    }

    /// The map over these paths. The map need not hold those that multipathd refused. A
    /// refused path that the map holds all the same is refused no more.
    fn map_of_paths(
        paths: &[ProbedPath],
        refused: &mut BTreeMap<String, Error>,
        identity: &Identity,
    ) -> Result<MapSearch> {
        let mut whole: Option<Map> = None;
        let mut outside = false;
        for path in paths {
            let Some(map) = Map::of_path(&path.disk)? else {
                outside |= !refused.contains_key(path.disk.name());
                continue;
            };
            refused.remove(path.disk.name());
            // A setting of multipathd's may spell the unit's name in a way of its own.
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
                return Err(error.at(Stage::Map));
            }
            whole = Some(map);
        }
        Ok(match whole {
            Some(map) if outside => {
                let held = map.paths()?;
                let held: Vec<&str> = held.iter().map(BlockDevice::name).collect();
                MapSearch::StageTimings(format!("only {}", held.join(", ")))
            }
            Some(map) => MapSearch::Whole(map),
            None => MapSearch::None,
        })
    }

    /// Refuses a map that holds a disk of another unit: what the kernel scanned there, or
    /// what answers there now, since the array has given the address to another volume.
    /// multipathd keeps such a path, and the map would read and write there. Each path that
    /// the caller has not named is asked who it is.
    ///
    /// # Errors
    /// `IdentityMismatch`, naming the disk.
    fn refuse_strangers_below(
        &self,
        map: &Map,
        paths: &[ProbedPath],
        identity: &Identity,
        deadline: Deadline,
    ) -> Result<()> {
        let ours: Vec<ScsiDevice> = paths.iter().map(|path| path.device.clone()).collect();
        // multipathd makes one map of all disks that have one name for it: also where that
        // name is not unique, and where a setting takes it from another property.
        let proves_nothing =
            identity.is_weak() || !map.wwid().is_some_and(|name| identity.is(&name));
        for disk in map.paths()? {
            let Some(device) = ScsiDevice::of_disk(&disk)? else {
                continue;
            };
            if ours.contains(&device) {
                continue;
            }
            let known = match self.look_at(&device, deadline) {
                Err(_) if !device.is_there() => continue,
                known => known.map_err(|error| error.at(Stage::Map))?,
            };
            let there = known.identity_now.who_answers();
            let why = if identity.compare(there).is_different() {
                format!("which is {there} now: make multipathd drop that path")
            } else if proves_nothing && !self.is_path_of(&device, there, identity, &ours) {
                format!(
                    "and no unique name proves that it is {identity}: give each unit its own \
                     name (with tgt: scsi_id)"
                )
            } else {
                continue;
            };
            let (map, disk, hctl) = (map.name(), disk.name(), device.hctl());
            let message =
                format!("the map {map} also holds {disk} ({hctl}), {why}, or attach without a map");
            return Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Map));
        }
        Ok(())
    }
}

/// What `tell` says, or says the second time where multipathd went away at the first:
/// systemd keeps the socket of a multipathd that restarts, and the next connection waits
/// for the new one.
fn told_again<T>(mut tell: impl FnMut() -> Result<T>) -> Result<T> {
    tell().or_else(|error| match error.kind() {
        ErrorKind::Unreachable => tell(),
        _ => Err(error),
    })
}

fn no_map(kind: ErrorKind, why: &str) -> Error {
    let message = format!("a multipath map is required and there is none: {why}");
    Error::new(kind, message).at(Stage::Map)
}

enum MapSearch {
    /// Every path that multipathd has not refused is in it.
    Whole(Map),
    /// Some are; the text says which.
    StageTimings(String),
    None,
}

fn timed_out(seen: &str, deadline: Deadline) -> Error {
    let what = "the multipath map to hold every path";
    Error::timed_out(Stage::Map, deadline, what).with_last_seen(seen)
}

#[cfg(test)]
mod tests;
