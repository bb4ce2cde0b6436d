//! The resources that only one volume can have.

use std::borrow::Cow;
use std::fmt;

use crate::engine::journal::VolumeSpec;
use crate::id::{BackendId, Source, Wwid};

/// A resource, borrowed from the options of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Resource<'a> {
    /// One path: a source with one portal or port.
    Path(Cow<'a, Source>),
    Backend(&'a BackendId),
    Unit(&'a Wwid),
}

/// The owned form of a [`Resource`], the key of an index that outlives the options.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ResourceKey {
    Path(Source),
    Backend(BackendId),
    Unit(Wwid),
}

impl<'a> Resource<'a> {
    /// The resources that a volume with these options claims.
    pub(super) fn of(spec: &'a VolumeSpec) -> impl Iterator<Item = Self> {
        let paths = spec.sources.iter().flat_map(Source::paths).map(Self::Path);
        let backend = spec.nbd.iter().map(|nbd| Self::Backend(&nbd.backend));
        paths
            .chain(backend)
            .chain(spec.expect.iter().map(Self::Unit))
    }

    pub(super) fn key(self) -> ResourceKey {
        match self {
            Self::Path(path) => ResourceKey::Path(path.into_owned()),
            Self::Backend(backend) => ResourceKey::Backend(backend.clone()),
            Self::Unit(name) => ResourceKey::Unit(name.clone()),
        }
    }
}

impl fmt::Display for Resource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "source {path}"),
            Self::Backend(backend) => write!(f, "backend id {backend}"),
            Self::Unit(name) => write!(f, "unit {name}"),
        }
    }
}
