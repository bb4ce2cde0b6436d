//! An event for a waiter, with copies of the properties that are used.

use std::sync::Arc;
use std::time::Instant;

use super::message::Message;
use super::unit_attention::UnitAttention;
use crate::id::{DevNo, DiskSeq};

/// The kernel puts a uevent's properties, including its path, into 2 KiB
/// (`UEVENT_BUFFER_SIZE` of `include/linux/kobject.h`). A text from udev may be
/// no longer here.
pub(super) const LONGEST_TEXT: usize = 2048;
/// udev's own rules make fewer than ten links for a device.
const MAX_LINKS: usize = 256;
/// The longest total of an event's links, in bytes.
const LONGEST_LINKS: usize = 16 << 10;

/// The sender of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Origin {
    /// The kernel: the device exists.
    Kernel,
    /// udevd: its rules have run.
    Udev,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The sender of the event.
    pub origin: Origin,
    /// When the hub read it.
    pub at: Instant,
    /// `add`, `remove`, `change`, `bind` and others.
    pub action: String,
    /// The device's path below `/sys`, from the leading slash.
    pub devpath: String,
    /// The kernel's number of the event, which udevd repeats.
    pub seqnum: u64,
    /// `block`, `scsi` and others.
    pub subsystem: String,
    /// `disk`, `partition`, `scsi_device` and others.
    pub devtype: Option<String>,
    /// The block or character device's number.
    pub devno: Option<DevNo>,
    /// The disk sequence number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// The UUID of a synthetic event that a process requested from the kernel.
    pub synth_uuid: Option<String>,
    /// The unit attention that a SCSI device's target has reported.
    pub sdev_ua: Option<UnitAttention>,
    /// The links that udev made, as full paths.
    pub links: Vec<String>,
    /// Whether a part was left out: a text of more than 2 KiB, or links past
    /// the 256th or past 16 KiB. No event of the kernel or of udev's own rules
    /// comes near that.
    pub cut: bool,
}

impl Event {
    pub(super) fn of(origin: Origin, message: &Message<'_>) -> Self {
        Self::build(
            origin,
            message.action,
            message.devpath,
            message.seqnum,
            |key| message.property(key),
        )
    }

    pub(super) fn of_udev(event: &udev::Event) -> Option<Self> {
        let property = |key| event.property_value(key)?.to_str();
        let devpath = event.devpath().to_str()?;
        Some(Self::build(
            Origin::Udev,
            property("ACTION")?,
            devpath,
            event.sequence_number(),
            property,
        ))
    }

    fn build<'a>(
        origin: Origin,
        action: &str,
        devpath: &str,
        seqnum: u64,
        property: impl Fn(&'static str) -> Option<&'a str>,
    ) -> Self {
        let number = |key| property(key).and_then(|text| text.parse().ok());
        let devno = number("MAJOR").zip(number("MINOR"));
        let mut cut = false;
        let mut bounded = |text: Option<&str>| {
            let kept = text.filter(|text| text.len() <= LONGEST_TEXT);
            cut |= kept != text;
            kept.map(str::to_owned)
        };
        let mut event = Self {
            origin,
            at: Instant::now(),
            action: bounded(Some(action)).unwrap_or_default(),
            devpath: bounded(Some(devpath)).unwrap_or_default(),
            seqnum,
            subsystem: bounded(property("SUBSYSTEM")).unwrap_or_default(),
            devtype: bounded(property("DEVTYPE")),
            devno: devno.map(|(major, minor)| DevNo { major, minor }),
            diskseq: property("DISKSEQ").and_then(|text| text.parse().ok()),
            synth_uuid: bounded(property("SYNTH_UUID")),
            sdev_ua: bounded(property("SDEV_UA")).map(|text| UnitAttention::parse(&text)),
            links: Vec::new(),
            cut: false,
        };
        let mut room = LONGEST_LINKS;
        for link in property("DEVLINKS").unwrap_or("").split_ascii_whitespace() {
            if event.links.len() == MAX_LINKS || link.len() > room.min(LONGEST_TEXT) {
                cut = true;
            } else {
                room -= link.len();
                event.links.push(link.to_owned());
            }
        }
        event.cut = cut;
        event
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::uevent) fn event(devpath: &str) -> Event {
        let text = format!("add@{devpath}\0ACTION=add\0DEVPATH={devpath}\0SEQNUM=1\0");
        let message = Message::parse(text.as_bytes()).unwrap();
        Event::of(Origin::Kernel, &message)
    }

    fn of_udev(links: &str, synth_uuid: &str) -> Event {
        Event::build(Origin::Udev, "change", "/x", 1, |key| match key {
            "DEVLINKS" => Some(links),
            "SYNTH_UUID" => Some(synth_uuid),
            _ => None,
        })
    }

    #[test]
    fn what_udev_sends_is_kept_whole() {
        let event = of_udev("/dev/disk/by-id/a /dev/disk/by-path/b", "abc");
        assert_eq!(event.links, ["/dev/disk/by-id/a", "/dev/disk/by-path/b"]);
        assert_eq!(event.synth_uuid.as_deref(), Some("abc"));
        assert!(!event.cut);
    }

    #[test]
    fn a_property_that_is_too_long_is_left_out_and_said_to_be() {
        let event = of_udev("", &"x".repeat(LONGEST_TEXT + 1));
        assert_eq!((event.synth_uuid, event.cut), (None, true));
        assert!(!of_udev("", &"x".repeat(LONGEST_TEXT)).cut);
    }

    #[test]
    fn links_are_bounded_in_number_in_length_and_in_all() {
        let many = of_udev(&"/dev/x ".repeat(MAX_LINKS + 1), "");
        assert_eq!((many.links.len(), many.cut), (MAX_LINKS, true));
        assert!(!of_udev(&"/dev/x ".repeat(MAX_LINKS), "").cut);
        let (long, short) = ("y".repeat(LONGEST_TEXT + 1), "/dev/disk/by-id/kept");
        let one = of_udev(&format!("{long} {short}"), "");
        assert_eq!((one.links, one.cut), (vec![short.to_owned()], true));
        let all = of_udev(&format!("{} ", "z".repeat(LONGEST_TEXT)).repeat(64), "");
        let length: usize = all.links.iter().map(String::len).sum();
        assert_eq!((length, all.cut), (LONGEST_LINKS, true));
    }
}

/// What a [`Watch`](super::Watch) delivers.
#[derive(Debug, Clone)]
pub enum Notice {
    /// An event on the watched component.
    Event(Arc<Event>),
    /// Events may be missing: look at sysfs again.
    Resync,
}
