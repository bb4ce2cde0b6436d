//! What stands.

use std::collections::BTreeMap;

use crate::engine::{Engine, Journal, VolumeStatus};
use crate::error::Result;
use crate::id::VolumeId;

/// Where each volume of a journal stands.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
#[serde(transparent)]
pub struct Actual {
    pub(super) volumes: BTreeMap<VolumeId, VolumeStatus>,
}

impl Actual {
    /// What [`Engine::survey`] sees now.
    ///
    /// # Errors
    /// Where sysfs cannot be read.
    pub fn read(engine: &Engine, journal: &Journal) -> Result<Self> {
        Ok(engine.survey(journal)?.into_iter().collect())
    }

    /// Where a volume stands; `None` where the journal does not know it, so that
    /// nothing of it is attached.
    #[must_use]
    pub fn get(&self, volume: &VolumeId) -> Option<&VolumeStatus> {
        self.volumes.get(volume)
    }

    /// The volumes, by name.
    pub fn iter(&self) -> impl Iterator<Item = &VolumeStatus> {
        self.volumes.values()
    }
}

impl FromIterator<VolumeStatus> for Actual {
    fn from_iter<I: IntoIterator<Item = VolumeStatus>>(volumes: I) -> Self {
        let by_name = volumes
            .into_iter()
            .map(|found| (found.volume.clone(), found));
        Self {
            volumes: by_name.collect(),
        }
    }
}
