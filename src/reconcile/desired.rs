//! The wanted volumes.

mod file;
mod size;

use std::collections::BTreeMap;

pub use file::DesiredFile;

use super::resource::{Resource, ResourceKey};
use crate::engine::AttachRequest;
use crate::engine::journal::VolumeSpec;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Source, VolumeId};
use crate::iscsi::{CredentialsSource, SessionName};

/// The wanted volumes, each with its attach options. No two of them may claim the same
/// path of a source (a LUN through one portal or port), backend id or unit.
///
/// The set can also be read from a file with `serde` (TOML, JSON or any other format):
///
/// ```toml
/// has_end = true          # the last line is `[end]`; both may be left out
///
/// [[volume]]
/// id = "pvc-1"
/// source = "iscsi://10.0.0.1,10.0.0.2/iqn.2003-01.org.lunbd:array/1"
/// expect = "naa.6001405a1b2c3d4e5f60718293a4b5c6"
/// min_paths = 2
/// multipath = "require"   # or "prefer", which is the default, or "off"
/// min_size = 17179869184  # bytes; see `set_min_size`
///
/// [volume.log_in]         # where no session is there; `log_in = {}` is enough
/// initiator = "iqn.2026-01.example:host"  # this machine's without it
/// chap_file = "/etc/lunbd/chap"   # as of `CredentialsFile`; or
/// # chap_variables = "LUNBD_CHAP_" # as of `Credentials::from_variables`
/// digests = false         # or true, to offer them, or "require"
/// recovery_timeout = "5s"
/// tune = { queue_depth = 64, nop_interval = 10 }  # as of `iscsi::Tunable`
/// interface = "eth1"
/// source_address = "10.0.0.7"
///
/// [[volume]]
/// id = "pvc-2"
/// sources = ["nbd://192.0.2.1/vol-7"]
/// [volume.nbd]
/// backend = "vol-7"       # the source's URI without it
/// index = 3               # the lowest that is free without it
/// connections = 1
/// read_only = false
/// block_size = 4096       # the server's minimum, and at least 512, without it
/// io_timeout = "30s"
/// dead_connection_timeout = "5m"
///
/// [end]
/// ```
///
/// An unknown key is refused, and so is a file without any volume: `volume = []` says that
/// none is wanted. A file that says `has_end = true` and has no `[end]` is refused, since it may
/// be half of one, and so is an `[end]` without `has_end = true`. `lunbd apply` also refuses a
/// file where these two are not the first and the last line. lunbd reads secrets when it needs
/// them. It reads this machine's initiator name when it reads the file.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(try_from = "DesiredFile")]
pub struct Desired {
    volumes: BTreeMap<VolumeId, Wanted>,
    claims: BTreeMap<ResourceKey, VolumeId>,
}

/// One wanted volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) spec: VolumeSpec,
    /// The least size in bytes. An attach does not use it, so no journal records it.
    pub(super) min_size: Option<u64>,
}

impl Wanted {
    /// Whether a device of this size is large enough.
    pub(super) fn is_large_enough(&self, size: Option<u64>) -> bool {
        self.min_size.is_none_or(|wanted| size >= Some(wanted))
    }

    /// Whether both spell their names alike: iSCSI names that differ only in case are equal,
    /// but a target may accept only one spelling.
    pub(super) fn is_spelt_as(&self, other: &Self) -> bool {
        let text = |wanted: &Self| serde_json::to_string(&wanted.spec).ok();
        text(self) == text(other)
    }
}

impl Desired {
    /// Adds a volume that is wanted attached as `request` says.
    ///
    /// For an attached volume, a change takes effect at once where possible: further sources,
    /// portals and ports, the expected unit, `min_paths` and `multipath` by a repeated attach. The
    /// device of a path that is no longer wanted stays until the detach. These changes need a
    /// detach first: other sources (with no path in common), backend id, `read_only`, `connections`,
    /// `block_size`, index or initiator, and an expected name that the attached unit does not have.
    /// The timeouts of NBD take effect at the next attach or heal. The digests and secrets of iSCSI
    /// take effect at the next login. The timeouts, settings, interface and source address of iSCSI
    /// take effect with the next session. If a session does not have one of
    /// these yet, the attach warns of it.
    ///
    /// # Errors
    /// `InUse`, naming both volumes, where another volume claims the same source, backend id
    /// or unit, and naming both sources where this volume is wanted already; `InvalidInput`
    /// for options that no attach accepts: NBD beside other sources, several NBD sources, a
    /// unit's name expected of NBD, or a CHAP secret itself instead of its location.
    pub fn insert(&mut self, volume: VolumeId, request: &AttachRequest) -> Result<()> {
        request
            .require_repeatable()
            .map_err(|error| of_volume(&volume, &error))?;
        let spec = VolumeSpec::of(request);
        if let Some(known) = self.get(&volume) {
            let (one, two) = (sources_of(known), sources_of(&spec));
            let message = format!("volume {volume} is wanted twice, from {one} and from {two}");
            return Err(Error::new(ErrorKind::InUse, message));
        }
        let is_nbd = |source: &&Source| matches!(source, Source::Nbd(_));
        let nbd = spec.sources.iter().filter(is_nbd).count();
        let refused = match () {
            () if nbd > 0 && spec.sources.len() > 1 => "an NBD source takes no further paths",
            () if nbd > 0 && spec.expect.is_some() => {
                "an NBD export has no world-wide name to expect"
            }
            () => "",
        };
        if !refused.is_empty() {
            let message = format!("volume {volume}: {refused}");
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        for claim in Resource::of(&spec) {
            if let Some(theirs) = self.claims.get(&claim.clone().key()) {
                let message = format!(
                    "{claim} belongs to volume {theirs}, and volume {volume} also wants it"
                );
                return Err(Error::new(ErrorKind::InUse, message));
            }
        }
        let claims = Resource::of(&spec).map(|claim| (claim.key(), volume.clone()));
        self.claims.extend(claims);
        let min_size = None;
        self.volumes.insert(volume, Wanted { spec, min_size });
        Ok(())
    }

    /// Sets the least size of a volume in bytes; `None` accepts any size. While the attached
    /// device is smaller, the reconciler takes over the size that the array or the NBD server
    /// reports; as long as that is not enough, the volume counts as failed and is retried.
    /// **Nothing is ever shrunk**: a larger device stays as it is, even where less is wanted
    /// later.
    ///
    /// # Errors
    /// `NotFound` where the volume is not wanted.
    pub fn set_min_size(&mut self, volume: &VolumeId, bytes: Option<u64>) -> Result<()> {
        let Some(wanted) = self.volumes.get_mut(volume) else {
            let message = format!("volume {volume} is not wanted");
            return Err(Error::new(ErrorKind::NotFound, message));
        };
        wanted.min_size = bytes;
        Ok(())
    }

    /// The least size of a volume in bytes; `None` where none is set.
    #[must_use]
    pub fn min_size(&self, volume: &VolumeId) -> Option<u64> {
        self.volumes.get(volume)?.min_size
    }

    /// Removes a volume from the wanted ones. Returns whether it was wanted.
    pub fn remove(&mut self, volume: &VolumeId) -> bool {
        let Some(wanted) = self.volumes.remove(volume) else {
            return false;
        };
        for claim in Resource::of(&wanted.spec) {
            self.claims.remove(&claim.key());
        }
        true
    }

    /// The attach options of a wanted volume; `None` where it is not wanted.
    #[must_use]
    pub fn get(&self, volume: &VolumeId) -> Option<&VolumeSpec> {
        self.wanted(volume).map(|wanted| &wanted.spec)
    }

    /// Whether two equal sets spell their names alike too: iSCSI names that differ only in
    /// case are equal, but a target may accept only one spelling.
    #[must_use]
    pub fn is_spelt_as(&self, other: &Self) -> bool {
        let mut both = self.volumes.values().zip(other.volumes.values());
        both.all(|(one, other)| one.is_spelt_as(other))
    }

    pub(super) fn wanted(&self, volume: &VolumeId) -> Option<&Wanted> {
        self.volumes.get(volume)
    }

    pub(super) fn all_wanted(&self) -> impl Iterator<Item = (&VolumeId, &Wanted)> {
        self.volumes.iter()
    }

    /// The source of the CHAP secrets for a session's target.
    pub(super) fn credentials_of(&self, session: &SessionName) -> Option<CredentialsSource> {
        let mut specs = self.iter().map(|(_, spec)| spec);
        specs.find_map(|spec| spec.credentials_of(session)).cloned()
    }

    /// The wanted volumes, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&VolumeId, &VolumeSpec)> {
        let volumes = self.volumes.iter();
        volumes.map(|(volume, wanted)| (volume, &wanted.spec))
    }

    /// The number of wanted volumes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.volumes.len()
    }

    /// Whether no volume is wanted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty()
    }
}

fn of_volume(volume: &VolumeId, error: &Error) -> Error {
    Error::new(error.kind(), format!("volume {volume}: {error}"))
}

fn sources_of(spec: &VolumeSpec) -> String {
    let sources: Vec<String> = spec.sources.iter().map(ToString::to_string).collect();
    sources.join(" and ")
}

#[cfg(test)]
mod tests;
