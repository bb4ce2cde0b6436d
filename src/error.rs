//! One error type: what went wrong, at which stage, on which path, whether a
//! retry can help, and the chain of causes.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;

use crate::id::ParseIdError;

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure it is. The kind alone decides [`Retry`] and the
/// command's exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    /// The device is mounted, mapped, swapped on or opened exclusively.
    InUse,
    /// The caller's deadline passed. The message names the stage and what was
    /// last seen.
    TimedOut,
    /// The kernel refused for lack of a privilege, or a server by its policy.
    NotPermitted,
    /// The kernel, or a server, refused the request as invalid.
    Refused,
    /// This kind of device or address is not supported.
    NotSupported,
    /// The device exists and is not usable now (blocked, offline, quiesced).
    NotReady,
    /// The device went away, or was replaced by another, in the middle.
    Vanished,
    /// No server is at the address, or it closed the connection, or the
    /// connection broke.
    Unreachable,
    /// The server answered what its protocol does not allow. The message names
    /// the field.
    Protocol,
    /// Any other failure of a system call.
    Io,
}

impl ErrorKind {
    /// The name used in `--json` and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidInput => "invalid_input",
            Self::NoSuchHost => "no_such_host",
            Self::NotFound => "not_found",
            Self::IdentityMismatch => "identity_mismatch",
            Self::InUse => "in_use",
            Self::TimedOut => "timed_out",
            Self::NotPermitted => "not_permitted",
            Self::Refused => "refused",
            Self::NotSupported => "not_supported",
            Self::NotReady => "not_ready",
            Self::Vanished => "vanished",
            Self::Unreachable => "unreachable",
            Self::Protocol => "protocol",
            Self::Io => "io",
        }
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
            Self::TimedOut | Self::NotReady | Self::Vanished | Self::Unreachable | Self::Io => {
                Retry::Again
            }
        }
    }

    fn of_errno(errno: Errno) -> Self {
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

/// Whether repeating a failed call, as it was, can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Retry {
    /// The same call fails the same way: the input itself must change.
    Never,
    /// Something outside must change first: a login, a mapping, a holder, a
    /// privilege.
    AfterChange,
    /// The same call may succeed later and is safe to repeat.
    Again,
}

impl Retry {
    /// The name used in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::AfterChange => "after_change",
            Self::Again => "again",
        }
    }
}

/// The step of an attach or a detach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Stage {
    /// Finding what the caller named.
    Resolve,
    /// Waiting for another process that works on the same LUN.
    Lock,
    /// Writing to the host's `scan` file.
    Scan,
    /// Waiting for the disk driver to bring the block device.
    Probe,
    /// Reading the identity from the device.
    Identify,
    /// Reaching an NBD server.
    Dial,
    /// Agreeing with an NBD server on an export.
    Handshake,
    /// Handing an NBD server's sockets to the kernel.
    Connect,
    /// Handing new sockets to an NBD device that is connected.
    Reconfigure,
    /// Waiting for udev to have handled the device.
    Settle,
    /// Claiming the device exclusively, which proves that nobody uses it.
    Claim,
    /// Writing dirty pages and the device's cache back.
    Flush,
    /// Writing to the device's `delete` file.
    Delete,
    /// Telling the kernel to let go of an NBD device's sockets.
    Disconnect,
    /// Waiting for the SCSI device to be gone.
    Confirm,
}

impl Stage {
    /// The name used in messages, in `--json` and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Lock => "lock",
            Self::Scan => "scan",
            Self::Probe => "probe",
            Self::Identify => "identify",
            Self::Dial => "dial",
            Self::Handshake => "handshake",
            Self::Connect => "connect",
            Self::Reconfigure => "reconfigure",
            Self::Settle => "settle",
            Self::Claim => "claim",
            Self::Flush => "flush",
            Self::Delete => "delete",
            Self::Disconnect => "disconnect",
            Self::Confirm => "confirm",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure, with all that was known when it happened.
///
/// `{}` prints one line; `{:#}` adds the chain of causes.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    stage: Option<Stage>,
    path: Option<PathBuf>,
    errno: Option<Errno>,
    waited: Option<Duration>,
    last_seen: Option<String>,
    cause: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `message` says what happened and what was expected.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            stage: None,
            path: None,
            errno: None,
            waited: None,
            last_seen: None,
            cause: None,
        }))
    }

    /// A system call on `path` that failed; the errno decides the kind.
    pub(crate) fn io(action: &str, path: &Path, error: &io::Error) -> Self {
        let errno = error.raw_os_error().map(Errno::from_raw);
        let kind = errno.map_or(ErrorKind::Io, ErrorKind::of_errno);
        let mut new = match errno {
            Some(errno) => Self::new(kind, format!("{action}: {}", errno.desc())),
            None => Self::new(kind, format!("{action}: {error}")),
        };
        new.0.errno = errno;
        new.0.path = Some(path.to_owned());
        new
    }

    /// A system call on no path that failed; the errno decides the kind.
    pub(crate) fn of_errno(action: &str, errno: Errno) -> Self {
        let message = format!("{action}: {}", errno.desc());
        let mut new = Self::new(ErrorKind::of_errno(errno), message);
        new.0.errno = Some(errno);
        new
    }

    /// The caller's deadline passed at `stage` after `waited`.
    pub(crate) fn timed_out(stage: Stage, waited: Duration, waiting_for: &str) -> Self {
        let mut new = Self::new(ErrorKind::TimedOut, format!("waiting for {waiting_for}"));
        new.0.stage = Some(stage);
        new.0.waited = Some(waited);
        new
    }

    /// Names the stage, unless a deeper one is named already.
    pub(crate) fn at(mut self, stage: Stage) -> Self {
        self.0.stage.get_or_insert(stage);
        self
    }

    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn with_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.0.path = Some(path.into());
        self
    }

    pub(crate) fn with_last_seen(mut self, seen: impl Into<String>) -> Self {
        self.0.last_seen = Some(seen.into());
        self
    }

    pub(crate) fn caused_by(mut self, cause: impl StdError + Send + Sync + 'static) -> Self {
        self.0.cause = Some(Box::new(cause));
        self
    }

    /// The kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether repeating the call can help.
    #[must_use]
    pub fn retry(&self) -> Retry {
        self.0.kind.retry()
    }

    /// The stage at which it happened.
    #[must_use]
    pub fn stage(&self) -> Option<Stage> {
        self.0.stage
    }

    /// The file that was read, written or opened.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// The kernel's error number.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.0.errno.map(|errno| errno as i32)
    }

    /// What the device's state was when the wait ended.
    #[must_use]
    pub fn last_seen(&self) -> Option<&str> {
        self.0.last_seen.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        if inner.kind == ErrorKind::TimedOut {
            f.write_str("timed out")?;
            if let Some(waited) = inner.waited {
                write!(f, " after {:.1} s", waited.as_secs_f64())?;
            }
            if let Some(stage) = inner.stage {
                write!(f, " at stage {stage}")?;
            }
            write!(f, ", {}", inner.message)?;
        } else {
            if let Some(stage) = inner.stage {
                write!(f, "{stage}: ")?;
            }
            f.write_str(&inner.message)?;
        }
        if let Some(path) = &inner.path {
            write!(f, " ({})", path.display())?;
        }
        if let Some(seen) = &inner.last_seen {
            write!(f, "; last seen: {seen}")?;
        }
        if f.alternate() {
            let mut cause = self.source();
            while let Some(error) = cause {
                write!(f, ": {error}")?;
                cause = error.source();
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self:#}", self.kind().as_str())
    }
}

/// The object that `--json` prints of an error.
#[cfg(feature = "serde")]
impl serde::Serialize for Error {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut object = serializer.serialize_struct("Error", 4)?;
        object.serialize_field("kind", self.kind().as_str())?;
        object.serialize_field("stage", &self.stage().map(Stage::as_str))?;
        object.serialize_field("message", &format!("{self:#}"))?;
        object.serialize_field("retry", self.retry().as_str())?;
        object.end()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0
            .cause
            .as_deref()
            .map(|cause| cause as &(dyn StdError + 'static))
    }
}

impl From<ParseIdError> for Error {
    fn from(error: ParseIdError) -> Self {
        Self::new(ErrorKind::InvalidInput, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_names_its_stage_its_length_and_what_was_last_seen() {
        let error = Error::timed_out(Stage::Settle, Duration::from_millis(2500), "udev")
            .with_last_seen("state=running");
        assert_eq!(
            error.to_string(),
            "timed out after 2.5 s at stage settle, waiting for udev; last seen: state=running"
        );
        assert_eq!(error.retry(), Retry::Again);
    }

    #[test]
    fn the_errno_decides_the_kind_and_the_deepest_stage_stays() {
        let denied = io::Error::from_raw_os_error(Errno::EACCES as i32);
        let error = Error::io("cannot write", Path::new("/x/scan"), &denied)
            .at(Stage::Scan)
            .at(Stage::Probe);
        assert_eq!(error.kind(), ErrorKind::NotPermitted);
        assert_eq!(error.stage(), Some(Stage::Scan));
        assert_eq!(
            error.to_string(),
            "scan: cannot write: Permission denied (/x/scan)"
        );
    }

    #[test]
    fn the_alternate_form_prints_the_chain() {
        let inner = Error::new(ErrorKind::Io, "inner");
        let outer = Error::new(ErrorKind::IdentityMismatch, "outer").caused_by(inner);
        assert_eq!(format!("{outer:#}"), "outer: inner");
        assert_eq!(outer.to_string(), "outer");
    }
}
