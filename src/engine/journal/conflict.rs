//! What is refused before anything is done: two volumes on one device, one
//! volume from two sources.

use super::record::{Record, VolumeSpec};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, Source, VolumeId, Wwid};
use crate::scsi::Identity;

/// What a volume lays claim to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claimant<'a> {
    pub(super) volume: &'a VolumeId,
    pub(super) spec: &'a VolumeSpec,
    /// The names that its unit gave itself; none while that is not known.
    pub(super) names: &'a [Wwid],
}

impl<'a> Claimant<'a> {
    pub(super) fn of(record: &'a Record) -> Self {
        let names = record.outcome.as_ref().map(|outcome| &*outcome.names);
        Self {
            volume: &record.volume,
            spec: &record.spec,
            names: names.unwrap_or_default(),
        }
    }

    /// Whether it is meant to be at this address and nobody has said its name.
    pub(super) fn is_meant_at(&self, hctl: Hctl) -> bool {
        let nameless = self.names.is_empty() && self.spec.expect.is_none();
        nameless && self.spec.sources.contains(&Source::Scsi(hctl))
    }

    fn is(&self, name: &Wwid) -> bool {
        self.names.contains(name) || self.spec.expect.as_ref() == Some(name)
    }

    /// Whether the unit that says this of itself is its own. A weak name that a
    /// vendor gives to many units counts for nothing.
    pub(super) fn owns(&self, identity: &Identity) -> bool {
        match self.names.first() {
            Some(name) => identity.wwid() == Some(name),
            None => self
                .spec
                .expect
                .as_ref()
                .is_some_and(|name| identity.is(name)),
        }
    }
}

/// # Errors
/// `InUse` where the volume is known and wanted from elsewhere now;
/// `IdentityMismatch` where it is known as another unit than the expected one.
pub(super) fn with_itself(known: &Record, wanted: &VolumeSpec) -> Result<()> {
    let volume = &known.volume;
    let shared = wanted
        .sources
        .iter()
        .any(|source| known.spec.sources.contains(source));
    if !shared {
        let message = format!(
            "volume {volume} is that of {}, and is wanted from {}: detach it first",
            spelt(&known.spec),
            spelt(wanted)
        );
        return Err(refusal(ErrorKind::InUse, message));
    }
    let ids = [&known.spec, wanted].map(|spec| spec.nbd.as_ref().map(|nbd| &nbd.backend));
    if let [Some(before), Some(now)] = ids
        && before != now
    {
        let message = format!(
            "volume {volume} has backend id {before}, and is wanted under {now}: detach it first"
        );
        return Err(refusal(ErrorKind::InUse, message));
    }
    let initiators =
        [&known.spec, wanted].map(|spec| spec.log_in.as_ref().map(|log_in| &log_in.initiator));
    if let [Some(before), Some(now)] = initiators
        && before != now
    {
        let message = format!(
            "volume {volume} is logged in to as {before}, and is wanted as {now}: detach it first"
        );
        return Err(refusal(ErrorKind::InUse, message));
    }
    let names = known.names();
    if let Some(expected) = &wanted.expect
        && !names.is_empty()
        && !names.contains(expected)
    {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let names = names.join(", ");
        let message = format!("volume {volume} is {names}, and is expected to be {expected}");
        return Err(refusal(ErrorKind::IdentityMismatch, message));
    }
    Ok(())
}

/// # Errors
/// `InUse` where `wanted` names what is `other`'s: a source, an id under which
/// NBD devices are found, or the unit.
pub(super) fn with_another(
    volume: &VolumeId,
    wanted: &VolumeSpec,
    other: Claimant<'_>,
) -> Result<()> {
    let theirs = other.volume;
    let what = |what: String| {
        let message =
            format!("{what} is that of volume {theirs}, and volume {volume} wants it too");
        Err(refusal(ErrorKind::InUse, message))
    };
    if let Some(source) = wanted
        .sources
        .iter()
        .find(|s| other.spec.sources.contains(s))
    {
        return what(format!("source {source}"));
    }
    if let (Some(nbd), Some(their_nbd)) = (&wanted.nbd, &other.spec.nbd)
        && nbd.backend == their_nbd.backend
    {
        return what(format!("backend id {}", nbd.backend));
    }
    if let Some(name) = wanted.expect.as_ref().filter(|name| other.is(name)) {
        return what(format!("unit {name}"));
    }
    Ok(())
}

/// # Errors
/// `IdentityMismatch` where the volume was another unit than the one that was
/// found.
pub(super) fn with_own_unit(known: &Record, found: &Identity) -> Result<()> {
    let own = Claimant::of(known);
    if own.names.is_empty() || own.owns(found) {
        return Ok(());
    }
    let was: Vec<String> = own.names.iter().map(ToString::to_string).collect();
    let (volume, was) = (own.volume, was.join(", "));
    let message = format!("volume {volume} is unit {was}, and its source leads to {found} now");
    Err(refusal(ErrorKind::IdentityMismatch, message))
}

/// # Errors
/// `InUse` where the unit that was found is `other`'s.
pub(super) fn with_unit(volume: &VolumeId, found: &Identity, other: Claimant<'_>) -> Result<()> {
    if !other.owns(found) {
        return Ok(());
    }
    let theirs = other.volume;
    let message = format!(
        "unit {found} is that of volume {theirs}, and the source of volume {volume} leads to it too"
    );
    Err(refusal(ErrorKind::InUse, message))
}

fn spelt(spec: &VolumeSpec) -> String {
    let sources: Vec<String> = spec.sources.iter().map(ToString::to_string).collect();
    sources.join(" and ")
}

fn refusal(kind: ErrorKind, message: String) -> Error {
    Error::new(kind, message).at(Stage::Journal)
}
