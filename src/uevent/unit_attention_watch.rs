//! What arrays report on their own.
//!
//! A target answers a command with a unit attention. The kernel reads it and sends a
//! `change` event of the SCSI device with `SDEV_UA`. lunbd only reports it: it neither
//! scans nor looks at the device.

use std::time::Instant;

use super::event::{Event, Notice};
use super::subscription::Subscription;
use super::unit_attention::UnitAttention;
use crate::deadline::Deadline;
use crate::id::Hctl;

/// What a [`UnitAttentionWatch`] delivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnitAttentionEvent {
    /// A logical unit has reported a unit attention.
    Attention {
        /// The unit attention.
        what: UnitAttention,
        /// The logical unit that reported it; `None` if the device path does
        /// not end with an address.
        unit: Option<Hctl>,
        /// When the hub read it.
        at: Instant,
    },
    /// Reports may be missing. A caller that acts on them must look at all of
    /// its targets.
    Lost,
}

impl UnitAttentionEvent {
    fn of(notice: &Notice) -> Self {
        match notice {
            Notice::Event(event) => match &event.sdev_ua {
                Some(what) => Self::Attention {
                    what: what.clone(),
                    unit: unit(event),
                    at: event.at,
                },
                // The text is longer than anything the kernel sends.
                None => Self::Lost,
            },
            Notice::Resync => Self::Lost,
        }
    }
}

/// The logical unit that reported the event. The last component of the path is
/// its address: below its target, and also if the kernel reports before it has
/// put the device there (Linux 6.12).
fn unit(event: &Event) -> Option<Hctl> {
    event.devpath.rsplit('/').next()?.parse().ok()
}

/// A subscription to what arrays report. Dropping it ends it.
#[derive(Debug)]
pub struct UnitAttentionWatch(Subscription);

impl UnitAttentionWatch {
    pub(super) fn new(subscription: Subscription) -> Self {
        Self(subscription)
    }

    /// Waits for the next report; `None` when the deadline has passed. Without
    /// events ([`Mode::SysfsPoll`](super::Mode::SysfsPoll)) it returns
    /// [`UnitAttentionEvent::Lost`] after a pause of 1 to 50 ms.
    pub fn next(&mut self, deadline: Deadline) -> Option<UnitAttentionEvent> {
        self.0.next(deadline).as_ref().map(UnitAttentionEvent::of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uevent::event::Origin;
    use crate::uevent::message::Message;

    fn attentions(devpath: &str, sdev_ua: &str) -> UnitAttentionEvent {
        let text = format!(
            "change@{devpath}\0ACTION=change\0DEVPATH={devpath}\0SUBSYSTEM=scsi\0\
             SDEV_UA={sdev_ua}\0DEVTYPE=scsi_device\0SEQNUM=9\0"
        );
        let message = Message::parse(text.as_bytes()).unwrap();
        UnitAttentionEvent::of(&Notice::Event(Event::of(Origin::Kernel, &message).into()))
    }

    #[test]
    fn each_unit_attention_of_the_kernel_has_a_name() {
        let path = "/devices/pseudo_0/adapter0/host1/target1:0:0/1:0:0:7";
        for (word, expected) in [
            ("REPORTED_LUNS_DATA_HAS_CHANGED", UnitAttention::LunsChanged),
            ("CAPACITY_DATA_HAS_CHANGED", UnitAttention::CapacityChanged),
            ("INQUIRY_DATA_HAS_CHANGED", UnitAttention::InquiryChanged),
            (
                "ASYMMETRIC_ACCESS_STATE_CHANGED",
                UnitAttention::AccessStateChanged,
            ),
            (
                "THIN_PROVISIONING_SOFT_THRESHOLD_REACHED",
                UnitAttention::SoftThresholdReached,
            ),
            (
                "MODE_PARAMETERS_CHANGED",
                UnitAttention::ModeParametersChanged,
            ),
            ("POWER_ON_RESET_OCCURRED", UnitAttention::PoweredOnOrReset),
            ("FROM_2030", UnitAttention::Other("FROM_2030".to_owned())),
        ] {
            match attentions(path, word) {
                UnitAttentionEvent::Attention { what, unit, .. } => {
                    assert_eq!(what, expected);
                    assert_eq!(unit.unwrap().to_string(), "1:0:0:7");
                }
                UnitAttentionEvent::Lost => panic!("{word}"),
            }
        }
    }

    #[test]
    fn a_device_that_the_kernel_has_not_placed_yet_is_named_too() {
        match attentions("/3:0:1:2", "POWER_ON_RESET_OCCURRED") {
            UnitAttentionEvent::Attention { unit, .. } => {
                assert_eq!(unit.unwrap().to_string(), "3:0:1:2");
            }
            UnitAttentionEvent::Lost => panic!(),
        }
        assert!(matches!(
            attentions("/devices/x", "POWER_ON_RESET_OCCURRED"),
            UnitAttentionEvent::Attention { unit: None, .. }
        ));
    }

    #[test]
    fn a_unit_attention_that_is_too_long_to_keep_counts_as_lost() {
        assert_eq!(
            attentions("/1:0:0:7", &"X".repeat(4096)),
            UnitAttentionEvent::Lost
        );
        assert_eq!(
            UnitAttentionEvent::of(&Notice::Resync),
            UnitAttentionEvent::Lost
        );
    }
}
