//! An NBD device as sysfs shows it.

use std::fmt;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::devices::NumberedDevice;
use crate::kernel::process::{self, Opener};
use crate::kernel::{Roots, sysfs};

/// The disk `nbdN`, connected or not. Neither its number nor its DISKSEQ
/// identifies a connection: both stay when another export is connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdDevice {
    index: NbdIndex,
    disk: BlockDevice,
}

/// The visible state of a device at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Facts {
    /// The thread that connected the device; present while it is configured.
    /// The thread may have ended long ago, and a reconfiguration does not
    /// change this.
    pub pid: Option<u32>,
    /// The id that it was connected with; always `None` before Linux 5.14.
    pub backend: Option<String>,
    /// In bytes; 0 if the device is not configured.
    pub size: u64,
    /// Requests that the server has not answered.
    pub in_flight: u64,
    /// Devices stacked on it.
    pub holders: Vec<String>,
    /// Processes that have it open, as far as `/proc` shows them. Only
    /// [`NbdDevice::facts_and_openers`] looks for them.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub openers: Vec<Opener>,
}

/// What an NBD device is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::Display, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum State {
    /// There is no such disk. A connect creates it.
    Absent,
    /// No `pid`, no size, nothing in flight, no holder, and no known process
    /// has it open: it can be connected.
    Free,
    /// No `pid`, and a process has the node open, which alone makes the kernel
    /// refuse a connect (`EBUSY`).
    OpenedByOther,
    /// There is a `pid`, and its connections are not known to be dead. sysfs
    /// cannot tell a live connection from a dead one.
    Connected,
    /// There is a `pid`, and the listener to the kernel's `LINK_DEAD`, or the
    /// holder of the socket, knows that no connection is alive: I/O waits.
    LinkDead,
    /// It was disconnected and something is left: a `pid`, if the caller knows
    /// of the disconnect (a process has it open); or, by sysfs alone, a size,
    /// requests in flight or holders without a `pid`.
    Draining,
    /// There is a `pid`, and the backend id is not the expected one.
    Foreign,
}

impl State {
    /// The name used in messages and in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// What the caller knows about a device and sysfs does not show.
#[derive(Debug, Clone, Default)]
pub struct Hints {
    /// The expected id. With `None` no device is foreign. Before Linux 5.14
    /// every device is foreign to an expected id, because none shows an id.
    pub backend: Option<BackendId>,
    /// Its last connection died, by `LINK_DEAD` or by the caller's end of a
    /// socket.
    pub link_dead: bool,
    /// It was told to disconnect.
    pub disconnected: bool,
}

impl Facts {
    /// The state that these facts of an existing disk amount to.
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
    /// The device of this index; `None` if there is no such disk.
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

    /// The existing indexes, ascending.
    pub(super) fn indexes(roots: &Roots) -> Result<Vec<NbdIndex>> {
        let names = sysfs::names(&roots.sysfs.join("block"))?;
        let mut indexes: Vec<_> = names.iter().filter_map(|n| NbdIndex::of_name(n)).collect();
        indexes.sort_unstable();
        Ok(indexes)
    }

    /// The connected devices with this backend id: at most one, unless another
    /// program gave an id twice, which the kernel does not check.
    pub fn of_backend(roots: &Roots, id: &BackendId) -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        for index in Self::indexes(roots)? {
            // Read one file of each device, because there may be hundreds.
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

    /// The thread that connected it; `None` if it is not configured.
    pub fn pid(&self) -> Result<Option<u32>> {
        match sysfs::read_if_there(&self.disk.dir().join("pid"))? {
            Some(text) => text
                .trim()
                .parse()
                .map(Some)
                .map_err(|_| self.malformed("pid", &text)),
            None => Ok(None),
        }
    }

    /// The id that it was connected with; `None` if it has none, and before
    /// Linux 5.14. The id appears after `pid`, and before the connect returns
    /// (`drivers/block/nbd.c`, `nbd_genl_connect`).
    pub fn backend(&self) -> Result<Option<String>> {
        let id = sysfs::read_if_there(&self.disk.dir().join("backend"))?;
        // Without an id the attribute exists and is empty.
        Ok(id.filter(|id| !id.is_empty()))
    }

    /// How many requests the kernel has accepted and not completed
    /// (`Documentation/ABI/stable/sysfs-block`, `inflight`: reads and writes). The kernel
    /// counts only while `queue/iostats` is 1.
    pub fn in_flight(&self) -> Result<u64> {
        let text = sysfs::read(&self.disk.dir().join("inflight"))?;
        let counts: Option<Vec<u64>> = text.split_whitespace().map(|n| n.parse().ok()).collect();
        match counts.as_deref() {
            Some([reads, writes]) => Ok(reads.saturating_add(*writes)),
            _ => Err(self.malformed("inflight", &text)),
        }
    }

    /// Reads only `pid` and `backend`: whether the device is connected, and under which id.
    pub(crate) fn connection_facts(&self) -> Result<Facts> {
        Ok(Facts {
            pid: self.pid()?,
            backend: self.backend()?,
            ..Facts::default()
        })
    }

    /// What sysfs shows now, without the openers. This reads one attribute
    /// after the other: while the device changes they may be of different
    /// moments.
    pub fn facts(&self) -> Result<Facts> {
        let connection = self.connection_facts()?;
        Ok(Facts {
            size: self.disk.size()?,
            in_flight: self.in_flight()?,
            holders: self.disk.holders()?,
            ..connection
        })
    }

    /// Like [`facts`](Self::facts); `None` if the device is being removed, or
    /// is gone.
    pub(crate) fn facts_if_present(&self) -> Result<Option<Facts>> {
        match self.facts() {
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(None),
            facts => facts.map(Some),
        }
    }

    /// Like [`facts`](Self::facts). If the device is not configured, it also
    /// finds the openers, which costs a walk through all of `/proc`.
    ///
    /// # Errors
    /// Those of [`facts`](Self::facts); `TimedOut` and `Cancelled` at stage `claim` if the walk
    /// does not end by `deadline`, or within 10 s.
    pub fn facts_and_openers(&self, roots: &Roots, deadline: Deadline) -> Result<Facts> {
        let mut facts = self.facts()?;
        if facts.pid.is_none() {
            let disk = NumberedDevice::Block(self.disk.devno());
            facts.openers = process::read_openers(roots, &[disk], deadline)?.found;
        }
        Ok(facts)
    }

    /// The state of the device of this index, including what the caller knows.
    ///
    /// # Errors
    /// Those of [`facts_and_openers`](Self::facts_and_openers).
    pub fn state(
        roots: &Roots,
        index: NbdIndex,
        hints: &Hints,
        deadline: Deadline,
    ) -> Result<State> {
        let device = Self::find(roots, index)?;
        let facts = device
            .map(|device| device.facts_and_openers(roots, deadline))
            .transpose();
        match facts {
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(State::Absent),
            facts => Ok(facts?.map_or(State::Absent, |facts| facts.state(hints))),
        }
    }

    fn malformed(&self, attribute: &str, text: &str) -> Error {
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
    fn a_device_without_its_size_attribute_counts_as_absent() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let dir = roots.sysfs.join("block/nbd3");
        std::fs::create_dir_all(&dir).unwrap();
        for (attribute, text) in [
            ("dev", "43:3\n"),
            ("size", "0\n"),
            ("inflight", "       0        0\n"),
        ] {
            std::fs::write(dir.join(attribute), text).unwrap();
        }
        let index = NbdIndex::new(3).unwrap();
        let device = NbdDevice::find(&roots, index).unwrap().unwrap();
        assert_eq!(device.facts_if_present().unwrap(), Some(Facts::default()));
        std::fs::remove_file(dir.join("size")).unwrap();
        assert_eq!(device.facts_if_present().unwrap(), None);
        let soon = Deadline::after(std::time::Duration::from_secs(60));
        let state = NbdDevice::state(&roots, index, &Hints::default(), soon);
        assert_eq!(state.unwrap(), State::Absent);
    }
}
