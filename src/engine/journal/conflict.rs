//! The conflicts that are refused before anything is done: two volumes on one device, and
//! one volume from two sources.

use crate::engine::journal::record::Record;
use crate::engine::journal::spec::{NbdSpec, VolumeSpec};
use crate::engine::unit::place::{PathPlace, PlaceComparison};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, NbdIndex, Source, VolumeId, Wwid};
use crate::scsi::Identity;

/// What a volume claims.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reservation<'a> {
    pub(super) volume: &'a VolumeId,
    pub(super) spec: &'a VolumeSpec,
    /// The names that its unit reported; empty while they are not known.
    pub(super) names: &'a [Wwid],
}

impl<'a> Reservation<'a> {
    pub(super) fn of(record: &'a Record) -> Self {
        let names = record.outcome.as_ref().map(|outcome| &*outcome.names);
        Self {
            volume: &record.volume,
            spec: &record.spec,
            names: names.unwrap_or_default(),
        }
    }

    /// The volume to which a unit may belong, or which is meant to be at its address.
    pub(super) fn owner(
        mut reservations: impl Iterator<Item = Self>,
        identity: &Identity,
        hctl: Hctl,
    ) -> Option<VolumeId> {
        let owner = reservations.find(|one| one.may_own(identity) || one.is_meant_at(hctl));
        owner.map(|owner| owner.volume.clone())
    }

    /// Whether the volume is meant to be at this address while no name of its unit is known.
    pub(super) fn is_meant_at(&self, hctl: Hctl) -> bool {
        let nameless = self.names.is_empty() && self.spec.expect.is_none();
        nameless && self.spec.sources.contains(&Source::Scsi(hctl))
    }

    fn is(&self, name: &Wwid) -> bool {
        self.names.contains(name) || self.spec.expect.as_ref() == Some(name)
    }

    /// What is known of its unit.
    fn identity(&self) -> Identity {
        let expected = self.spec.expect.iter().filter(|_| self.names.is_empty());
        Identity::of(self.names.iter().chain(expected).cloned())
    }

    /// Whether the unit that reports this identity may be the volume's. If the names are not
    /// unique, another unit may report the same.
    fn may_own(&self, identity: &Identity) -> bool {
        self.identity().compare(identity).is_same()
            || self.names.is_empty() && self.spec.expect.iter().any(|name| identity.is(name))
    }

    /// Whether the unit that reports this identity at this place is the volume's. Names that
    /// are not unique count only if one of its sources leads to that place.
    pub(super) fn owns(&self, identity: &Identity, place: &PathPlace) -> bool {
        self.is_owner(identity, |source| {
            place.compare_source(source) == PlaceComparison::Same
        })
    }

    /// Whether the unit that is about to be handed out, at these places, may be the volume's.
    /// It is not if its names are not unique and all of the volume's sources lead elsewhere.
    fn would_share(&self, identity: &Identity, places: &[PathPlace]) -> bool {
        self.is_owner(identity, |source| {
            let mut places = places.iter();
            places.any(|place| place.compare_source(source) != PlaceComparison::Different)
        })
    }

    fn is_owner(&self, identity: &Identity, is_there: impl Fn(&Source) -> bool) -> bool {
        let is_proven = || self.identity().compare(identity).is_proven_same();
        self.may_own(identity) && (is_proven() || self.spec.sources.iter().any(is_there))
    }
}

/// A volume as it is attached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttachedSpec<'a> {
    pub(crate) spec: &'a VolumeSpec,
    /// The names that its unit reported.
    pub(crate) names: &'a [Wwid],
    /// The index of its NBD device, if the caller looked for it.
    pub(crate) nbd_index: Option<NbdIndex>,
}

/// Why a volume must be detached before it can be attached as wanted.
#[derive(Debug)]
pub(crate) struct SpecConflict {
    kind: ErrorKind,
    pub(crate) why: String,
}

impl SpecConflict {
    fn in_use(why: String) -> Self {
        let kind = ErrorKind::InUse;
        Self { kind, why }
    }
}

/// What cannot be changed in place; `None` if an attach can change all that differs.
pub(crate) fn must_be_detached_first(
    attached: AttachedSpec<'_>,
    wanted: &VolumeSpec,
) -> Option<SpecConflict> {
    let is = attached.spec;
    if wanted.source_on_a_path_of(is).is_none() {
        let (from, to) = (describe_sources(is), describe_sources(wanted));
        let why = format!("it is attached from {from} and wanted from {to}");
        return Some(SpecConflict::in_use(why));
    }
    if let (Some(is), Some(wanted)) = (&is.nbd, &wanted.nbd) {
        return nbd_conflict(is, wanted, attached.nbd_index).map(SpecConflict::in_use);
    }
    if let (Some(is), Some(wanted)) = (&is.log_in, &wanted.log_in)
        && is.initiator != wanted.initiator
    {
        let (is, wanted) = (&is.initiator, &wanted.initiator);
        let why = format!("it is logged in to as {is} and wanted as {wanted}");
        return Some(SpecConflict::in_use(why));
    }
    let mut names: Vec<&Wwid> = attached.names.iter().collect();
    if names.is_empty() {
        names.extend(&is.expect);
    }
    let expected = wanted.expect.as_ref()?;
    if names.is_empty() || names.contains(&expected) {
        return None;
    }
    let names: Vec<String> = names.into_iter().map(ToString::to_string).collect();
    let names = names.join(", ");
    Some(SpecConflict {
        kind: ErrorKind::IdentityMismatch,
        why: format!("it is unit {names} and wanted as unit {expected}"),
    })
}

fn nbd_conflict(is: &NbdSpec, wanted: &NbdSpec, index: Option<NbdIndex>) -> Option<String> {
    if is.backend != wanted.backend {
        let (is, wanted) = (&is.backend, &wanted.backend);
        return Some(format!("its backend id is {is} and wanted to be {wanted}"));
    }
    if is.read_only != wanted.read_only {
        let to = if wanted.read_only {
            "read-only"
        } else {
            "writable"
        };
        return Some(format!("it is wanted {to}"));
    }
    if is.connections != wanted.connections {
        let wanted = wanted.connections;
        return Some(format!("it is wanted with {wanted} connections"));
    }
    if is.block_size != wanted.block_size {
        let spelt = |size: Option<u32>| match size {
            Some(bytes) => format!("blocks of {bytes} bytes"),
            None => "the server's block size".to_owned(),
        };
        let (is, wanted) = (spelt(is.block_size), spelt(wanted.block_size));
        return Some(format!("it is attached with {is} and wanted with {wanted}"));
    }
    let wanted = wanted.index.filter(|_| wanted.index != index)?;
    index.map(|_| format!("it is wanted as nbd{wanted}"))
}

/// # Errors
/// `InUse` if the volume must be detached before it can be attached as wanted;
/// `IdentityMismatch` if it is known as another unit than the expected one.
pub(super) fn refuse_spec_change(known: &Record, wanted: &VolumeSpec) -> Result<()> {
    let names = known.outcome.as_ref().map(|outcome| &*outcome.names);
    let attached = AttachedSpec {
        spec: &known.spec,
        names: names.unwrap_or_default(),
        // The attach asks the kernel for the present index.
        nbd_index: None,
    };
    let Some(conflict) = must_be_detached_first(attached, wanted) else {
        return Ok(());
    };
    let message = format!("volume {}: {}: detach it first", known.volume, conflict.why);
    Err(refusal(conflict.kind, message))
}

/// # Errors
/// `InUse` if `wanted` names a source, a backend id or a unit that `other` claims.
pub(super) fn refuse_shared_claim(
    volume: &VolumeId,
    wanted: &VolumeSpec,
    other: Reservation<'_>,
) -> Result<()> {
    let theirs = other.volume;
    let what = |what: String| {
        let message =
            format!("{what} belongs to volume {theirs}, and volume {volume} also wants it");
        Err(refusal(ErrorKind::InUse, message))
    };
    if let Some(source) = wanted.source_on_a_path_of(other.spec) {
        return what(format!("source {source}"));
    }
    if let (Some(nbd), Some(their_nbd)) = (&wanted.nbd, &other.spec.nbd)
        && nbd.backend == their_nbd.backend
    {
        return what(format!("backend id {}", nbd.backend));
    }
    let is_theirs = |name: &&Wwid| name.is_unique() && other.is(name);
    if let Some(name) = wanted.expect.as_ref().filter(is_theirs) {
        return what(format!("unit {name}"));
    }
    Ok(())
}

/// # Errors
/// `IdentityMismatch` if the volume was another unit than the one that was found.
pub(super) fn refuse_other_unit(known: &Record, found: &Identity) -> Result<()> {
    let own = Reservation::of(known);
    if own.names.is_empty() || own.may_own(found) {
        return Ok(());
    }
    let was: Vec<String> = own.names.iter().map(ToString::to_string).collect();
    let (volume, was) = (own.volume, was.join(", "));
    let message = format!("volume {volume} is unit {was}, but its source now leads to {found}");
    Err(refusal(ErrorKind::IdentityMismatch, message).with_found(&found.names))
}

/// # Errors
/// `InUse` if the unit that was found belongs to `other`.
pub(super) fn refuse_shared_unit(
    volume: &VolumeId,
    (found, places): (&Identity, &[PathPlace]),
    other: Reservation<'_>,
) -> Result<()> {
    if !other.would_share(found, places) {
        return Ok(());
    }
    let theirs = other.volume;
    let message = format!(
        "unit {found} belongs to volume {theirs}, and the source of volume {volume} also leads \
         to it"
    );
    Err(refusal(ErrorKind::InUse, message))
}

fn describe_sources(spec: &VolumeSpec) -> String {
    let sources: Vec<String> = spec.sources.iter().map(ToString::to_string).collect();
    sources.join(" and ")
}

fn refusal(kind: ErrorKind, message: String) -> Error {
    Error::new(kind, message).at(Stage::Journal)
}

#[cfg(test)]
mod tests;
