//! The commands to the kernel's NBD driver. Each call makes one attempt.
//!
//! The kernel returns `EINVAL` and `EBUSY` for a dozen reasons and writes the reason
//! only into its log. So the reason in the error comes from reads of sysfs before and
//! after ([`Refusal`](crate::nbd::Refusal)).

mod connect;
mod reconfigure;
mod resize;

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use lunbd_sys::nbd as abi;

use super::message::{Attribute, DeviceStatus, Message};
use super::refusal::{self, RefusedCommand};
use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::{Roots, genl};
pub use connect::Connect;
pub use reconfigure::Reconfigure;
pub(crate) use resize::set_size;

/// How long the kernel waits for a server. A connect always sends both, because a queue
/// keeps the last device's timeout when its index is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// How long one request may take. After that the kernel treats the connection that
    /// carried it as dead (`drivers/block/nbd.c`, `nbd_xmit_timeout`). A device with
    /// one connection then keeps the request until it has a new connection, but at most
    /// for [`dead_connection`](Self::dead_connection). A device with several
    /// connections sends it again at once over a live one.
    ///
    /// With zero, this timeout never ends the connection of a device with one
    /// connection. The kernel checks every 30 s, and sends the request again if the
    /// connection was replaced meanwhile. With zero and several connections the timeout
    /// is 30 s.
    ///
    /// A request that was sent over a dead connection is sent again only when this
    /// time, or those 30 s, have passed, however soon there is another connection (seen
    /// on Linux 6.1 and 7.2). A reconnect takes that long.
    pub request: Duration,
    /// How long requests wait for a new connection when the last has died, counted from
    /// the first waiting request. After that they fail with `EIO`. With zero they fail
    /// at once. While one of several connections lives, no request waits for this.
    ///
    /// A server that hangs causes no I/O error only if both are above zero. From Linux 6.14 on
    /// a request of which only a part was sent fails nevertheless
    /// ([guide](crate::guide::nbd#one-request-may-fail-from-linux-614-on)).
    pub dead_connection: Duration,
}

/// New timeouts of a connected device. A timeout that is `None` stays as it is in the
/// kernel (`drivers/block/nbd.c`, `nbd_genl_reconfigure`). The kernel shows the request timeout
/// on a socket that it takes in place of a dead one, and the other timeout nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NewTimeouts {
    /// As [`Timeouts::request`].
    pub request: Option<Duration>,
    /// As [`Timeouts::dead_connection`].
    pub dead_connection: Option<Duration>,
}

impl From<Timeouts> for NewTimeouts {
    fn from(both: Timeouts) -> Self {
        Self {
            request: Some(both.request),
            dead_connection: Some(both.dead_connection),
        }
    }
}

/// The kernel multiplies by its tick rate, of at most 1,000 a second, and keeps
/// the product in 32 bits (`drivers/block/nbd.c`, `nbd_set_cmd_timeout`).
const LONGEST_TIMEOUT: u64 = (u32::MAX / 1000) as u64;

/// Whole seconds. A fraction is rounded up, because zero means something else.
fn seconds(timeout: Duration) -> u64 {
    let partial = u64::from(timeout.subsec_nanos() > 0);
    timeout
        .as_secs()
        .saturating_add(partial)
        .min(LONGEST_TIMEOUT)
}

impl NewTimeouts {
    fn attributes(self) -> impl Iterator<Item = Attribute> {
        let request = self.request.map(seconds).map(Attribute::Timeout);
        let dead = self.dead_connection.map(seconds);
        request
            .into_iter()
            .chain(dead.map(Attribute::DeadConnTimeout))
    }
}

/// Disconnects a device (`NBD_CMD_DISCONNECT`). A device without connections is no
/// error.
///
/// The kernel checks neither mounts nor holders, and fails the requests in flight. When
/// it returns, the device is free only if no process has it open: otherwise its
/// configuration and `pid` stay until the last close. The command blocks if the peer is
/// dead and the send buffer full, so shut the connection down first.
///
/// After a timeout the kernel continues the command.
///
/// # Errors
/// `NotFound` if there is no such device and `NotReady` if it is being removed, with a
/// [`Refusal`](crate::nbd::Refusal) as the cause; `NotSupported`; `NotPermitted`;
/// `TimedOut` at stage `disconnect`.
pub fn disconnect(roots: &Roots, index: NbdIndex, deadline: Deadline) -> Result<()> {
    disconnect_under(Box::new(()), roots, index, deadline)
}

/// The same. `locks` are held until the kernel has returned, so that a command that comes after
/// its timeout ends no later connection of the device.
pub(crate) fn disconnect_under(
    locks: Box<dyn Send>,
    roots: &Roots,
    index: NbdIndex,
    deadline: Deadline,
) -> Result<()> {
    let message = Message {
        command: abi::CMD_DISCONNECT,
        attributes: vec![Attribute::Index(index.get())],
    };
    let attempt = RefusedCommand {
        index: Some(index),
        ..RefusedCommand::default()
    };
    let stage = Stage::Disconnect;
    crash_point!(NbdToDisconnect);
    exchange(&message, locks, &attempt, stage, roots, deadline)?;
    crash_point!(NbdDisconnected);
    Ok(())
}

/// The kernel's status of one device; `None` if it does not exist (`NBD_CMD_STATUS`).
/// There is no call for all devices: sysfs lists them, and the kernel's answer breaks
/// beyond some thousands.
///
/// # Errors
/// `NotSupported`; `NotPermitted`; `TimedOut` at stage `resolve`.
pub fn status(roots: &Roots, index: NbdIndex, deadline: Deadline) -> Result<Option<DeviceStatus>> {
    let message = Message {
        command: abi::CMD_STATUS,
        attributes: vec![Attribute::Index(index.get())],
    };
    let attempt = RefusedCommand {
        index: Some(index),
        ..RefusedCommand::default()
    };
    let stage = Stage::Resolve;
    let answers = exchange(&message, Box::new(()), &attempt, stage, roots, deadline)?;
    let attributes = answers.into_iter().flat_map(|answer| answer.attributes);
    Ok(attributes
        .filter_map(|attribute| match attribute {
            Attribute::Devices(devices) => Some(devices),
            _ => None,
        })
        .flatten()
        .find(|device| device.index == index.get()))
}

fn exchange(
    message: &Message,
    held: Box<dyn Send>,
    attempt: &RefusedCommand,
    stage: Stage,
    roots: &Roots,
    deadline: Deadline,
) -> Result<Vec<Message>> {
    // The state that refused a connect may end before the device is read again.
    let before =
        (stage == Stage::Connect).then(|| refusal::read_connection_facts(roots, attempt.index));
    let request = genl::Request {
        family: abi::FAMILY_NAME,
        payload: genl::Payload {
            command: message.command,
            version: abi::FAMILY_VERSION,
            attributes: message.encode(),
        },
        held,
    };
    let what = format!("the kernel's NBD driver to {stage}");
    let seen = || refusal::read_facts(roots, attempt.index).to_string();
    let answers = genl::call(request, stage, &what, deadline, seen).map_err(|error| {
        refusal::explain(roots, stage, attempt, before.as_ref(), error, deadline)
    })?;
    answers
        .iter()
        .map(|answer| Message::decode(answer.command, &answer.attributes))
        .collect::<Result<_, _>>()
        .map_err(|error| {
            let message = "the kernel's answer cannot be read";
            Error::new(ErrorKind::Io, message)
                .at(stage)
                .caused_by(error)
        })
}

/// One nested attribute holds no more sockets, and no server takes as many.
const MOST_SOCKETS: usize = 1024;

fn require_sockets(sockets: &[OwnedFd], stage: Stage) -> Result<()> {
    if (1..=MOST_SOCKETS).contains(&sockets.len()) {
        return Ok(());
    }
    let count = sockets.len();
    let message = format!("{count} sockets: expected 1 to {MOST_SOCKETS}");
    Err(Error::new(ErrorKind::InvalidInput, message).at(stage))
}

fn sockets_attribute(sockets: &[OwnedFd]) -> Attribute {
    // An open descriptor is never negative.
    let number = |socket: &OwnedFd| u32::try_from(socket.as_raw_fd()).ok();
    Attribute::Sockets(sockets.iter().filter_map(number).collect())
}

fn backend_attribute(id: &BackendId) -> Attribute {
    Attribute::BackendId(id.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const HEALING: Timeouts = Timeouts {
        request: Duration::from_millis(1500),
        dead_connection: Duration::MAX,
    };

    #[test]
    fn timeouts_are_whole_seconds_that_the_kernel_can_multiply_and_never_zero_by_rounding() {
        let sent: Vec<Attribute> = NewTimeouts::from(HEALING).attributes().collect();
        let expected = [
            Attribute::Timeout(2),
            Attribute::DeadConnTimeout(LONGEST_TIMEOUT),
        ];
        assert_eq!(sent, expected);
        assert!(u32::try_from(LONGEST_TIMEOUT * 1000).is_ok());
        assert_eq!(seconds(Duration::from_nanos(1)), 1);
        assert_eq!(seconds(Duration::ZERO), 0);
    }
}
