//! An NBD device as sysfs shows it.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::devices::NumberedDevice;
use crate::kernel::process::{self, Opener};
use crate::kernel::{Roots, sysfs};

/// The disk `nbdN`, connected or not. Neither its number nor its DISKSEQ names
/// a connection: both stay when another export is connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdDevice {
    index: NbdIndex,
    disk: BlockDevice,
}

/// What can be seen of a device at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Facts {
    /// The thread that connected it; there while it is configured. It may have
    /// ended long ago, and a reconfiguration leaves it.
    pub pid: Option<u32>,
    /// The id that it was connected with; always `None` before Linux 5.14.
    pub backend: Option<String>,
    /// Bytes; 0 where it is not configured.
    pub size: u64,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
    /// Requests that are not answered.
    pub in_flight: u64,
    /// Devices stacked on it.
    pub holders: Vec<String>,
    /// Processes that have it open, as far as `/proc` shows them, where they
    /// were looked for ([`NbdDevice::facts_and_openers`]).
    #[cfg_attr(feature = "serde", serde(skip))]
    pub openers: Vec<Opener>,
}

/// What an NBD device is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum State {
    /// There is no such disk. A connect makes it.
    Absent,
    /// No `pid`, no size, nothing in flight, no holder, and nobody seen to
    /// have it open: it can be connected.
    Free,
    /// No `pid`, and a process has the node open, which alone makes the kernel
    /// refuse a connect (`EBUSY`).
    OpenedByOther,
    /// There is a `pid`, and nothing said that its links died. sysfs cannot
    /// tell a live link from a dead one.
    Connected,
    /// There is a `pid`, and the listener to the kernel's `LINK_DEAD`, or the
    /// holder of the socket, knows that no link is left: I/O waits.
    LinkDead,
    /// It was disconnected and something is left: by what the caller knows, a
    /// `pid` (somebody has it open); by sysfs alone, a size, requests in flight
    /// or holders without a `pid`.
    Draining,
    /// There is a `pid`, and the backend id is not the one asked about.
    Foreign,
}

impl State {
    /// The name used in messages and in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Free => "free",
            Self::OpenedByOther => "opened_by_other",
            Self::Connected => "connected",
            Self::LinkDead => "link_dead",
            Self::Draining => "draining",
            Self::Foreign => "foreign",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the caller knows of a device that sysfs does not show.
#[derive(Debug, Clone, Default)]
pub struct Hints {
    /// The id that it ought to have; with `None` no device is foreign. Before
    /// Linux 5.14 every device is, since none has an id to show.
    pub backend: Option<BackendId>,
    /// That its last link died, by `LINK_DEAD` or by its own end of a socket.
    pub link_dead: bool,
    /// That it was told to disconnect.
    pub disconnected: bool,
}

impl Facts {
    /// What these facts of a disk that is there come to.
    #[must_use]
    pub fn state(&self, hints: &Hints) -> State {
        if self.pid.is_none() {
            let left = self.size != 0 || self.in_flight != 0 || !self.holders.is_empty();
            return match () {
                () if left => State::Draining,
                () if !self.openers.is_empty() => State::OpenedByOther,
                () => State::Free,
            };
        }
        let expected = hints.backend.as_ref().map(BackendId::as_str);
        match () {
            () if expected.is_some() && expected != self.backend.as_deref() => State::Foreign,
            () if hints.disconnected => State::Draining,
            () if hints.link_dead => State::LinkDead,
            () => State::Connected,
        }
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "pid={pid}")?,
            None => f.write_str("no pid")?,
        }
        if let Some(backend) = &self.backend {
            write!(f, " backend={backend}")?;
        }
        write!(f, " size={} inflight={}", self.size, self.in_flight)?;
        if !self.holders.is_empty() {
            write!(f, " holders={}", self.holders.join(","))?;
        }
        if !self.openers.is_empty() {
            write!(f, " opened by {}", list(&self.openers))?;
        }
        Ok(())
    }
}

/// `123 (blkid), 456 (qemu)`.
pub(super) fn list(openers: &[Opener]) -> String {
    let name = |opener: &Opener| format!("{} ({})", opener.pid, opener.command);
    openers.iter().map(name).collect::<Vec<_>>().join(", ")
}

impl NbdDevice {
    /// The device of this index; `None` where there is no such disk.
    pub fn find(roots: &Roots, index: NbdIndex) -> Result<Option<Self>> {
        let link = roots.sysfs.join("block").join(index.name());
        let Some(dir) = sysfs::follow(&link)? else {
            return Ok(None);
        };
        Ok(BlockDevice::at(&dir)?.map(|disk| Self { index, disk }))
    }

    /// All devices, by index.
    pub fn all(roots: &Roots) -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        for index in Self::indexes(roots)? {
            devices.extend(Self::find(roots, index)?);
        }
        Ok(devices)
    }

    /// The indexes that there are, ascending.
    pub(super) fn indexes(roots: &Roots) -> Result<Vec<NbdIndex>> {
        let names = sysfs::names(&roots.sysfs.join("block"))?;
        let mut indexes: Vec<_> = names.iter().filter_map(|n| NbdIndex::of_name(n)).collect();
        indexes.sort_unstable();
        Ok(indexes)
    }

    /// The connected devices with this backend id. There is one at most, unless
    /// somebody gave an id twice: the kernel does not look.
    pub fn of_backend(roots: &Roots, id: &BackendId) -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        for index in Self::indexes(roots)? {
            // One file of each device, for there may be hundreds.
            let shown = roots.sysfs.join("block").join(index.name()).join("backend");
            if sysfs::read_if_there(&shown)?.as_deref() == Some(id.as_str()) {
                devices.extend(Self::find(roots, index)?);
            }
        }
        Ok(devices)
    }

    /// The index.
    #[must_use]
    pub fn index(&self) -> NbdIndex {
        self.index
    }

    /// The disk: its number, size, node and holders.
    #[must_use]
    pub fn disk(&self) -> &BlockDevice {
        &self.disk
    }

    /// The thread that connected it; `None` where it is not configured.
    pub fn pid(&self) -> Result<Option<u32>> {
        match sysfs::read_if_there(&self.disk.dir().join("pid"))? {
            Some(text) => text
                .trim()
                .parse()
                .map(Some)
                .map_err(|_| self.odd("pid", &text)),
            None => Ok(None),
        }
    }

    /// The id that it was connected with; `None` where there is none, and
    /// before Linux 5.14. It comes after `pid`, and before the connect returns
    /// (`drivers/block/nbd.c`, `nbd_genl_connect`).
    pub fn backend(&self) -> Result<Option<String>> {
        let id = sysfs::read_if_there(&self.disk.dir().join("backend"))?;
        // Without one the attribute is there and empty.
        Ok(id.filter(|id| !id.is_empty()))
    }

    /// How many requests the kernel has taken and not answered
    /// (`Documentation/ABI/stable/sysfs-block`, `inflight`: reads and writes).
    pub fn in_flight(&self) -> Result<u64> {
        let text = sysfs::read(&self.disk.dir().join("inflight"))?;
        let counts: Option<Vec<u64>> = text.split_whitespace().map(|n| n.parse().ok()).collect();
        match counts.as_deref() {
            Some([reads, writes]) => Ok(reads.saturating_add(*writes)),
            _ => Err(self.odd("inflight", &text)),
        }
    }

    /// Whether it is connected, and under which id: of the facts no more.
    pub(crate) fn marks(&self) -> Result<Facts> {
        Ok(Facts {
            pid: self.pid()?,
            backend: self.backend()?,
            ..Facts::default()
        })
    }

    /// What sysfs shows now, without a look at who has it open. Attributes come
    /// one by one: while the device is changing they may be of two moments.
    pub fn facts(&self) -> Result<Facts> {
        let marks = self.marks()?;
        Ok(Facts {
            size: self.disk.size()?,
            read_only: self.disk.read_only()?,
            in_flight: self.in_flight()?,
            holders: self.disk.holders()?,
            ..marks
        })
    }

    /// The same; `None` where the device is being taken away, or is gone.
    pub(crate) fn facts_if_there(&self) -> Result<Option<Facts>> {
        match self.facts() {
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(None),
            facts => facts.map(Some),
        }
    }

    /// The same, and who has it open where it is not configured: that costs a
    /// walk through all of `/proc`.
    pub fn facts_and_openers(&self, roots: &Roots) -> Result<Facts> {
        let mut facts = self.facts()?;
        if facts.pid.is_none() {
            let disk = NumberedDevice::Block(self.disk.devno());
            facts.openers = process::read_openers(roots, &[disk])?.found;
        }
        Ok(facts)
    }

    /// The state of the device of this index, with what the caller knows.
    pub fn state(roots: &Roots, index: NbdIndex, hints: &Hints) -> Result<State> {
        let device = Self::find(roots, index)?;
        let facts = device
            .map(|device| device.facts_and_openers(roots))
            .transpose();
        match facts {
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(State::Absent),
            facts => Ok(facts?.map_or(State::Absent, |facts| facts.state(hints))),
        }
    }

    fn odd(&self, attribute: &str, text: &str) -> Error {
        let message = format!("{text:?} is not what the kernel writes there");
        Error::new(ErrorKind::Io, message).with_path(self.disk.dir().join(attribute))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::process::Means;

    fn connected() -> Facts {
        Facts {
            pid: Some(7),
            backend: Some("mine".to_owned()),
            size: 4096,
            ..Facts::default()
        }
    }

    #[test]
    fn without_a_pid_anything_that_is_left_is_draining_before_it_is_opened_or_free() {
        let hints = Hints::default();
        let mut facts = Facts::default();
        assert_eq!(facts.state(&hints), State::Free);
        facts.openers.push(Opener {
            device: NumberedDevice::Block("43:0".parse().unwrap()),
            pid: 9,
            command: "blkid".to_owned(),
            writes: false,
            means: Means::Descriptor,
        });
        assert_eq!(facts.state(&hints), State::OpenedByOther);
        for left in [
            Facts {
                size: 512,
                ..facts.clone()
            },
            Facts {
                in_flight: 1,
                ..facts.clone()
            },
            Facts {
                holders: vec!["dm-0".to_owned()],
                ..facts.clone()
            },
        ] {
            assert_eq!(left.state(&hints), State::Draining, "{left}");
        }
    }

    #[test]
    fn anothers_device_is_foreign_whatever_else_is_known_of_it() {
        let hints = |backend: &str| Hints {
            backend: Some(backend.parse().unwrap()),
            link_dead: true,
            disconnected: true,
        };
        assert_eq!(connected().state(&hints("theirs")), State::Foreign);
        assert_eq!(connected().state(&hints("mine")), State::Draining);
        let nameless = Facts {
            backend: None,
            ..connected()
        };
        assert_eq!(nameless.state(&hints("mine")), State::Foreign);
        assert_eq!(nameless.state(&Hints::default()), State::Connected);
    }

    #[test]
    fn a_device_that_goes_loses_what_it_shows_first_and_is_absent_then() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let dir = roots.sysfs.join("block/nbd3");
        std::fs::create_dir_all(&dir).unwrap();
        for (attribute, text) in [
            ("dev", "43:3\n"),
            ("size", "0\n"),
            ("ro", "0\n"),
            ("inflight", "       0        0\n"),
        ] {
            std::fs::write(dir.join(attribute), text).unwrap();
        }
        let index = NbdIndex::new(3).unwrap();
        let device = NbdDevice::find(&roots, index).unwrap().unwrap();
        assert_eq!(device.facts_if_there().unwrap(), Some(Facts::default()));
        std::fs::remove_file(dir.join("size")).unwrap();
        assert_eq!(device.facts_if_there().unwrap(), None);
        let state = |roots| NbdDevice::state(roots, index, &Hints::default()).unwrap();
        assert_eq!(state(&roots), State::Absent);
    }
}
