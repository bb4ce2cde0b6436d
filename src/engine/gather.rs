//! From the paths of a unit to its multipath map.

use super::Engine;
use super::attach::{AttachRequest, Multipath};
use super::bring::Brought;
use super::phases::Phases;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::{Answer, Daemon, Map};
use crate::scsi::Identity;
use crate::uevent::{Proof, Watch};

/// What finds the map of a unit: got ready while udev is at work on the paths.
pub(super) struct Gathering {
    /// Every map is a virtual device: one watch sees the one that comes.
    watch: Watch,
    daemon: Option<Daemon>,
    required: bool,
}

impl Engine {
    /// `None` where no map is wanted.
    ///
    /// # Errors
    /// `NotPermitted` or `Io` where it cannot be seen whether multipathd runs.
    pub(super) fn gathering(&self, request: &AttachRequest) -> Result<Option<Gathering>> {
        if request.multipath == Multipath::Off {
            return Ok(None);
        }
        Ok(Some(Gathering {
            watch: self.hub().watch("virtual"),
            daemon: Daemon::find(self.roots())?,
            required: request.multipath == Multipath::Require,
        }))
    }

    /// The settled map of these paths, which udev has handled, where there is to
    /// be one.
    ///
    /// multipathd is told of each path, which it may have learnt from udev
    /// already; its answer comes when it has made the map or decided not to.
    ///
    /// # Errors
    /// `NotSupported` where a map is required and no multipathd answers;
    /// `Refused` where multipathd wants no map of these paths; `IdentityMismatch`
    /// where a path is in the map of another unit; `TimedOut` at stage `map`.
    pub(super) fn gather_map(
        &self,
        gathering: Gathering,
        paths: &[Brought],
        identity: &Identity,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Option<(Map, Proof)>> {
        let Gathering {
            mut watch,
            daemon,
            required,
        } = gathering;
        phases.enter(Stage::Map);
        let mut unwanted = Vec::new();
        let mut awaited = required;
        for path in paths {
            let Some(daemon) = &daemon else {
                break;
            };
            let name = path.disk.name();
            match daemon.add_path(name, deadline)? {
                Answer::NotWanted => unwanted.push(name.to_owned()),
                Answer::Delayed => awaited = true,
                _ => {}
            }
        }
        let map = loop {
            match map_of(paths, identity)? {
                Found::Whole(map) => break map,
                Found::None if !awaited => return Ok(None),
                Found::None if daemon.is_none() => {
                    let message = "a multipath map is required, there is none, and no multipathd \
                                   answers in this network namespace to make one";
                    return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Map));
                }
                Found::None if !unwanted.is_empty() => {
                    let message = format!(
                        "a multipath map is required and multipathd's configuration leaves {} out",
                        unwanted.join(", ")
                    );
                    return Err(Error::new(ErrorKind::Refused, message).at(Stage::Map));
                }
                Found::None | Found::Part(_) if watch.next(deadline).is_some() => {}
                Found::Part(map) => {
                    return Err(timed_out(&format!("it holds {map}"), deadline));
                }
                Found::None => return Err(timed_out("there is no map", deadline)),
            }
        };
        // By a barrier: the event that made the map may lie before the watch.
        let mode = self.hub().mode();
        let dir = map.disk().dir();
        let proof = crate::uevent::settle_again(&mut watch, mode, self.roots(), dir, deadline)?;
        Ok(Some((map, proof)))
    }
}

fn map_of(paths: &[Brought], identity: &Identity) -> Result<Found> {
    let mut whole: Option<Map> = None;
    let mut outside = false;
    for path in paths {
        let Some(map) = Map::of_path(&path.disk)? else {
            outside = true;
            continue;
        };
        let other_name = map.wwid().is_some_and(|wwid| !identity.is(&wwid));
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
            Found::Part(format!("only {}", held.join(", ")))
        }
        Some(map) => Found::Whole(map),
        None => Found::None,
    })
}
enum Found {
    /// Every path is in it.
    Whole(Map),
    /// Some are; the text says which.
    Part(String),
    None,
}

fn timed_out(seen: &str, deadline: Deadline) -> Error {
    let what = "the multipath map to hold every path";
    Error::timed_out(Stage::Map, deadline.elapsed(), what).with_last_seen(seen)
}
