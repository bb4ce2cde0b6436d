//! Finds the rule of the driver that a command broke.
//!
//! The rules are those of `drivers/block/nbd.c`: `nbd_genl_connect`,
//! `nbd_genl_reconfigure`, `nbd_genl_disconnect`, `nbd_add_socket`,
//! `nbd_set_size`.

use std::fmt;

use nix::errno::Errno;
use nix::unistd::{SysconfVar, sysconf};

use super::device::{Facts, NbdDevice, list};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::{Roots, sysfs};

/// Why the kernel refused an NBD command. It is the cause
/// ([`std::error::Error::source`]) of the error of that command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The device is not connected, but a process (perhaps udev's probe) has
    /// the node open. The same call may succeed a moment later.
    #[error("the device is open")]
    OpenedByOther,
    /// The device is connected.
    #[error("the device is connected")]
    Connected,
    /// The device has another backend id than the given one, or has one and
    /// none was given.
    #[error("another backend id")]
    OtherBackend,
    /// The device is being removed.
    #[error("the device is going down")]
    GoingDown,
    /// The device is not connected, so it cannot be reconfigured.
    #[error("the device is not connected")]
    NotConnected,
    /// There is no such device.
    #[error("unknown index")]
    UnknownIndex,
    /// The index is beyond the last that the module can number.
    #[error("the index is too large")]
    IndexTooLarge,
    /// No index is left.
    #[error("no index is left")]
    NoIndexLeft,
    /// Another process created the same index at that moment.
    #[error("another process created the same index")]
    Raced,
    /// The block size is no power of two from 512 to the page size.
    #[error("block size")]
    BlockSize,
    /// The size is more than the kernel's signed offset holds.
    #[error("size")]
    Size,
    /// Several sockets to a server that did not announce `CAN_MULTI_CONN`.
    #[error("several connections")]
    MultiConn,
    /// The command broke no other visible rule.
    #[error("a socket that is neither TCP nor a unix stream, or another rule")]
    Unseen,
}

impl Refusal {
    /// The rule that a command broke, from the command's `error`.
    #[must_use]
    pub fn of(error: &Error) -> Option<Self> {
        std::error::Error::source(error)?.downcast_ref().copied()
    }

    fn kind(self) -> ErrorKind {
        match self {
            Self::OpenedByOther | Self::Connected | Self::NoIndexLeft => ErrorKind::InUse,
            Self::OtherBackend => ErrorKind::IdentityMismatch,
            Self::GoingDown | Self::NotConnected | Self::Raced => ErrorKind::NotReady,
            Self::UnknownIndex => ErrorKind::NotFound,
            Self::IndexTooLarge | Self::BlockSize | Self::Size | Self::MultiConn => {
                ErrorKind::InvalidInput
            }
            Self::Unseen => ErrorKind::Refused,
        }
    }
}

/// The properties of a command that the rules are about.
#[derive(Debug, Clone, Default)]
pub(super) struct RefusedCommand {
    pub(super) index: Option<NbdIndex>,
    pub(super) backend: Option<BackendId>,
    pub(super) block_size: Option<u32>,
    pub(super) size: Option<u64>,
    pub(super) sockets: usize,
    pub(super) multi_conn: bool,
}

/// What sysfs showed about the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DeviceSnapshot {
    /// The command named no device.
    NoneNamed,
    Absent(NbdIndex),
    There(NbdIndex, Facts),
    Unreadable(NbdIndex),
}

/// Reads whether it is connected, before a connect, to explain a later refusal.
pub(super) fn read_connection_facts(roots: &Roots, index: Option<NbdIndex>) -> DeviceSnapshot {
    snapshot(roots, index, NbdDevice::connection_facts)
}

/// Reads what sysfs shows.
pub(super) fn read_facts(roots: &Roots, index: Option<NbdIndex>) -> DeviceSnapshot {
    snapshot(roots, index, NbdDevice::facts)
}

/// Reads what sysfs shows, and which processes have the device open, if that can be read.
pub(super) fn read_facts_and_openers(
    roots: &Roots,
    index: Option<NbdIndex>,
    deadline: Deadline,
) -> DeviceSnapshot {
    match snapshot(roots, index, |device| {
        device.facts_and_openers(roots, deadline)
    }) {
        DeviceSnapshot::Unreadable(_) => read_facts(roots, index),
        read => read,
    }
}

fn snapshot(
    roots: &Roots,
    index: Option<NbdIndex>,
    facts: impl FnOnce(&NbdDevice) -> Result<Facts>,
) -> DeviceSnapshot {
    let Some(index) = index else {
        return DeviceSnapshot::NoneNamed;
    };
    let facts =
        NbdDevice::find(roots, index).and_then(|device| device.as_ref().map(facts).transpose());
    match facts {
        Ok(Some(facts)) => DeviceSnapshot::There(index, facts),
        Ok(None) => DeviceSnapshot::Absent(index),
        Err(_) => DeviceSnapshot::Unreadable(index),
    }
}

impl fmt::Display for DeviceSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoneNamed => f.write_str("no device was named"),
            Self::Absent(index) => write!(f, "no nbd{index}"),
            Self::There(index, facts) => write!(f, "nbd{index}: {facts}"),
            Self::Unreadable(index) => write!(f, "nbd{index} could not be read"),
        }
    }
}

impl DeviceSnapshot {
    fn facts(&self) -> Option<&Facts> {
        match self {
            Self::There(_, facts) => Some(facts),
            _ => None,
        }
    }
}

/// Names the rule that the command broke, if `error` is the kernel's refusal.
pub(super) fn explain(
    roots: &Roots,
    stage: Stage,
    attempt: &RefusedCommand,
    before: Option<&DeviceSnapshot>,
    error: Error,
    deadline: Deadline,
) -> Error {
    let Some(errno) = error.errno().map(Errno::from_raw) else {
        return error;
    };
    let after = read_facts_and_openers(roots, attempt.index, deadline);
    let refusal = match errno {
        Errno::EBUSY => Some(explain_busy(attempt, before, &after)),
        Errno::EINVAL => Some(explain_invalid(roots, stage, attempt, before, &after)),
        Errno::EEXIST => {
            let words = "another process was making the same NBD device";
            Some((Refusal::Raced, words.to_owned()))
        }
        Errno::ENOSPC => {
            let words = "the nbd module has no index left";
            Some((Refusal::NoIndexLeft, words.to_owned()))
        }
        _ => None,
    };
    let Some((refusal, words)) = refusal else {
        return error.with_last_seen(after.to_string());
    };
    Error::of_errno(&words, errno)
        .with_kind(refusal.kind())
        .at(stage)
        .with_last_seen(after.to_string())
        .caused_by(refusal)
}

fn explain_busy(
    attempt: &RefusedCommand,
    before: Option<&DeviceSnapshot>,
    after: &DeviceSnapshot,
) -> (Refusal, String) {
    let name = name(attempt);
    let snapshots = [Some(after), before].into_iter().flatten();
    let mut seen = snapshots.filter_map(DeviceSnapshot::facts);
    if let Some(facts) = seen.clone().find(|facts| facts.pid.is_some()) {
        let backend = facts.backend.as_deref();
        let backend = backend.map_or_else(
            || "without a backend id".to_owned(),
            |id| format!("with backend id {id}"),
        );
        let words = format!("{name} is connected already, {backend}");
        return (Refusal::Connected, words);
    }
    let openers = seen.find(|facts| !facts.openers.is_empty());
    let who = openers.map_or_else(
        || "a process that has closed it since, that /proc does not show, or that was not found in \
             time"
            .to_owned(),
        |facts| list(&facts.openers),
    );
    let words = format!("{name} is not connected, and is open: {who}");
    (Refusal::OpenedByOther, words)
}

fn explain_invalid(
    roots: &Roots,
    stage: Stage,
    attempt: &RefusedCommand,
    before: Option<&DeviceSnapshot>,
    after: &DeviceSnapshot,
) -> (Refusal, String) {
    let name = name(attempt);
    // First check the command itself: those mistakes cannot have changed
    // meanwhile.
    if let Some(broken) = broken_by_arguments(roots, attempt) {
        return broken;
    }
    if stage != Stage::Connect && matches!(after, DeviceSnapshot::Absent(_)) {
        let words = format!("there is no {name}");
        return (Refusal::UnknownIndex, words);
    }
    match (stage, after.facts()) {
        (Stage::Reconfigure, Some(facts)) if facts.pid.is_none() => {
            (Refusal::NotConnected, format!("{name} is not connected"))
        }
        (Stage::Reconfigure, Some(facts)) if other_backend(attempt, facts) => {
            let given = attempt.backend.as_ref().map_or("none", BackendId::as_str);
            let found = facts.backend.as_deref().unwrap_or("none");
            let words = format!("{name} has backend id {found}, and the one given is {given}");
            (Refusal::OtherBackend, words)
        }
        // The disk exists, or did a moment ago, and the driver does not accept
        // it. The only cause left is that it is being removed.
        (Stage::Disconnect, _) | (Stage::Reconfigure, Some(_)) => {
            (Refusal::GoingDown, format!("{name} is being taken away"))
        }
        (Stage::Connect, None) if before.is_some_and(|before| before.facts().is_some()) => {
            (Refusal::GoingDown, format!("{name} is being taken away"))
        }
        _ => {
            let words = format!(
                "the kernel refused to {stage} {name}, for a reason that sysfs does not show (a \
                 socket that is neither TCP nor a unix stream, or a device that is being taken \
                 away); its log may say which"
            );
            (Refusal::Unseen, words)
        }
    }
}

/// A device with an id requires the same id; a device without one ignores any.
fn other_backend(attempt: &RefusedCommand, facts: &Facts) -> bool {
    let given = attempt.backend.as_ref().map(BackendId::as_str);
    facts.backend.is_some() && facts.backend.as_deref() != given
}

fn broken_by_arguments(roots: &Roots, attempt: &RefusedCommand) -> Option<(Refusal, String)> {
    if let Some(size) = attempt.size.filter(|&size| i64::try_from(size).is_err()) {
        let words = format!(
            "a size of {size} bytes: the kernel takes at most {}",
            i64::MAX
        );
        return Some((Refusal::Size, words));
    }
    if let Some(size) = attempt.block_size.filter(|&size| !is_block_size(size)) {
        let words = format!("a block size of {size}: expected a power of two from 512 to a page");
        return Some((Refusal::BlockSize, words));
    }
    if attempt.size.is_some() && attempt.sockets > 1 && !attempt.multi_conn {
        let words = format!(
            "{} connections to a server that does not allow several (CAN_MULTI_CONN)",
            attempt.sockets
        );
        return Some((Refusal::MultiConn, words));
    }
    let last = last_index(roots).ok()?;
    let index = attempt.index.filter(|index| index.get() > last)?;
    let words = format!("the nbd module numbers its devices up to {last}, and not {index}");
    Some((Refusal::IndexTooLarge, words))
}

fn is_block_size(size: u32) -> bool {
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    let page = page.and_then(|page| u32::try_from(page).ok());
    size.is_power_of_two() && size >= 512 && page.is_none_or(|page| size <= page)
}

/// The last index. Each device takes as many minors as `max_part` needs bits,
/// of 20 (`nbd_init`, `part_shift`; `include/linux/kdev_t.h`, `MINORBITS`).
fn last_index(roots: &Roots) -> Result<u32> {
    const MINOR_BITS: u32 = 20;
    let partitions: u32 = sysfs::parse(&roots.sysfs.join("module/nbd/parameters/max_part"))?;
    let shift = u32::BITS - partitions.leading_zeros();
    Ok((1 << MINOR_BITS.saturating_sub(shift)) - 1)
}

fn name(attempt: &RefusedCommand) -> String {
    attempt
        .index
        .map_or_else(|| "an NBD device".to_owned(), NbdIndex::name)
}
