//! The devices that may be paths of a unit, by the names that the kernel has read of them.

use crate::engine::Engine;
use crate::error::Result;
use crate::scsi::{Identity, ScsiDevice};

/// Finds them in the index, which may miss one, or reads each device if there is no index.
pub(in crate::engine) fn find(engine: &Engine, unit: &Identity) -> Result<Vec<ScsiDevice>> {
    find_in_index(engine, unit)?.map_or_else(|| read_each(engine, unit), Ok)
}

/// `None` without an index.
pub(super) fn find_in_index(engine: &Engine, unit: &Identity) -> Result<Option<Vec<ScsiDevice>>> {
    let mut units = engine.units.lock();
    units.candidates(engine.roots(), |name| unit.is(name))
}

pub(super) fn read_each(engine: &Engine, unit: &Identity) -> Result<Vec<ScsiDevice>> {
    ScsiDevice::candidates(engine.roots(), |name| unit.is(name))
}
