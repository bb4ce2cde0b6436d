//! The address of a logical unit on this machine.

use std::fmt;
use std::str::FromStr;

use super::Lun;
use super::text::{ParseIdError, decimal};

/// A SCSI host number, the `N` of `/sys/class/scsi_host/hostN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostNo(pub u32);

impl fmt::Display for HostNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for HostNo {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        decimal(text)
            .map(Self)
            .ok_or_else(|| ParseIdError::new("a SCSI host number", "a decimal number", text))
    }
}

/// Host, channel, target and LUN, printed `H:C:T:L` as sysfs does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hctl {
    /// The SCSI host.
    pub host: HostNo,
    /// The channel (bus) of the host.
    pub channel: u32,
    /// The target on the channel.
    pub target: u32,
    /// The logical unit of the target, in the kernel's number.
    pub lun: Lun,
}

impl fmt::Display for Hctl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            host,
            channel,
            target,
            lun,
        } = self;
        write!(f, "{host}:{channel}:{target}:{lun}")
    }
}

impl FromStr for Hctl {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let parse = || {
            let mut parts = text.split(':');
            let hctl = Self {
                host: HostNo(decimal(parts.next()?)?),
                channel: decimal(parts.next()?)?,
                target: decimal(parts.next()?)?,
                lun: parts.next()?.parse().ok()?,
            };
            parts.next().is_none().then_some(hctl)
        };
        parse().ok_or_else(|| {
            ParseIdError::new(
                "a SCSI address",
                "HOST:CHANNEL:TARGET:LUN in plain decimal, as sysfs prints it (a LUN may also be flat-N, or 0x and 16 hex digits)",
                text,
            )
        })
    }
}
