//! The devices at the addresses of a volume's sources, no matter to which volume they
//! belong, and the device that its attach returned. If the attach of a volume was not
//! completed, nothing but the addresses is known.

use std::collections::BTreeSet;

use crate::engine::Engine;
use crate::engine::attach::addresses::are_scanned;
use crate::engine::detach::resolve::addresses_of;
use crate::engine::journal::{Outcome, Record, VolumeGuard};
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::unit::KnownUnit;
use crate::engine::unit::place::PathPlace;
use crate::error::Result;
use crate::id::{Hctl, Source, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::machine;
use crate::nbd::NbdDevice;
use crate::scsi::ScsiDevice;

/// See [`devices_at_sources`].
#[derive(Debug, Default)]
pub(super) struct DevicesAtSources {
    pub(in crate::engine) scsi: Vec<ScsiDevice>,
    nbd: Vec<NbdDevice>,
}

impl DevicesAtSources {
    /// Whether no device has appeared since `before`.
    pub(super) fn has_only_devices_of(&self, before: &Self) -> bool {
        self.scsi.iter().all(|device| before.scsi.contains(device))
            && self.nbd.iter().all(|device| before.nbd.contains(device))
    }
}

/// The devices at the addresses of a volume's sources, no matter to which volume they
/// belong.
pub(super) fn devices_at_sources(engine: &Engine, record: &Record) -> Result<DevicesAtSources> {
    let mut there = DevicesAtSources::default();
    if let Some(nbd) = &record.spec.nbd {
        there.nbd = engine
            .backends
            .lock()
            .of_backend(engine.roots(), &nbd.backend)?;
        return Ok(there);
    }
    for source in &record.spec.sources {
        if !is_renumbered(engine, record, source) {
            there.scsi.extend(at_source(engine, source)?);
        }
    }
    Ok(there)
}

fn at_source(engine: &Engine, source: &Source) -> Result<Vec<ScsiDevice>> {
    let mut there = Vec::new();
    for hctl in scsi_addresses_of(engine, source)? {
        there.extend(ScsiDevice::find(engine.roots(), hctl)?);
    }
    Ok(there)
}

/// The addresses of a source; empty for an NBD source, which is no path of a SCSI
/// unit.
pub(super) fn scsi_addresses_of(engine: &Engine, source: &Source) -> Result<BTreeSet<Hctl>> {
    match source {
        Source::Nbd(_) => Ok(BTreeSet::new()),
        source => addresses_of(engine, source),
    }
}

/// Whether a source is an address that the kernel may have assigned to another
/// device: the record is from an earlier boot, and no unique name of the unit is
/// known.
pub(super) fn is_renumbered(engine: &Engine, record: &Record, source: &Source) -> bool {
    let is_known = record.names().first().is_some_and(Wwid::is_unique);
    let Some(boot) = &record.boot else {
        return false;
    };
    let is_address = matches!(source, Source::Scsi(_));
    let now = || machine::boot_id(engine.roots());
    is_address && !is_known && now().is_some_and(|now| now != *boot)
}

/// Whether the device at a source's addresses belongs to another volume or is another
/// unit than expected, or whether the addresses no longer identify the volume. A
/// device that reports no names may be the volume's.
pub(super) fn leads_to_another(
    engine: &Engine,
    guard: &VolumeGuard,
    record: &Record,
    source: &Source,
) -> Result<bool> {
    if is_renumbered(engine, record, source) {
        return Ok(true);
    }
    let names = record.names();
    let expected = names.first();
    for device in at_source(engine, source)? {
        let identity = KnownUnit::of(engine, &device)?.was;
        let place = PathPlace::of(engine.roots(), &device);
        let is_expected = |name: &Wwid| identity.names.is_empty() || identity.is(name);
        if guard.belongs_to_another(&identity, &place) || !expected.is_none_or(is_expected) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the kernel may still bring a device of the volume: it runs a scan or an NBD connect
/// whose caller has gone.
pub(super) fn may_bring_a_device(engine: &Engine, record: &Record) -> Result<bool> {
    if let Some(nbd) = &record.spec.nbd {
        // The connect holds the lock until the kernel returns.
        return DeviceLock::is_held(engine.roots(), &DeviceLock::of_backend(&nbd.backend));
    }
    for source in &record.spec.sources {
        if are_scanned(engine, &scsi_addresses_of(engine, source)?)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The device that the attach returned, by its sequence number, whatever unit it is now.
pub(super) fn returned_disk(engine: &Engine, outcome: &Outcome) -> Result<Option<BlockDevice>> {
    let Some(disk) = BlockDevice::of(engine.roots(), outcome.devno)? else {
        return Ok(None);
    };
    Ok((disk.diskseq()? == outcome.diskseq).then_some(disk))
}

/// The device that the attach of a SCSI volume returned in this boot, whatever unit it is now;
/// `None` also before Linux 5.15, where disks have no sequence number.
pub(super) fn returned_disk_of(engine: &Engine, record: &Record) -> Result<Option<BlockDevice>> {
    let outcome = record.outcome.as_ref().filter(|it| it.diskseq.is_some());
    match (outcome, &record.boot) {
        (Some(outcome), Some(boot)) if machine::boot_id(engine.roots()).as_ref() == Some(boot) => {
            returned_disk(engine, outcome)
        }
        _ => Ok(None),
    }
}
