//! The format of a file of wanted volumes.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use super::size::size;
use super::{Desired, of_volume};
use crate::engine::{AttachRequest, Multipath, NbdOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BackendId, Expected, InterfaceName, Iqn, NbdIndex, Source, VolumeId};
use crate::iscsi::{
    CredentialsSource, INITIATOR_NAME_FILE, SessionOptions, Tunables, initiator_name,
};

/// The content of a file of wanted volumes, of the format that [`Desired`] shows. It has been
/// parsed, and `Desired::try_from` checks it and reads this machine's iSCSI name where a volume
/// needs it. [`Desired`] itself can be deserialised too, but then every failure is the
/// deserialiser's error.
///
/// # Errors
/// Those of `Desired::try_from` are of kind `InvalidInput`, `InUse` if two volumes exclude each
/// other, and those of [`initiator_name`].
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DesiredFile {
    #[serde(default)]
    has_end: bool,
    volume: Option<Vec<Volume>>,
    end: Option<End>,
}

/// The end mark, which has no key.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct End {}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Volume {
    id: VolumeId,
    source: Option<Source>,
    #[serde(default)]
    sources: Vec<Source>,
    expect: Option<Expected>,
    min_paths: Option<usize>,
    multipath: Option<Multipath>,
    #[serde(default, deserialize_with = "size")]
    min_size: Option<u64>,
    log_in: Option<LogIn>,
    nbd: Option<Nbd>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogIn {
    initiator: Option<Iqn>,
    chap_file: Option<PathBuf>,
    chap_variables: Option<String>,
    #[serde(default)]
    digests: Digests,
    #[serde(default, deserialize_with = "duration")]
    recovery_timeout: Option<Duration>,
    #[serde(default)]
    tune: Tunables,
    interface: Option<InterfaceName>,
    source_address: Option<IpAddr>,
}

/// `true`, `false` or `"require"`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "digests are true, false or \"require\"")]
enum Digests {
    Offer(bool),
    Required(RequireWord),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RequireWord {
    Require,
}

impl Default for Digests {
    fn default() -> Self {
        Self::Offer(false)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nbd {
    backend: Option<BackendId>,
    #[serde(default, deserialize_with = "index")]
    index: Option<NbdIndex>,
    connections: Option<NonZeroU16>,
    #[serde(default)]
    read_only: bool,
    block_size: Option<u32>,
    #[serde(default, deserialize_with = "duration")]
    io_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "duration")]
    dead_connection_timeout: Option<Duration>,
}

/// Parses a duration such as `30s`, `5m` or `1m 30s`.
fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let parsed = humantime::parse_duration(&text);
    parsed
        .map(Some)
        .map_err(|error| serde::de::Error::custom(format!("{text:?} is no duration: {error}")))
}

/// Parses a plain number.
fn index<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NbdIndex>, D::Error> {
    let number = u32::deserialize(deserializer)?;
    let index = NbdIndex::new(number);
    index
        .map(Some)
        .ok_or_else(|| serde::de::Error::custom(format!("{number} is no index of an NBD device")))
}

impl TryFrom<DesiredFile> for Desired {
    type Error = Error;

    fn try_from(file: DesiredFile) -> Result<Self> {
        file.desired(Path::new(INITIATOR_NAME_FILE))
    }
}

impl DesiredFile {
    /// Whether the file says `has_end = true`. `Desired::try_from` then requires `[end]`, but
    /// cannot know where in the text it is.
    #[must_use]
    pub fn announces_end(&self) -> bool {
        self.has_end
    }

    pub(super) fn desired(self, initiator_file: &Path) -> Result<Desired> {
        let refused = |what: &str| Err(Error::new(ErrorKind::InvalidInput, what));
        match (self.has_end, self.end) {
            (true, None) => {
                return refused("it announces an end and has none: it may be half a file");
            }
            (false, Some(_)) => return refused("it has an end and no `has_end = true`"),
            (true, Some(End {})) | (false, None) => {}
        }
        // A file that its writer has emptied and will fill again must not detach every
        // volume.
        let Some(volumes) = self.volume else {
            return refused("it names no volume: `volume = []` says that none is wanted");
        };
        let mut desired = Desired::default();
        for volume in volumes {
            let request = volume.request(initiator_file)?;
            desired.insert(volume.id.clone(), &request)?;
            desired.set_min_size(&volume.id, volume.min_size)?;
        }
        Ok(desired)
    }
}

impl Volume {
    fn all_sources(&self) -> impl Iterator<Item = &Source> {
        self.source.iter().chain(&self.sources)
    }

    fn request(&self, initiator_file: &Path) -> Result<AttachRequest> {
        let refused = |what: &str| {
            let message = format!("volume {}: {what}", self.id);
            Err(Error::new(ErrorKind::InvalidInput, message))
        };
        let mut sources = match (&self.source, self.sources.as_slice()) {
            (Some(source), []) => std::slice::from_ref(source).iter(),
            (None, [_, ..]) => self.sources.iter(),
            (Some(_), _) => return refused("give source or sources, not both"),
            (None, []) => return refused("it has no source"),
        };
        let Some(first) = sources.next() else {
            return refused("it has no source");
        };
        if self.nbd.is_some() && !matches!(first, Source::Nbd(_)) {
            return refused("nbd is for NBD sources");
        }
        let mut request = AttachRequest::new(first.clone())
            .min_paths(self.min_paths.unwrap_or(1))
            .multipath(self.multipath.unwrap_or_default());
        request = sources.cloned().fold(request, AttachRequest::path);
        if let Some(Expected::Unit(name)) = &self.expect {
            request = request.expect(name.clone());
        }
        if let Some(log_in) = &self.log_in {
            if !self.all_sources().any(|s| matches!(s, Source::Iscsi(_))) {
                return refused("log_in is for iSCSI sources");
            }
            let options = log_in.options(initiator_file);
            let options = options.map_err(|error| of_volume(&self.id, &error))?;
            request = request.log_in(options);
        }
        let mut options = self.nbd.as_ref().map(Nbd::options).unwrap_or_default();
        if let Some(Expected::Content(name)) = &self.expect {
            if !matches!(first, Source::Nbd(_)) {
                return refused("the name of a content is expected of NBD sources alone");
            }
            options = options.expect(name.clone());
        }
        Ok(request.nbd(options))
    }
}

impl LogIn {
    fn options(&self, initiator_file: &Path) -> Result<SessionOptions> {
        let initiator = match &self.initiator {
            Some(name) => name.clone(),
            None => initiator_name(initiator_file)?,
        };
        let mut options = SessionOptions::new(initiator).tunables(self.tune.clone());
        if let Some(name) = &self.interface {
            options = options.interface(name.clone());
        }
        if let Some(address) = self.source_address {
            options = options.source_address(address);
        }
        let options = match self.digests {
            Digests::Offer(offer) => options.digests(offer, offer),
            Digests::Required(RequireWord::Require) => options.require_digests(),
        };
        let source = match (&self.chap_file, &self.chap_variables) {
            (Some(_), Some(_)) => {
                let message = "give chap_file or chap_variables, not both";
                return Err(Error::new(ErrorKind::InvalidInput, message));
            }
            (Some(path), None) => Some(CredentialsSource::File(path.clone())),
            (None, prefix) => prefix.clone().map(CredentialsSource::Environment),
        };
        let options = match source {
            Some(source) => options.credentials_from(source),
            None => options,
        };
        Ok(match self.recovery_timeout {
            Some(limit) => options.recovery_timeout(limit),
            None => options,
        })
    }
}

impl Nbd {
    fn options(&self) -> NbdOptions {
        let mut options = NbdOptions::default();
        if let Some(backend) = &self.backend {
            options = options.backend(backend.clone());
        }
        if let Some(index) = self.index {
            options = options.index(index);
        }
        if let Some(connections) = self.connections {
            options = options.connections(connections);
        }
        if self.read_only {
            options = options.read_only();
        }
        if let Some(bytes) = self.block_size {
            options = options.block_size(bytes);
        }
        if let Some(limit) = self.io_timeout {
            options = options.io_timeout(limit);
        }
        if let Some(limit) = self.dead_connection_timeout {
            options = options.dead_connection_timeout(limit);
        }
        options
    }
}
