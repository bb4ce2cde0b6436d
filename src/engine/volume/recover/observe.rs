//! The state of a volume in sysfs, and the devices that belong to no volume.

use std::collections::BTreeSet;
use std::fmt;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::journal::{Operation, Outcome, Record, VolumeGuard};
use crate::engine::nbd::backend::device_of_backend;
use crate::engine::nbd::outcome::{HealOutcome, HealReport};
use crate::engine::unit::paths::paths_of;
use crate::engine::unit::place::{PathPlace, PlaceComparison};
use crate::engine::unit::{KnownPath, KnownUnit, PathIdentity, devices_named};
use crate::engine::volume::devices_at_sources::{
    devices_at_sources, returned_disk, returned_disk_of,
};
use crate::engine::volume::recover::{Action, Condition, Foreign};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Source, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::Map;
use crate::nbd::NbdDevice;
use crate::scsi::{self, Identity, ScsiDevice};

/// What is there of a volume.
#[derive(Debug)]
pub(super) enum Observed {
    Nothing,
    /// The unit reports its identity or, for NBD, the kernel has a device of its backend
    /// id.
    Answers {
        what: String,
        /// Whether it is the device that the attach returned.
        handed_out: bool,
        /// The answering paths that the kernel takes for empty.
        without_size: Vec<ScsiDevice>,
    },
    /// No path answers.
    Silent(String),
    /// Another unit answers.
    Other(String),
}

impl fmt::Display for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing of it is attached"),
            Self::Answers {
                what, handed_out, ..
            } => {
                f.write_str(what)?;
                let note = ", as another device than the attach returned";
                f.write_str(if *handed_out { "" } else { note })
            }
            Self::Silent(what) | Self::Other(what) => f.write_str(what),
        }
    }
}

impl Observed {
    pub(super) fn answers(what: String, handed_out: bool) -> Self {
        Self::Answers {
            what,
            handed_out,
            without_size: Vec::new(),
        }
    }

    pub(super) fn condition(&self, record: &Record) -> Condition {
        let operation = record.operation();
        match (self, operation) {
            (Self::Nothing, _) => Condition::Gone,
            (_, Some(Operation::Detach { .. })) => Condition::HalfDetached,
            (_, Some(Operation::Attach))
            | (Self::Answers { .. }, Some(Operation::Resize { .. })) => Condition::HalfAttached,
            (
                Self::Answers {
                    handed_out: true, ..
                },
                None,
            ) => Condition::Complete,
            (Self::Answers { .. } | Self::Other(_), _) => Condition::Changed,
            (Self::Silent(_), _) => Condition::LinkDead,
        }
    }
}

/// The condition and the action that follow from the heal of a volume's NBD device.
pub(super) fn after_healing(condition: Condition, healing: HealReport) -> (Condition, Action) {
    match healing.outcome {
        // A device that answered late has lost nothing.
        HealOutcome::Healthy | HealOutcome::DiscardedByKernel | HealOutcome::Degraded(_) => {
            (condition, Action::Nothing)
        }
        outcome if outcome.serves() => (Condition::LinkDead, Action::Healed),
        HealOutcome::Failed(error) => (Condition::LinkDead, Action::Failed(error)),
        outcome => {
            let message = format!("nbd{} is not reconnected: {outcome}", healing.index);
            let error = Error::new(ErrorKind::Unreachable, message).at(Stage::Reconfigure);
            (Condition::LinkDead, Action::Failed(error))
        }
    }
}

pub(super) fn observe(
    engine: &Engine,
    guard: &VolumeGuard,
    record: &Record,
    deadline: Deadline,
) -> Result<Observed> {
    if let Some(nbd) = &record.spec.nbd {
        return Ok(match device_of_backend(engine, &nbd.backend)? {
            Some(device) => {
                let what = format!("{}: {}", device.index().name(), device.facts()?);
                let outcome = record.outcome.as_ref();
                let handed_out =
                    outcome.is_some_and(|outcome| outcome.devno == device.disk().devno());
                Observed::answers(what, handed_out)
            }
            None => Observed::Nothing,
        });
    }
    let names = record.names();
    let unique = names.first().filter(|name| name.is_unique());
    let mut named_devices = match unique {
        Some(name) => devices_named(engine, name)?,
        None => Vec::new(),
    };
    if record.outcome.is_none() || unique.is_none() {
        // Its names are not known yet, or none is unique: the device at its address
        // may be it.
        let own = Identity::of(names.iter().cloned());
        for device in devices_at_sources(engine, record)?.scsi {
            let identity = KnownUnit::of(engine, &device)?.was;
            let place = PathPlace::of(engine.roots(), &device);
            let is_other = record.outcome.is_some() && own.compare(&identity).is_different();
            let is_other = is_other || guard.belongs_to_another(&identity, &place);
            if !is_other && !named_devices.contains(&device) {
                named_devices.push(device);
            }
        }
    }
    let paths = paths_of(
        engine,
        &Identity::default(),
        &named_devices,
        Vec::new(),
        deadline,
    )?;
    if paths.is_empty() {
        return Ok(match map_of(engine, &names)? {
            Some(map) => Observed::Silent(format!("the map {} has no paths", map.name())),
            None => match returned_disk_of(engine, record)? {
                Some(disk) => Observed::Other(format!(
                    "{}, which the attach returned, is there as another unit",
                    disk.name()
                )),
                None => Observed::Nothing,
            },
        });
    }
    observe_paths(engine, &paths, record.outcome.as_ref())
}

fn map_of(engine: &Engine, names: &[Wwid]) -> Result<Option<Map>> {
    for name in names.iter().filter(|name| name.is_unique()) {
        if let Some(map) = Map::find(engine.roots(), name)? {
            return Ok(Some(map));
        }
    }
    Ok(None)
}

fn observe_paths(
    engine: &Engine,
    paths: &[KnownPath],
    outcome: Option<&Outcome>,
) -> Result<Observed> {
    let mut live = Vec::new();
    let mut silent = Vec::new();
    let mut is_unmapped = false;
    let mut without_size = Vec::new();
    for path in paths {
        let hctl = path.device.hctl();
        match &path.identity_now {
            PathIdentity::Replaced { was, now } => {
                let what = format!("{now} answers at {hctl}, where {was} was scanned");
                return Ok(Observed::Other(what));
            }
            PathIdentity::Live(identity) => {
                let has_none = scsi::shows_no_size(&path.device)?;
                let note = if has_none { ", without a size" } else { "" };
                live.push(format!("{hctl} is {identity}{note}"));
                without_size.extend(has_none.then(|| path.device.clone()));
            }
            PathIdentity::NoUnit(was) => {
                is_unmapped = true;
                silent.push(format!(
                    "{hctl}, scanned as {was}, is no unit of its target any more"
                ));
            }
            PathIdentity::Silent(was) => {
                silent.push(format!("{hctl}, scanned as {was}, does not answer"));
            }
        }
    }
    if live.is_empty() {
        let seen = silent.join("; ");
        return Ok(if is_unmapped {
            Observed::Other(seen)
        } else {
            Observed::Silent(seen)
        });
    }
    live.extend(silent);
    let handed_out = match outcome {
        Some(outcome) => {
            let disks = paths.iter().filter_map(|path| path.disk.clone());
            let disks: Vec<BlockDevice> = disks.collect();
            handed_out_disk(engine, outcome, &disks)?.is_some()
        }
        None => false,
    };
    let what = live.join("; ");
    Ok(Observed::Answers {
        what,
        handed_out,
        without_size,
    })
}

/// The device that the attach returned, where it is still there with the same
/// sequence number and is one of the unit's `disks` or a map over one.
pub(super) fn handed_out_disk(
    engine: &Engine,
    outcome: &Outcome,
    disks: &[BlockDevice],
) -> Result<Option<BlockDevice>> {
    let Some(disk) = returned_disk(engine, outcome)? else {
        return Ok(None);
    };
    let below = match Map::of_disk(&disk)? {
        Some(map) => map.paths()?,
        None => vec![disk.clone()],
    };
    let is_one = disks.iter().any(|of_unit| below.contains(of_unit));
    Ok(is_one.then_some(disk))
}

/// The disks and connected NBD devices that belong to no volume.
pub(super) fn find_foreign(engine: &Engine, known: &[Record]) -> Result<Vec<Foreign>> {
    let names: BTreeSet<Wwid> = known.iter().flat_map(Record::names).collect();
    // A unit without a unique name is known only by its place.
    let is_meant_at = |device: &ScsiDevice| {
        let place = PathPlace::of(engine.roots(), device);
        let mut sources = known.iter().flat_map(|record| &record.spec.sources);
        sources.any(|source| place.compare_source(source) == PlaceComparison::Same)
    };
    let mut foreign = Vec::new();
    for device in ScsiDevice::all(engine.roots())? {
        match describe_foreign(engine, &device) {
            Ok(Some(found)) => {
                let ours = match found.names.first() {
                    Some(name) if name.is_unique() => names.contains(name),
                    _ => is_meant_at(&device),
                };
                foreign.extend((!ours).then_some(found));
            }
            Ok(None) => {}
            // A device that is being removed loses its attributes before its
            // directory.
            Err(error) if error.kind() == ErrorKind::Vanished || !device.is_there() => {}
            Err(error) => return Err(error),
        }
    }
    let specs = known.iter().filter_map(|record| record.spec.nbd.as_ref());
    let ids: BTreeSet<&str> = specs.map(|nbd| nbd.backend.as_str()).collect();
    for device in NbdDevice::all(engine.roots())? {
        let backend = device.backend()?;
        let ours = backend.as_deref().is_some_and(|id| ids.contains(id));
        if device.pid()?.is_some() && !ours {
            foreign.push(Foreign {
                device: device.index().name(),
                node: Some(device.disk().node(engine.roots())),
                names: Vec::new(),
                backend,
            });
        }
    }
    Ok(foreign)
}

fn describe_foreign(engine: &Engine, device: &ScsiDevice) -> Result<Option<Foreign>> {
    if !device.is_disk()? {
        return Ok(None);
    }
    let disk = device.disk()?;
    Ok(Some(Foreign {
        device: Source::from(device.hctl()).to_string(),
        node: disk.map(|disk| disk.node(engine.roots())),
        names: device.cached_identity()?.names,
        backend: None,
    }))
}
