//! Keeps the journal's content names and TLS of NBD volumes up to date. A volume that was
//! blank when it was attached has a file system soon after, and a reconnect may meet another
//! certificate.

use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::journal::{Journal, Outcome, VolumeGuard};
use crate::engine::nbd::backend::device_of_backend;
use crate::engine::nbd::known::known_tls;
use crate::engine::volume::recover::{Condition, VolumeStatus};
use crate::error::Result;
use crate::id::{BackendId, ContentName};
use crate::nbd::NbdDevice;
use crate::uevent::Mode;

impl Engine {
    /// Writes into the journal what udev has read of the attached volumes, and the TLS of
    /// their last connections. What cannot be written now is written at the next event, or
    /// at the next attach.
    pub(crate) fn record_contents(&self, journal: &Journal, found: &[VolumeStatus]) {
        /// A write to the journal takes less than this.
        const LIMIT: Duration = Duration::from_secs(5);
        let is_attached = |there: &&VolumeStatus| {
            there.spec.nbd.is_some()
                && there.under_way.is_none()
                && there.condition == Condition::Complete
        };
        for there in found.iter().filter(is_attached) {
            // The process that works on the volume now records its content itself, or does
            // not change it.
            let no_wait = Deadline::after(Duration::ZERO);
            let Ok(guard) = journal.guard(&there.volume, None, no_wait) else {
                continue;
            };
            if let Err(error) = record_content(self, &guard, Deadline::after(LIMIT)) {
                tracing::warn!(%error, volume = %there.volume, "cannot record its content names");
            }
        }
    }
}

/// Does the same for one volume.
///
/// # Errors
/// Those of reading sysfs or udev's record, and of writing the journal.
pub(super) fn record_content(
    engine: &Engine,
    guard: &Arc<VolumeGuard>,
    deadline: Deadline,
) -> Result<()> {
    if let Some(mut record) = guard.record()
        && record.intent.is_none()
        && let Some(nbd) = &record.spec.nbd
        && let Some(outcome) = &mut record.outcome
        && let Some(device) = device_of_backend(engine, &nbd.backend)?
    {
        let names = new_names_by_udev(engine, &device, &nbd.backend, outcome)?;
        let tls = known_tls(engine, &device, &nbd.backend, outcome.tls.as_ref());
        if names.is_some() || tls != outcome.tls {
            outcome.content = names.or(outcome.content.take());
            outcome.tls = tls;
            guard.write(record, deadline)?;
        }
    }
    Ok(())
}

/// The names that udev has read of the volume's device, where the journal lacks one of
/// them.
fn new_names_by_udev(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
    outcome: &Outcome,
) -> Result<Option<Vec<ContentName>>> {
    if engine.hub().mode() != Mode::Udev {
        return Ok(None);
    }
    let read = device.content_by_udev(engine.roots())?.unwrap_or_default();
    // Another process may have detached it, and udev's record may be of the next volume.
    let is_its_own = device.backend()?.as_deref() == Some(backend.as_str());
    let is_new = is_its_own && has_new_name(&read, outcome.content.as_deref());
    Ok(is_new.then_some(read))
}

/// Whether one of the names is news. No name proves nothing, since udev's read may have failed.
fn has_new_name(read: &[ContentName], known: Option<&[ContentName]>) -> bool {
    let known = known.unwrap_or_default();
    !read.iter().all(|name| known.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::AttachRequest;
    use crate::engine::journal::{Intent, Operation, Record, VolumeSpec};
    use crate::id::{Source, VolumeId};
    use crate::kernel::Roots;

    fn names(kinds: &[&str]) -> Vec<ContentName> {
        let name = |kind: &&str| format!("{kind}.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9");
        let names = kinds.iter().map(name);
        names.map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn a_name_is_news_where_the_journal_lacks_it() {
        // An earlier version wrote the UUID of a btrfs alone.
        let (fs, both) = (names(&["fs"]), names(&["fs", "btrfs"]));
        assert!(has_new_name(&fs, None));
        assert!(has_new_name(&fs, Some(&[])));
        assert!(has_new_name(&fs, Some(&names(&["luks"]))));
        assert!(has_new_name(&both, Some(&fs)));
        assert!(!has_new_name(&fs, Some(&both)));
        assert!(!has_new_name(&both, Some(&both)));
        assert!(!has_new_name(&[], Some(&fs)));
    }

    #[test]
    fn a_record_keeps_the_names_of_its_volume_and_one_without_says_that_they_are_not_known() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let soon = Deadline::after(Duration::from_secs(30));
        let volume: VolumeId = "pvc-1".parse().unwrap();
        let source: Source = "nbd://192.0.2.1/vol-7".parse().unwrap();
        for content in [None, Some(Vec::new()), Some(names(&["fs", "luks"]))] {
            let record = serde_json::json!({
                "volume": volume,
                "spec": VolumeSpec::of(&AttachRequest::new(source.clone())),
                "intent": Intent::now(Operation::Attach),
                "outcome": {
                    "node": "/dev/nbd0", "devno": "43:0", "diskseq": null, "size": 4096,
                    "names": [], "map": null, "nbd_index": "0", "at": "2026-11-24T00:00:00Z",
                },
                "boot": null,
            });
            // The record as an earlier version wrote it.
            let mut record: Record = serde_json::from_value(record).unwrap();
            assert_eq!(record.outcome.as_ref().unwrap().content, None);
            record
                .outcome
                .as_mut()
                .unwrap()
                .content
                .clone_from(&content);
            let journal = engine.open_journal(soon).unwrap();
            let guard = journal.guard(&volume, None, soon).unwrap();
            guard.write(record, soon).unwrap();
            drop((guard, journal));
            let journal = engine.open_journal(soon).unwrap();
            let outcome = journal.record(&volume).unwrap().outcome.unwrap();
            assert_eq!(outcome.content, content);
        }
    }
}
