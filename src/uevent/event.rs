//! An event that somebody waits for: the properties that are used, copied.

use std::time::Instant;

use super::message::Message;
use crate::id::{DevNo, DiskSeq};

/// Who announced an event.
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
    /// Who announced it.
    pub origin: Origin,
    /// When the hub read it.
    pub at: Instant,
    /// `add`, `remove`, `change`, `bind` and others.
    pub action: String,
    /// The device's path below `/sys`, from the leading slash.
    pub devpath: String,
    /// The kernel's number of the event; udevd repeats it.
    pub seqnum: u64,
    /// `block`, `scsi` and others.
    pub subsystem: String,
    /// `disk`, `partition`, `scsi_device` and others.
    pub devtype: Option<String>,
    /// The block or character device's number.
    pub devno: Option<DevNo>,
    /// The disk's life (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// The mark of an event that somebody had the kernel send.
    pub synth_uuid: Option<String>,
    /// The links that udev made, as full paths.
    pub links: Vec<String>,
}

impl Event {
    pub(super) fn of_kernel(message: &Message<'_>) -> Self {
        let property = |key: &str| message.property(key).map(str::to_owned);
        Self::build(
            Origin::Kernel,
            message.action,
            message.devpath,
            message.seqnum,
            property,
        )
    }

    pub(super) fn of_udev(event: &udev::Event) -> Option<Self> {
        let property = |key: &str| {
            let value = event.property_value(key)?;
            value.to_str().map(str::to_owned)
        };
        let action = property("ACTION")?;
        let devpath = event.devpath().to_str()?;
        Some(Self::build(
            Origin::Udev,
            &action,
            devpath,
            event.sequence_number(),
            property,
        ))
    }

    fn build(
        origin: Origin,
        action: &str,
        devpath: &str,
        seqnum: u64,
        property: impl Fn(&str) -> Option<String>,
    ) -> Self {
        /// udev's own rules make fewer than ten links a device.
        const MOST_LINKS: usize = 256;
        let number = |key| property(key).and_then(|text| text.parse().ok());
        let devno = number("MAJOR").zip(number("MINOR"));
        let links = property("DEVLINKS").unwrap_or_default();
        Self {
            origin,
            at: Instant::now(),
            action: action.to_owned(),
            devpath: devpath.to_owned(),
            seqnum,
            subsystem: property("SUBSYSTEM").unwrap_or_default(),
            devtype: property("DEVTYPE"),
            devno: devno.map(|(major, minor)| DevNo { major, minor }),
            diskseq: property("DISKSEQ").and_then(|text| text.parse().ok()),
            synth_uuid: property("SYNTH_UUID"),
            links: links
                .split_ascii_whitespace()
                .take(MOST_LINKS)
                .map(str::to_owned)
                .collect(),
        }
    }
}
