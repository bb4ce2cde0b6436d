//! The paths of a unit that the caller of an attach has not named.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::unit::place::is_path_of;
use crate::engine::unit::{candidates, read_path};
use crate::engine::usage::{Extent, Removal, users_of_each};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Wwid;
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::Map;
use crate::scsi::{Identity, ScsiDevice};

/// Refuses to return a path beside a map that holds other paths of its unit, or that has the
/// unit's name and has lost its paths: data written to one is not visible through the other. The
/// call leaves a path that is in use as it is.
///
/// # Errors
/// `Refused` if multipathd did not put the path into the map; `Unreachable` if multipathd
/// does not answer.
pub(super) fn refuse_paths_outside_map(
    engine: &Engine,
    paths: &[ProbedPath],
    identity: &Identity,
    multipathd_answers: bool,
    deadline: Deadline,
) -> Result<()> {
    let Some((map, held)) = map_of_other_paths(engine, paths, identity)? else {
        return Ok(());
    };
    let disks: Vec<&BlockDevice> = paths.iter().map(|path| &path.disk).collect();
    let users = users_of_each(engine, &disks, Extent::All, deadline);
    let users = users.map_err(|error| error.at(Stage::Map))?;
    let mut each = disks.iter().zip(&users);
    if each.any(|(disk, users)| {
        users
            .refuse_busy(engine.roots(), disk, Removal::FlushedDisk)
            .is_err()
    }) {
        return Ok(());
    }
    let (kind, why) = if multipathd_answers {
        (
            ErrorKind::Refused,
            "multipathd has not added it: see its log",
        )
    } else {
        (
            ErrorKind::Unreachable,
            "multipathd does not answer: start it",
        )
    };
    let names: Vec<&str> = disks.iter().map(|disk| disk.name()).collect();
    let message = format!(
        "{} is not in the map {} of the same unit, which has {}, and data written to one is \
         not visible through the other. {why}, name a path of the map, or turn multipath off",
        names.join(", "),
        map.name(),
        held.as_ref().map_or("no path", BlockDevice::name),
    );
    Err(Error::new(kind, message).at(Stage::Map))
}

/// A map over a path of this unit that is none of `paths`, and that path. Else a map that has
/// a unique name of the unit.
fn map_of_other_paths(
    engine: &Engine,
    paths: &[ProbedPath],
    identity: &Identity,
) -> Result<Option<(Map, Option<BlockDevice>)>> {
    let named: Vec<ScsiDevice> = paths.iter().map(|path| path.device.clone()).collect();
    for device in candidates::find(engine, identity)? {
        if named.contains(&device) {
            continue;
        }
        let there = match device.cached_identity() {
            Err(_) if !device.is_there() => continue,
            there => there?,
        };
        if is_path_of(engine, &device, &there, identity, &named)
            && let Some(disk) = device.disk()?
            && let Some(map) = Map::of_path(&disk)?
        {
            return Ok(Some((map, Some(disk))));
        }
    }
    let is_wanted = |name: &Wwid| name.is_unique() && identity.is(name);
    let Some(map) = Map::of_unit(engine.roots(), is_wanted)? else {
        return Ok(None);
    };
    let held = map.paths()?.into_iter().next();
    Ok(Some((map, held)))
}

/// Refuses a map that holds a disk of another unit. The kernel scanned that unit there, or
/// it answers there now because the array has given the address to another volume.
/// multipathd keeps such a path, and the map would read and write there. The call reads the
/// identity of each path that the caller has not named.
///
/// # Errors
/// `IdentityMismatch`, naming the disk.
pub(super) fn refuse_other_units_below(
    engine: &Engine,
    map: &Map,
    paths: &[ProbedPath],
    identity: &Identity,
    deadline: Deadline,
) -> Result<()> {
    let ours: Vec<ScsiDevice> = paths.iter().map(|path| path.device.clone()).collect();
    // multipathd makes one map of all disks that have one name for it: also where that
    // name is not unique, and where a setting takes it from another property.
    let proves_nothing = identity.is_weak() || !map.wwid().is_some_and(|name| identity.is(&name));
    for disk in map.paths()? {
        let Some(device) = ScsiDevice::of_disk(&disk)? else {
            continue;
        };
        if ours.contains(&device) {
            continue;
        }
        let known = match read_path(engine, &device, deadline) {
            Err(_) if !device.is_there() => continue,
            known => known.map_err(|error| error.at(Stage::Map))?,
        };
        let there = known.identity_now.answering_unit();
        let why = if identity.compare(there).is_different() {
            format!("which is {there} now: make multipathd drop that path")
        } else if proves_nothing && !is_path_of(engine, &device, there, identity, &ours) {
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
