//! The steps of an attach and a detach.

use std::fmt;

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
