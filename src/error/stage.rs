//! The stages of a call.

/// A stage of a call.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display, strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Stage {
    /// Finding what the caller named.
    Resolve,
    /// Waiting for another call, also of another process, that works on the same address, unit,
    /// NBD device or volume.
    Lock,
    /// Waiting for earlier kernel calls on the same SCSI host.
    Queue,
    /// Writing to the host's `scan` file.
    Scan,
    /// Waiting for the disk driver to create the block device, or for an NBD device to answer a
    /// read.
    Probe,
    /// Reading the identity from the device.
    Identify,
    /// Connecting to an NBD server or an iSCSI portal.
    Dial,
    /// Negotiating an export with an NBD server.
    Handshake,
    /// Negotiating TLS with an NBD server, and handing its keys to the kernel.
    Tls,
    /// Negotiating a session with an iSCSI target.
    Login,
    /// Asking an iSCSI portal for its targets.
    Discover,
    /// Handing the connection of an iSCSI login to the kernel.
    Session,
    /// Handing an NBD server's sockets to the kernel.
    Connect,
    /// Handing new sockets or a new size to a connected NBD device.
    Reconfigure,
    /// Waiting for the multipath map, or asking multipathd for it.
    Map,
    /// Waiting until udev has handled the device.
    Settle,
    /// Claiming the device exclusively, which proves that nothing uses it.
    Claim,
    /// Writing back dirty pages and the device's cache.
    Flush,
    /// Removing the multipath map.
    RemoveMap,
    /// Writing to the device's `delete` file.
    Delete,
    /// Telling the kernel to release the sockets of an NBD device.
    Disconnect,
    /// Waiting until the SCSI device is gone or the NBD device is free.
    Confirm,
    /// Waiting until multipathd has forgotten a path.
    Forget,
    /// Ending an iSCSI session.
    Logout,
    /// Making the kernel read a device's size again.
    Rescan,
    /// Giving the multipath map the new size of its paths.
    Resize,
    /// Asking a mounted file system how full it is.
    Measure,
    /// Recording in the journal an operation that begins or has ended.
    Journal,
    /// Waiting until a volume is in its desired state.
    Converge,
}

impl Stage {
    /// The name used in messages, in `--json` and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
