//! One path of an attach: from an address to a disk whose names are read.

use std::collections::BTreeSet;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::access_state::lasting_access_state;
use crate::engine::attach::scan::scan_address;
use crate::engine::attach::{AttachRequest, Multipath, rollback};
use crate::engine::call::CallContext;
use crate::engine::detach::remove_device::{remove_replaced, remove_unwritten};
use crate::engine::first_names::FirstNames;
use crate::engine::unit::mismatch;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DiskSeq, Hctl, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{pool, udev_record};
use crate::multipath::Daemon;
use crate::scsi::{self, AccessState, Identity, ScannedBy, ScsiDevice};
use crate::transport::RouteKind;
use crate::uevent::Watch;

/// A path whose unit has reported its names.
pub(super) struct ProbedPath {
    pub(in crate::engine) via: RouteKind,
    pub(in crate::engine) device: ScsiDevice,
    pub(in crate::engine) disk: BlockDevice,
    pub(in crate::engine) diskseq: Option<DiskSeq>,
    pub(in crate::engine) identity: Identity,
    /// The ALUA access state; `None` before it is read, and where the unit does not report
    /// it.
    pub(in crate::engine) access_state: Option<AccessState>,
    /// Whether this attach scanned the device.
    pub(in crate::engine) changed: bool,
    pub(in crate::engine) watch: Watch,
}

/// A disk whose names are read.
struct FoundDisk {
    disk: BlockDevice,
    diskseq: Option<DiskSeq>,
    identity: Identity,
}

impl FoundDisk {
    fn probed(
        self,
        via: &RouteKind,
        device: ScsiDevice,
        changed: bool,
        watch: Watch,
    ) -> ProbedPath {
        let Self {
            disk,
            diskseq,
            identity,
        } = self;
        ProbedPath {
            via: via.clone(),
            device,
            disk,
            diskseq,
            identity,
            access_state: None,
            changed,
            watch,
        }
    }
}

/// A path that the attach could not probe.
pub(in crate::engine) struct PathFailure {
    pub(in crate::engine) via: RouteKind,
    pub(in crate::engine) error: Error,
}

/// Probes all paths at once. Each of several paths runs on its own thread, so that no host
/// waits for another. The stages of the slowest path count.
pub(super) fn probe_paths(
    engine: &Engine,
    paths: Vec<(RouteKind, Hctl)>,
    request: &AttachRequest,
    call: &mut CallContext,
) -> Vec<Result<ProbedPath, PathFailure>> {
    let probe_path = |(via, hctl): (RouteKind, Hctl), call: &mut CallContext| {
        let probed = probe_path(engine, &via, hctl, request, call);
        probed.map_err(|error| PathFailure { via, error })
    };
    let parts = call.parts();
    if let [_] = *paths {
        return paths
            .into_iter()
            .map(|path| probe_path(path, call))
            .collect();
    }
    // A path that does not succeed in half of the time leaves the rest to the others.
    let limit = call.deadline.half();
    let vias: Vec<RouteKind> = paths.iter().map(|(via, _)| via.clone()).collect();
    let done = pool::each(Stage::Probe, paths, |path| {
        let mut own = parts.part(limit);
        let probed = probe_path(path, &mut own);
        (probed, own.into_timings())
    });
    let joined = vias.into_iter().zip(done).map(|(via, one)| {
        let (probed, own) = one.map_err(|error| PathFailure { via, error })?;
        call.keep_slowest_part(own);
        probed
    });
    joined.collect()
}

#[tracing::instrument(name = "path", skip_all, fields(%hctl, %via, disk))]
fn probe_path(
    engine: &Engine,
    via: &RouteKind,
    hctl: Hctl,
    request: &AttachRequest,
    call: &mut CallContext,
) -> Result<ProbedPath> {
    // The watch starts before the scan, or it could miss the scan's events.
    let mut watch = engine.hub().watch(&hctl.to_string());
    // The scan itself waits until a device that is being deleted has gone.
    let there = ScsiDevice::find(engine.roots(), hctl)?;
    if let Some(device) = there
        && !device.is_being_deleted()?
        && let Some(found) = use_or_remove_existing(engine, &device, request, &mut watch, call)?
    {
        return Ok(found.probed(via, device, false, watch));
    }
    call.enter(Stage::Scan);
    let device = scan_address(engine, hctl, via, request, call.deadline)?;
    let found = identify(engine, &device, ScannedBy::Caller, &mut watch, call).and_then(|found| {
        require_usable(engine, &device, &found, request, call)?;
        Ok(found)
    });
    match found {
        Ok(found) => Ok(found.probed(via, device, true, watch)),
        Err(error) if error.kind() == ErrorKind::TimedOut => Err(error),
        Err(error) => Err(call.with_deadline(call.deadline.for_rollback(), |call| {
            rollback::device(engine, error, &device, &mut watch, call)
        })),
    }
}

/// The unit of a device that the kernel has, if the kernel knows it as the unit that it is
/// now. If it does not, removes the device, so that a scan brings the unit: returns `None`.
fn use_or_remove_existing(
    engine: &Engine,
    device: &ScsiDevice,
    request: &AttachRequest,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Result<Option<FoundDisk>> {
    let hctl = device.hctl();
    match identify(engine, device, ScannedBy::Other, watch, call) {
        Ok(found) => {
            if let Some(was) = earlier_identity(engine, device, &found)? {
                remove_replaced(engine, device, &found.identity, watch, call)
                    .map_err(|error| stale_not_replaced(&error, &was, hctl, &found))?;
                return Ok(None);
            }
            require_usable(engine, device, &found, request, call)?;
            Ok(Some(found))
        }
        // No unit was connected at the last scan, and the kernel does not probe the
        // device again. Or the target has no unit there any more.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            tracing::info!(%hctl, %error, "deleting the stale device");
            remove_unwritten(engine, device, watch, call).map_err(|failure| {
                let message = format!("{error}; its stale device was not removed: {failure}");
                let stage = failure.stage().unwrap_or(Stage::Delete);
                let error = Error::new(failure.kind(), message).at(stage);
                error.with_holders(failure.holders())
            })?;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Checks that it is the expected unit, waits until it can serve I/O, and reads its size if
/// the kernel has none.
fn require_usable(
    engine: &Engine,
    device: &ScsiDevice,
    found: &FoundDisk,
    request: &AttachRequest,
    call: &mut CallContext,
) -> Result<()> {
    tracing::Span::current().record("disk", found.disk.name());
    require_expected(request, device.hctl(), found)?;
    wait_for_transition(engine, device, found, request, call.deadline)?;
    ensure_size(engine, device, found, call)
}

/// Waits for the disk and reads the names of its unit.
fn identify(
    engine: &Engine,
    device: &ScsiDevice,
    scanned_by: ScannedBy,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Result<FoundDisk> {
    let (roots, scheduler) = (engine.roots(), &engine.scheduler);
    call.enter(Stage::Probe);
    let disk = scsi::wait_for_disk(device, scanned_by, roots, scheduler, watch, call.deadline)?;
    let diskseq = disk.diskseq()?;
    call.enter(Stage::Identify);
    let identity = scsi::read_identity(roots, scheduler, device, &disk, call.deadline)
        .map_err(|error| device_state_error(error, device))?;
    Ok(FoundDisk {
        disk,
        diskseq,
        identity,
    })
}

/// Waits for the end of a transition between ALUA access states. During it the unit serves
/// no I/O, so udev's probe of the disk would take the caller's time. If there may be a map,
/// multipathd reads the states, and this call asks a unit only if the kernel has seen it in
/// transition.
fn wait_for_transition(
    engine: &Engine,
    device: &ScsiDevice,
    found: &FoundDisk,
    request: &AttachRequest,
    deadline: Deadline,
) -> Result<()> {
    if !device.has_port_groups()? {
        return Ok(());
    }
    let may_have_map =
        request.multipath != Multipath::Off && Daemon::find(engine.roots())?.is_some();
    if may_have_map && !device.was_in_transition()? {
        return Ok(());
    }
    let state = lasting_access_state(engine, device, &found.disk, deadline);
    state
        .map(drop)
        .map_err(|error| device_state_error(error, device))
}

/// Makes the kernel read the size of an empty disk. The kernel takes a disk for empty
/// when it reads the size while the path is lost (`sd_revalidate_disk`), and does not
/// read it again.
///
/// # Errors
/// `NotReady` where the disk stays empty, with the unit's own answer to READ CAPACITY.
fn ensure_size(
    engine: &Engine,
    device: &ScsiDevice,
    found: &FoundDisk,
    call: &mut CallContext,
) -> Result<()> {
    let size = found.disk.size();
    if size.map_err(|error| device_state_error(error, device))? > 0 {
        return Ok(());
    }
    call.enter(Stage::Rescan);
    scsi::reread_size(device, &engine.scheduler, call.deadline)?;
    if found.disk.size()? > 0 {
        return Ok(());
    }
    let (roots, scheduler, disk) = (engine.roots(), &engine.scheduler, &found.disk);
    let why = match scsi::read_capacity(roots, scheduler, device, disk, call.deadline) {
        Ok(bytes) => format!("the kernel has not read the unit's size of {bytes} bytes"),
        Err(error)
            if error.kind().is_timeout_or_cancel() || error.kind() == ErrorKind::Quarantined =>
        {
            return Err(error);
        }
        Err(error) => format!("the unit does not report its size: {error}"),
    };
    let message = format!("{} ({}) has no size: {why}", disk.name(), device.hctl());
    Err(Error::new(ErrorKind::NotReady, message).at(Stage::Rescan))
}

/// The name of the unit that the kernel scanned, where another one answers now: an
/// array gave the address to another volume. It is in the kernel's cache or, where
/// some process made the kernel read the names again, in the record of the first attach
/// or in udev's record of the disk's first event.
fn earlier_identity(
    engine: &Engine,
    device: &ScsiDevice,
    found: &FoundDisk,
) -> Result<Option<String>> {
    let cached = device.cached_identity()?;
    let is_another =
        |was: &Identity| !was.names.is_empty() && !was.compare(&found.identity).is_same();
    if is_another(&cached) {
        return Ok(Some(cached.to_string()));
    }
    let first = first_identity(engine, device, &found.disk)?;
    Ok(is_another(&first).then(|| first.to_string()))
}

/// The names that a disk had first, as far as they are known: in the record of the
/// attach that first returned it, else in udev's record of its first event.
pub(in crate::engine) fn first_identity(
    engine: &Engine,
    device: &ScsiDevice,
    disk: &BlockDevice,
) -> Result<Identity> {
    let first = FirstNames::of(engine.roots(), device.hctl(), disk)?.read()?;
    if !first.names.is_empty() {
        return Ok(first);
    }
    Ok(Identity::of(names_in_udev_record(engine, disk)?))
}

/// The NAA and EUI-64 names in udev's record of this disk, found by its sequence
/// number; none before Linux 5.15.
fn names_in_udev_record(engine: &Engine, disk: &BlockDevice) -> Result<BTreeSet<Wwid>> {
    let links = udev_record::read_links(engine.roots(), disk.devno())?;
    // The record may be of an earlier disk with the same device number.
    let instance = disk.diskseq()?;
    let instance = instance.map(|seq| format!("disk/by-diskseq/{seq}"));
    if !instance.is_some_and(|instance| links.contains(&instance)) {
        return Ok(BTreeSet::new());
    }
    Ok(links.iter().filter_map(|link| name_in(link)).collect())
}

/// The device's state where it is unusable: the kernel refuses to open an offline device
/// with the same `ENXIO` as one that is gone (`drivers/scsi/sd.c`, `sd_open`).
fn device_state_error(error: Error, device: &ScsiDevice) -> Error {
    if error.kind().is_timeout_or_cancel() || error.kind() == ErrorKind::Quarantined {
        return error;
    }
    match device.require_usable(Stage::Identify) {
        Err(state) => state.caused_by(error),
        Ok(()) => error,
    }
}

/// The NAA or EUI-64 name in one of udev's by-id links of a SCSI disk.
fn name_in(link: &str) -> Option<Wwid> {
    let name = link.strip_prefix("disk/by-id/")?;
    let serial = name.strip_prefix("scsi-").unwrap_or(name);
    let typed = ["wwn-0x", "2", "3"]
        .iter()
        .any(|kind| serial.starts_with(kind));
    typed.then(|| serial.parse().ok()).flatten()
}

fn require_expected(request: &AttachRequest, hctl: Hctl, found: &FoundDisk) -> Result<()> {
    match &request.expected {
        Some(expected) if !found.identity.is(expected) => {
            Err(mismatch(expected, &hctl.to_string(), &found.identity))
        }
        _ => Ok(()),
    }
}

/// The error if the attach did not remove a stale device.
fn stale_not_replaced(error: &Error, was: &str, hctl: Hctl, found: &FoundDisk) -> Error {
    let (name, now) = (found.disk.name(), &found.identity);
    let message = format!(
        "the array has given {hctl} to another unit: {name} was scanned as {was}, and {now} \
         answers; it was not replaced: {error}"
    );
    Error::new(error.kind(), message).at(error.stage().unwrap_or(Stage::Claim))
}
