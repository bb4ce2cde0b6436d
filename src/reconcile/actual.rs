//! The present state of the volumes.

use std::collections::BTreeMap;

use crate::engine::{Engine, Journal, VolumeStatus};
use crate::error::Result;
use crate::id::VolumeId;

/// The present state of each volume of a journal.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
#[serde(transparent)]
pub struct Actual {
    pub(super) volumes: BTreeMap<VolumeId, VolumeStatus>,
}

impl Actual {
    /// Reads the present state with [`Engine::survey`].
    ///
    /// # Errors
    /// Those of reading sysfs.
    pub fn read(engine: &Engine, journal: &Journal) -> Result<Self> {
        Ok(engine.survey(journal)?.into_iter().collect())
    }

    /// The state of a volume; `None` where the journal has no record of it, so that
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
