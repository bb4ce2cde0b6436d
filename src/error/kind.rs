//! The kind of a failure, and whether a retry can help.

use nix::errno::Errno;

/// The kind of a failure. It decides the command's exit code, except after a signal (130, 143)
/// and for a file that `apply --dry-run --exit-code` refuses (1). It also decides [`Retry`],
/// except for failures at stage [`Tls`](super::Stage::Tls).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum ErrorKind {
    /// The input is malformed; nothing was touched.
    InvalidInput,
    /// The SCSI host named by the caller does not exist.
    NoSuchHost,
    /// The target does not present this LUN, the NBD server has no such export,
    /// or the path names no device.
    NotFound,
    /// The device is not the one that the caller expected.
    IdentityMismatch,
    /// A user has the device: a mount, a map, a swap area, another device, a process or a target
    /// of the kernel. This is also the kind if another process holds the journal, if another volume
    /// claims the source, backend id or unit, or if the device is attached with other options.
    InUse,
    /// The caller's deadline passed. The message names the stage and the state that was
    /// last seen.
    TimedOut,
    /// The caller used its [`Cancel`](crate::Cancel). The message names the stage and the
    /// state that was last seen.
    Cancelled,
    /// The kernel refused for lack of a privilege, or a server refused by its policy.
    NotPermitted,
    /// The kernel, or a server, refused the request as invalid.
    Refused,
    /// This kind of device or address is not supported.
    NotSupported,
    /// The device exists but is not usable now (blocked, offline, quiesced, without a path).
    NotReady,
    /// The device went away, or another replaced it, during the call.
    Vanished,
    /// Fewer paths lead to the unit than the caller asks for. The message names each
    /// missing path and why it is missing.
    TooFewPaths,
    /// An earlier kernel call for the same SCSI host, device or directory has not returned. The
    /// message names it; this call did not start.
    Quarantined,
    /// No server listens at the address, or it closed the connection, or the connection
    /// broke.
    Unreachable,
    /// The server's answer breaks its protocol. The message names the field.
    Protocol,
    /// Any other failure of a system call.
    Io,
}

impl ErrorKind {
    /// The name used in `--json` and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether repeating the call can help.
    #[must_use]
    pub fn retry(self) -> Retry {
        match self {
            Self::InvalidInput | Self::Refused | Self::NotSupported => Retry::Never,
            Self::NoSuchHost
            | Self::NotFound
            | Self::IdentityMismatch
            | Self::InUse
            | Self::NotPermitted
            | Self::Protocol => Retry::AfterChange,
            Self::TimedOut
            | Self::Cancelled
            | Self::NotReady
            | Self::Vanished
            | Self::TooFewPaths
            | Self::Quarantined
            | Self::Unreachable
            | Self::Io => Retry::Again,
        }
    }

    /// Whether the call ended early, because its time ran out or the caller cancelled it.
    #[must_use]
    pub(crate) fn is_timeout_or_cancel(self) -> bool {
        matches!(self, Self::TimedOut | Self::Cancelled)
    }

    pub(super) fn of_errno(errno: Errno) -> Self {
        match errno {
            Errno::EACCES | Errno::EPERM | Errno::EROFS => Self::NotPermitted,
            Errno::EINVAL => Self::Refused,
            Errno::EBUSY => Self::InUse,
            Errno::ENODEV | Errno::ENXIO | Errno::ENOENT => Self::Vanished,
            Errno::EOPNOTSUPP | Errno::ENOTTY | Errno::ENOSYS => Self::NotSupported,
            _ => Self::Io,
        }
    }
}

/// Whether repeating the failed call unchanged can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Retry {
    /// The same call fails the same way: the input itself must change.
    Never,
    /// Something outside the call must change first: a login, a mapping, a holder, a
    /// privilege.
    AfterChange,
    /// The same call may succeed later and is safe to repeat.
    Again,
}

impl Retry {
    /// The name used in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
