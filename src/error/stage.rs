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
    /// Waiting for the kernel calls before it on the same SCSI host.
    Queue,
    /// Writing to the host's `scan` file.
    Scan,
    /// Waiting for the disk driver to bring the block device.
    Probe,
    /// Reading the identity from the device.
    Identify,
    /// Reaching an NBD server or an iSCSI portal.
    Dial,
    /// Agreeing with an NBD server on an export.
    Handshake,
    /// Agreeing with an NBD server on TLS, and handing its keys to the kernel.
    Tls,
    /// Agreeing with an iSCSI target on a session.
    Login,
    /// Asking an iSCSI portal for its targets.
    Discover,
    /// Handing an iSCSI login's connection to the kernel.
    Session,
    /// Handing an NBD server's sockets to the kernel.
    Connect,
    /// Handing new sockets, or a new size, to an NBD device that is connected.
    Reconfigure,
    /// Waiting for the multipath map, or asking multipathd for it.
    Map,
    /// Waiting for udev to have handled the device.
    Settle,
    /// Claiming the device exclusively, which proves that nobody uses it.
    Claim,
    /// Writing dirty pages and the device's cache back.
    Flush,
    /// Taking the multipath map down.
    RemoveMap,
    /// Writing to the device's `delete` file.
    Delete,
    /// Telling the kernel to let go of an NBD device's sockets.
    Disconnect,
    /// Waiting for the SCSI device to be gone.
    Confirm,
    /// Waiting for multipathd to have forgotten a path.
    Forget,
    /// Ending an iSCSI session.
    Logout,
    /// Having the kernel read a device's size again.
    Rescan,
    /// Giving the multipath map its paths' new size.
    Resize,
    /// Asking a mounted file system how full it is.
    Measure,
    /// Writing down what is about to be done, or what was.
    Journal,
    /// Waiting for a volume to be as it is wanted.
    Converge,
}

impl Stage {
    /// The name used in messages, in `--json` and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Lock => "lock",
            Self::Queue => "queue",
            Self::Scan => "scan",
            Self::Probe => "probe",
            Self::Identify => "identify",
            Self::Dial => "dial",
            Self::Handshake => "handshake",
            Self::Tls => "tls",
            Self::Login => "login",
            Self::Discover => "discover",
            Self::Session => "session",
            Self::Connect => "connect",
            Self::Reconfigure => "reconfigure",
            Self::Map => "map",
            Self::Settle => "settle",
            Self::Claim => "claim",
            Self::Flush => "flush",
            Self::RemoveMap => "remove_map",
            Self::Delete => "delete",
            Self::Disconnect => "disconnect",
            Self::Confirm => "confirm",
            Self::Forget => "forget",
            Self::Logout => "logout",
            Self::Rescan => "rescan",
            Self::Resize => "resize",
            Self::Measure => "measure",
            Self::Journal => "journal",
            Self::Converge => "converge",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
