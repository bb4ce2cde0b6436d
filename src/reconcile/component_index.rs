//! The volumes by their devices: an event names only a device.

use std::collections::{BTreeMap, HashMap};

use crate::engine::{Condition, VolumeStatus};
use crate::id::{NbdIndex, Source, VolumeId};

/// The components of device paths, such as `2:0:0:1`, `nbd3` or `dm-0`, and the volume of
/// each.
#[derive(Debug, Default)]
pub(super) struct ComponentIndex {
    volumes: HashMap<String, VolumeId>,
    components: BTreeMap<VolumeId, Vec<String>>,
}

impl ComponentIndex {
    /// The volume of the first known component of a device path.
    pub(super) fn volume_at(&self, devpath: &str) -> Option<&VolumeId> {
        let mut components = devpath.split('/');
        components.find_map(|component| self.volumes.get(component))
    }

    /// Replaces the components of a volume by those of its new status.
    pub(super) fn update(&mut self, status: &VolumeStatus) {
        let volume = &status.volume;
        let mut components = components_of(status);
        let before = self.remove(volume);
        if status.condition == Condition::LinkDead {
            // Sysfs does not show the paths that are lost, so they are kept: their events
            // announce that they are back.
            let lost = before.into_iter().filter(|one| !components.contains(one));
            components.extend(lost.collect::<Vec<_>>());
        }
        for component in &components {
            self.volumes.insert(component.clone(), volume.clone());
        }
        self.components.insert(volume.clone(), components);
    }

    /// Removes and returns the volume's components: their events no longer concern it.
    pub(super) fn remove(&mut self, volume: &VolumeId) -> Vec<String> {
        let mut components = self.components.remove(volume).unwrap_or_default();
        components.retain(|component| {
            let is_own = self.volumes.get(component) == Some(volume);
            if is_own {
                self.volumes.remove(component);
            }
            is_own
        });
        components
    }
}

fn components_of(status: &VolumeStatus) -> Vec<String> {
    let mut components: Vec<String> = status.paths.iter().map(ToString::to_string).collect();
    components.extend(status.nbd_index.map(NbdIndex::name));
    let node = status.node.as_ref().and_then(|node| node.file_name());
    components.extend(node.map(|name| name.to_string_lossy().into_owned()));
    for source in &status.spec.sources {
        if let Source::Scsi(hctl) = source {
            components.push(hctl.to_string());
        }
    }
    components
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::AttachRequest;
    use crate::engine::journal::VolumeSpec;

    #[test]
    fn an_event_of_a_lost_path_still_concerns_the_volume_until_it_has_other_devices() {
        let status = |paths: &[&str], node: Option<&str>, condition| {
            let source: Source = "nbd://h0/0".parse().unwrap();
            let spec = VolumeSpec::of(&AttachRequest::new(source));
            let mut status = VolumeStatus::new("pvc-0".parse().unwrap(), spec, condition);
            status.paths = paths.iter().map(|path| path.parse().unwrap()).collect();
            status.node = node.map(Into::into);
            status
        };
        let mut index = ComponentIndex::default();
        let attached = status(&["2:0:0:1"], Some("/dev/dm-0"), Condition::Complete);
        index.update(&attached);
        for _ in 0..2 {
            index.update(&status(&[], None, Condition::LinkDead));
            assert!(index.volume_at("2:0:0:1").is_some() && index.volume_at("dm-0").is_some());
        }
        assert_eq!(index.components[&attached.volume].len(), 2);
        index.update(&status(
            &["3:0:0:1"],
            Some("/dev/dm-4"),
            Condition::Complete,
        ));
        assert!(index.volume_at("2:0:0:1").is_none() && index.volume_at("dm-0").is_none());
        assert!(index.volume_at("3:0:0:1").is_some() && index.volume_at("dm-4").is_some());
        index.remove(&attached.volume);
        assert!(index.volumes.is_empty() && index.components.is_empty());
    }
}
