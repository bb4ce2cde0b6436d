//! A logical unit on this machine: its identity, and the paths that lead to it.

pub(super) mod candidates;
pub(super) mod paths;
pub(super) mod place;

use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::{Engine, first_names};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Wwid;
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{self, Identity, ScsiDevice, State};

/// How long a path may take to report its names when other paths can report them too.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A SCSI device of a unit, and the evidence for that.
#[derive(Debug)]
pub(super) struct KnownPath {
    pub(super) device: ScsiDevice,
    pub(super) disk: Option<BlockDevice>,
    pub(super) identity_now: PathIdentity,
    /// The device is being removed, and its identity can no longer be read.
    pub(super) is_being_removed: bool,
    /// The device did not answer in time. The request is still under way and keeps other calls
    /// off the device until it returns.
    pub(super) timed_out: bool,
}

/// The identity at the end of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PathIdentity {
    /// The unit answers and reports its identity.
    Live(Identity),
    /// The path does not answer; the identity is from the kernel's last scan.
    Silent(Identity),
    /// The target refuses commands to the address with LOGICAL UNIT NOT SUPPORTED.
    NoUnit(Identity),
    /// Another unit answers than the one that the disk was first, or the kernel has read the
    /// names of another one since and the path is silent: the array has given the address to
    /// another volume.
    Replaced {
        /// The unit that the disk was first.
        was: Identity,
        /// The unit that answers, or whose names the kernel has read.
        now: Identity,
    },
}

impl PathIdentity {
    /// The unit that the disk was first.
    pub(super) fn of(&self) -> &Identity {
        match self {
            Self::Live(identity) | Self::Silent(identity) | Self::NoUnit(identity) => identity,
            Self::Replaced { was, .. } => was,
        }
    }

    /// The unit that an I/O request reaches, as far as it is known.
    pub(super) fn answering_unit(&self) -> &Identity {
        match self {
            Self::Live(now)
            | Self::Silent(now)
            | Self::NoUnit(now)
            | Self::Replaced { now, .. } => now,
        }
    }
}

/// Locks the unit by the strongest of its names, which is the first.
pub(super) fn lock_unit(
    engine: &Engine,
    names: &[Wwid],
    deadline: Deadline,
) -> Result<Option<DeviceLock>> {
    let take = |name| DeviceLock::take(engine.roots(), &DeviceLock::of_unit(name), deadline);
    names.first().map(take).transpose()
}

/// Reads the identity at a device, and compares it with the unit that the disk was first.
pub(super) fn read_path(
    engine: &Engine,
    device: &ScsiDevice,
    deadline: Deadline,
) -> Result<KnownPath> {
    let disk = device.disk()?;
    let cached = cached_identity(device)?;
    // The pages are read first: a device that is being removed loses this attribute before
    // them.
    let state = device.state()?;
    let is_being_removed = state.is_none() && cached.names.is_empty();
    let KnownUnit { was, cached } = if is_being_removed {
        KnownUnit::default()
    } else {
        KnownUnit::with(engine, device, cached)?
    };
    let known = |identity_now, timed_out| KnownPath {
        device: device.clone(),
        disk: disk.clone(),
        identity_now,
        is_being_removed,
        timed_out,
    };
    let silent = |was, cached: Option<Identity>| match cached {
        Some(now) => PathIdentity::Replaced { was, now },
        None => PathIdentity::Silent(was),
    };
    let answers = state == Some(State::Running);
    let Some(there) = disk.as_ref().filter(|_| answers) else {
        return Ok(known(silent(was, cached), false));
    };
    let limit = deadline.at_most(ANSWER_LIMIT.min(deadline.remaining() / 4));
    match scsi::read_identity(engine.roots(), &engine.scheduler, device, there, limit) {
        Ok(now) if was.names.is_empty() || now.compare(&was).is_same() => {
            Ok(known(PathIdentity::Live(now), false))
        }
        Ok(now) => Ok(known(PathIdentity::Replaced { was, now }, false)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Ok(known(PathIdentity::NoUnit(was), false))
        }
        // The path is dead.
        Err(error) => {
            tracing::debug!(hctl = %device.hctl(), %error, "the path does not answer");
            let timed_out = error.kind().is_timeout_or_cancel();
            Ok(known(silent(was, cached), timed_out))
        }
    }
}

/// The devices whose disk was first a unit with this name.
pub(super) fn devices_named(engine: &Engine, name: &Wwid) -> Result<Vec<ScsiDevice>> {
    let recorded = first_names::devices_with(engine.roots(), std::slice::from_ref(name), &[])?;
    let is_named = |device: &ScsiDevice| {
        let cached = cached_identity(device)?;
        if !cached.is(name) && !recorded.contains(device) {
            return Ok(false);
        }
        Ok(KnownUnit::with(engine, device, cached)?.was.is(name))
    };
    let named = |mut devices: Vec<ScsiDevice>| {
        let mut failure = None;
        devices.retain(|device| match is_named(device) {
            Ok(is_named) => is_named,
            Err(error) => {
                failure.get_or_insert(error);
                false
            }
        });
        failure.map_or(Ok(devices), Err)
    };
    let mut units = engine.units.lock();
    let indexed = units.candidates_with_name(engine.roots(), name)?;
    drop(units);
    let mut candidates = indexed.unwrap_or_default();
    if !candidates.is_empty() {
        candidates.extend(recorded.iter().cloned());
        candidates.sort_by_key(ScsiDevice::hctl);
        candidates.dedup();
    }
    let found = named(candidates)?;
    if found.is_empty() {
        // Only the devices themselves prove that there is none.
        return named(ScsiDevice::all(engine.roots())?);
    }
    Ok(found)
}

/// What is known of a device's unit without asking the device.
#[derive(Debug, Default)]
pub(super) struct KnownUnit {
    /// The unit that the disk was when an attach first returned it, else the one in the
    /// kernel's copy. Empty where the device is being removed or is gone.
    pub(super) was: Identity,
    /// The kernel's copy, where that is of another unit: some process had the kernel read the
    /// names again.
    pub(super) cached: Option<Identity>,
}

impl KnownUnit {
    #[cfg(feature = "journal")]
    pub(super) fn of(engine: &Engine, device: &ScsiDevice) -> Result<Self> {
        Self::with(engine, device, cached_identity(device)?)
    }

    /// `cached` is the kernel's copy.
    pub(super) fn with(engine: &Engine, device: &ScsiDevice, cached: Identity) -> Result<Self> {
        Ok(
            match first_names::earlier_unit(engine.roots(), device, &cached)? {
                Some(was) => Self {
                    was,
                    cached: Some(cached).filter(|cached| !cached.names.is_empty()),
                },
                None => Self {
                    was: cached,
                    cached: None,
                },
            },
        )
    }
}

/// The kernel's copy of a device's names; empty where the device is being removed or is gone.
fn cached_identity(device: &ScsiDevice) -> Result<Identity> {
    match device.cached_identity() {
        Err(error) if device.is_vanishing(&error) => Ok(Identity::default()),
        result => result,
    }
}

/// The error for a unit that is not the expected one.
pub(super) fn mismatch(expected: &Wwid, at: &str, found: &Identity) -> Error {
    let message = format!("expected {expected} at {at}, but the unit there reports {found}");
    Error::new(ErrorKind::IdentityMismatch, message)
        .at(Stage::Identify)
        .with_found(&found.names)
}

#[cfg(test)]
mod tests;
