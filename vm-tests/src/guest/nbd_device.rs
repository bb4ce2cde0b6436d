//! A device of the kernel's NBD driver, by the library's own commands.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use lunbd::id::{NbdIndex, NbdUri};
use lunbd::nbd::{
    Connect, Connection, Hints, NbdDevice, Reconfigure, Refusal, State, Timeouts, dial, disconnect,
};
use lunbd::{Deadline, Error, Roots};

use super::wait_until;

/// The limit of one call.
pub const LIMIT: Duration = Duration::from_secs(30);
/// The kernel resends requests to a dead server after this time. It is longer than an emulated
/// machine pauses: no test heals a link that dies in such a pause.
pub const RESENT: Duration = Duration::from_secs(5);

/// Timeouts under which a dead connection is replaced.
pub const HEALING: Timeouts = Timeouts {
    request: Duration::from_secs(30),
    dead_connection: Duration::from_secs(60),
};

/// The guest's own files.
#[must_use]
pub fn roots() -> Roots {
    Roots::default()
}

/// A deadline for one call.
#[must_use]
pub fn soon() -> Deadline {
    Deadline::after(LIMIT)
}

/// The index with this number.
///
/// # Panics
/// If there is no such index.
#[must_use]
pub fn index(number: u32) -> NbdIndex {
    NbdIndex::new(number).expect("the kernel's answer")
}

/// A connection to the server of this URI.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn open_link(uri: &str) -> Connection {
    dial(&uri.parse::<NbdUri>().expect("the kernel's answer"), soon()).expect("the kernel's answer")
}

/// A device that is disconnected when this is dropped.
#[derive(Debug)]
pub struct Device(pub NbdIndex);

impl Device {
    /// Connects the device with this number.
    ///
    /// # Panics
    /// If the kernel refuses it.
    #[must_use]
    pub fn connect(uri: &str, number: u32, timeouts: Timeouts) -> Self {
        Self::with(uri, timeouts, |connect| connect.index(index(number)))
    }

    /// Connects a device with a command that `more` has changed.
    ///
    /// # Panics
    /// If the kernel refuses it.
    #[must_use]
    pub fn with(uri: &str, timeouts: Timeouts, more: impl Fn(Connect) -> Connect) -> Self {
        // udev's probe may have the device open, which is then busy for a moment.
        let connected = wait_until("the device to be connected", LIMIT, || {
            let link = open_link(uri);
            let geometry = link
                .export
                .geometry(4096, None)
                .expect("the kernel's answer");
            let connect = Connect::new(vec![link.stream], geometry.size, timeouts)
                .block_size(geometry.block_size)
                .server_flags(link.export.flags);
            match more(connect).send(&roots(), soon()) {
                Err(error) if Refusal::of(&error) == Some(Refusal::OpenedByOther) => None,
                result => Some(result.expect("the kernel's answer")),
            }
        });
        Self(connected)
    }

    /// `/dev/nbdN`.
    #[must_use]
    pub fn node(&self) -> PathBuf {
        PathBuf::from(format!("/dev/{}", self.0.name()))
    }

    /// The device in sysfs.
    ///
    /// # Panics
    /// If it is not there.
    #[must_use]
    pub fn sysfs(&self) -> NbdDevice {
        NbdDevice::find(&roots(), self.0)
            .expect("the kernel's answer")
            .expect("the kernel's answer")
    }

    /// Opens the device.
    ///
    /// # Panics
    /// If it cannot be opened.
    #[must_use]
    pub fn open(&self) -> File {
        File::open(self.node()).expect("the kernel's answer")
    }

    /// Reads one page past the page cache.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&self, offset: u64) -> std::io::Result<u8> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(nix::fcntl::OFlag::O_DIRECT.bits())
            .open(self.node())?;
        let mut page = memmap2::MmapMut::map_anon(4096)?;
        file.read_exact_at(&mut page, offset)?;
        Ok(page[0])
    }

    /// Gives the device another connection.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn give(&self, link: Connection) -> lunbd::Result<()> {
        let timeouts = Timeouts {
            request: RESENT,
            ..HEALING
        };
        Reconfigure::new(self.0, timeouts)
            .sockets(vec![link.stream])
            .send(&roots(), soon())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = disconnect(&roots(), self.0, soon());
        let start = Instant::now();
        let gone = || matches!(state(self.0), State::Free | State::Absent);
        while !gone() && start.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The state of the device with this index.
///
/// # Panics
/// If it cannot be read.
#[must_use]
pub fn state(index: NbdIndex) -> State {
    NbdDevice::state(&roots(), index, &Hints::default(), soon()).expect("the kernel's answer")
}

/// Waits until the device has this state.
pub fn wait_for(index: NbdIndex, wanted: State) {
    wait_until(&format!("{} to be {wanted}", index.name()), LIMIT, || {
        (state(index) == wanted).then_some(())
    });
}

/// The kernel's refusal, with its error.
///
/// # Panics
/// If the kernel did not refuse.
pub fn refusal<T: std::fmt::Debug>(result: lunbd::Result<T>) -> (Refusal, Error) {
    let error = result.unwrap_err();
    let refusal = Refusal::of(&error).unwrap_or_else(|| panic!("{error:?}"));
    (refusal, error)
}

/// A stream socket that no server reads.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn idle_link() -> (OwnedFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("the kernel's answer");
    (ours.into(), theirs)
}

/// Whether the driver keeps backend ids.
#[must_use]
pub fn has_backend_ids() -> bool {
    super::kernel() >= (5, 14)
}
