//! The devices of one kind that had a kernel event since the last question. An index of
//! such devices reads these again, or everything if events were lost.

use std::sync::Arc;

use parking_lot::Mutex;

use super::changed_names::{Changed, ChangedNames, Naming};
use super::dispatch::Dispatch;
use super::kernel_reader::KernelReader;

/// A subscription to the names of devices that have events. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Changes {
    names: Arc<ChangedNames>,
    /// The source of the events; `None` in a test that delivers events itself.
    source: Option<(Arc<Dispatch>, Arc<Mutex<KernelReader>>)>,
}

impl Changes {
    pub(super) fn new(
        naming: Naming,
        dispatch: &Arc<Dispatch>,
        reader: &Arc<Mutex<KernelReader>>,
    ) -> Self {
        let names = ChangedNames::new(naming);
        dispatch.subscribe_to_names(&names);
        let source = Some((Arc::clone(dispatch), Arc::clone(reader)));
        Self { names, source }
    }

    /// A subscription without a hub, and the end that receives its events.
    #[cfg(test)]
    pub(crate) fn for_test(naming: Naming) -> (Self, Arc<ChangedNames>) {
        let noted = ChangedNames::new(naming);
        let changes = Self {
            names: Arc::clone(&noted),
            source: None,
        };
        (changes, noted)
    }

    /// The changes since the last call, or since the subscription. It first reads what
    /// the kernel's socket holds, so it includes every event that was sent before the
    /// call.
    pub(crate) fn take(&mut self) -> Changed {
        let has_all = self
            .source
            .as_ref()
            .is_none_or(|(dispatch, reader)| reader.lock().catch_up(dispatch));
        let taken = self.names.take();
        if has_all { taken } else { Changed::Unknown }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uevent::changed_names::MAX_NAMES;
    use crate::uevent::event::tests::event;

    fn disk(devpath: &str) -> Option<&str> {
        devpath.split('/').find(|name| name.starts_with("nbd"))
    }

    fn these(names: &[&str]) -> Changed {
        Changed::These(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn a_question_is_answered_with_the_devices_of_the_kind_that_had_events_since_the_last_one() {
        let (mut changes, noted) = Changes::for_test(disk);
        assert_eq!(changes.take(), these(&[]));
        for path in [
            "/block/nbd3",
            "/block/sda",
            "/block/nbd3/nbd3p1",
            "/block/nbd7",
        ] {
            noted.event(path);
        }
        assert_eq!(changes.take(), these(&["nbd3", "nbd7"]));
        assert_eq!(changes.take(), these(&[]));
    }

    #[test]
    fn a_loss_of_events_makes_the_next_answer_unknown_and_no_later_one() {
        let (mut changes, noted) = Changes::for_test(disk);
        noted.event("/block/nbd3");
        noted.mark_lost();
        noted.event("/block/nbd4");
        assert_eq!(changes.take(), Changed::Unknown);
        assert_eq!(changes.take(), these(&[]));
    }

    #[test]
    fn more_names_than_are_kept_make_the_answer_unknown() {
        let (mut changes, noted) = Changes::for_test(disk);
        for number in 0..=MAX_NAMES {
            noted.event(&format!("/block/nbd{number}"));
        }
        assert_eq!(changes.take(), Changed::Unknown);
    }

    #[test]
    fn an_overrun_of_the_hub_and_its_end_are_losses_of_each_subscription() {
        let dispatch = Dispatch::default();
        let noted = ChangedNames::new(disk);
        dispatch.subscribe_to_names(&noted);
        dispatch.deliver_of_kernel(&event("/block/nbd3").devpath, || false, || None);
        assert_eq!(noted.take(), these(&["nbd3"]));
        dispatch.resync();
        assert_eq!(noted.take(), Changed::Unknown);
        dispatch.close();
        assert_eq!(noted.take(), Changed::Unknown);
    }

    #[test]
    fn a_subscription_that_was_dropped_is_noted_for_no_more() {
        let dispatch = Dispatch::default();
        drop({
            let noted = ChangedNames::new(disk);
            dispatch.subscribe_to_names(&noted);
            noted
        });
        dispatch.deliver_of_kernel("/block/nbd3", || false, || None);
        assert_eq!(dispatch.name_subscriber_count(), 0);
    }
}
