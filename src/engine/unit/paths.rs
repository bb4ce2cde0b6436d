//! The paths of a unit.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::unit::place::{UnprovenPath, is_path_of};
use crate::engine::unit::{KnownPath, KnownUnit, PathIdentity, candidates, read_path};
use crate::engine::{Engine, first_names};
use crate::error::{Result, Stage};
use crate::scsi::{Identity, ScsiDevice};

/// The paths to a unit.
#[derive(Debug)]
pub(in crate::engine) struct UnitPaths {
    /// First those that the caller named.
    pub(in crate::engine) paths: Vec<KnownPath>,
    /// The other devices that may be paths of it. Without a path these are all of them.
    pub(in crate::engine) unproven_paths: Vec<UnprovenPath>,
}

impl UnitPaths {
    /// Finds the paths to all devices of this unit. An entry of `known_paths` is reused, unless
    /// the device has a new disk since. If a unit with a name has no path, each device on the bus
    /// has been read itself.
    pub(in crate::engine) fn find(
        engine: &Engine,
        unit: &Identity,
        named_devices: &[ScsiDevice],
        mut known_paths: Vec<KnownPath>,
        deadline: Deadline,
    ) -> Result<Self> {
        loop {
            let UnitDevices {
                found,
                unproven_paths,
            } = UnitDevices::find(engine, unit, named_devices, &mut known_paths, deadline)?;
            known_paths.retain(|path| {
                let now = path.device.disk();
                now.is_ok_and(|now| now.is_none() || now == path.disk)
            });
            let each_was_read = found.is_empty();
            let paths = read_paths(engine, found, &mut known_paths, deadline)?;
            // Devices that went away during their reads prove nothing of the others.
            if each_was_read || !paths.is_empty() {
                return Ok(Self {
                    paths,
                    unproven_paths,
                });
            }
        }
    }
}

fn read_paths(
    engine: &Engine,
    devices: Vec<ScsiDevice>,
    known_paths: &mut Vec<KnownPath>,
    deadline: Deadline,
) -> Result<Vec<KnownPath>> {
    let mut paths = Vec::new();
    for device in devices {
        let known = known_paths.iter().position(|path| path.device == device);
        if let Some(known) = known.map(|at| known_paths.swap_remove(at)) {
            paths.push(known);
            continue;
        }
        match read_path(engine, &device, deadline) {
            Ok(path) => paths.push(path),
            // The device went away during the read.
            Err(_) if !device.is_there() => {}
            Err(error) => return Err(error.at(Stage::Resolve)),
        }
    }
    Ok(paths)
}

/// The paths of [`UnitPaths::find`].
pub(in crate::engine) fn paths_of(
    engine: &Engine,
    unit: &Identity,
    named_devices: &[ScsiDevice],
    known_paths: Vec<KnownPath>,
    deadline: Deadline,
) -> Result<Vec<KnownPath>> {
    let found = UnitPaths::find(engine, unit, named_devices, known_paths, deadline)?;
    Ok(found.paths)
}

/// Asks a disk for its identity if the kernel has read no name of it: the INQUIRY for
/// page 83h at the scan may have failed, and the unit answers now. `None` if the device
/// went away.
fn ask_for_names(
    engine: &Engine,
    device: &ScsiDevice,
    deadline: Deadline,
) -> Result<Option<KnownPath>> {
    /// The read of an identity takes at most a quarter of it.
    const LIMIT: Duration = Duration::from_secs(8);
    match read_path(engine, device, deadline.at_most(LIMIT)) {
        Ok(path) => Ok(Some(path)),
        Err(_) if !device.is_there() => Ok(None),
        Err(error) => Err(error.at(Stage::Resolve)),
    }
}

/// The devices of a unit.
#[derive(Debug, Default)]
struct UnitDevices {
    /// First those that the caller named.
    found: Vec<ScsiDevice>,
    unproven_paths: Vec<UnprovenPath>,
}

impl UnitDevices {
    /// Finds the devices of this unit. A path whose identity had to be read goes to
    /// `known_paths`.
    fn find(
        engine: &Engine,
        unit: &Identity,
        named_devices: &[ScsiDevice],
        known_paths: &mut Vec<KnownPath>,
        deadline: Deadline,
    ) -> Result<Self> {
        let named = named_devices.iter().filter(|device| device.is_there());
        let mut devices = Self {
            found: named.cloned().collect(),
            unproven_paths: Vec::new(),
        };
        if unit.names.is_empty() {
            return Ok(devices);
        }
        let mut add = |devices: &mut Self, candidates| {
            devices.add(
                engine,
                unit,
                named_devices,
                candidates,
                known_paths,
                deadline,
            )
        };
        let indexed = candidates::find_in_index(engine, unit)?;
        let has_index = indexed.is_some();
        let recorded = first_names::devices_with(engine.roots(), &unit.names, &devices.found)?;
        let indexed = indexed.unwrap_or_default();
        add(&mut devices, [indexed, recorded].concat())?;
        // Only the devices themselves prove that none is left.
        if !has_index || devices.found.is_empty() {
            add(&mut devices, candidates::read_each(engine, unit)?)?;
        }
        Ok(devices)
    }

    fn add(
        &mut self,
        engine: &Engine,
        unit: &Identity,
        named_devices: &[ScsiDevice],
        candidates: Vec<ScsiDevice>,
        known_paths: &mut Vec<KnownPath>,
        deadline: Deadline,
    ) -> Result<()> {
        for device in candidates {
            let mut known = self.unproven_paths.iter().map(|unproven| &unproven.device);
            if self.found.contains(&device) || known.any(|known| *known == device) {
                continue;
            }
            let cached = match device.cached_identity() {
                Err(error) if device.is_vanishing(&error) => continue,
                cached => cached?,
            };
            let known = KnownUnit::with(engine, &device, cached)?;
            let (mut identity, cached) = (known.was, known.cached);
            let mut is_silent = false;
            if identity.names.is_empty() {
                let Some(path) = ask_for_names(engine, &device, deadline)? else {
                    continue;
                };
                identity = path.identity_now.of().clone();
                let answers = !matches!(path.identity_now, PathIdentity::Silent(_));
                // No array presents a unit with a removable medium.
                is_silent = match &path.disk {
                    Some(disk) => !answers && !disk.has_removable_medium()?,
                    None => false,
                };
                known_paths.push(path);
            }
            if is_path_of(engine, &device, &identity, unit, named_devices) {
                self.found.push(device);
            } else {
                self.unproven_paths.push(UnprovenPath {
                    device,
                    identity: match cached {
                        Some(cached) if unit.compare(&cached).is_same() => cached,
                        _ => identity,
                    },
                    is_silent,
                });
            }
        }
        Ok(())
    }
}
