//! The arguments of `lunbd attach`, `detach` and `resize`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use lunbd::engine::Multipath;
use lunbd::id::{BackendId, Expected, VolumeId, Wwid};
use lunbd::{DetachTarget, Source};

use super::iscsi::Iscsi;
use super::limit::limit;
use super::nbd::Nbd;

#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// What to attach. Several sources are paths of one SCSI unit.
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<Source>,

    /// Attach only if the unit itself reports this name: naa.HEX, eui.HEX, t10.TEXT,
    /// iqn.TEXT, wwn-0xHEX, or udev's 3HEX. For an NBD source, only if its content has this
    /// name: gpt.GUID, mbr.SIGNATURE, luks.UUID, lvm.UUID, fs.UUID or btrfs.UUID. The last is
    /// blkid's UUID_SUB: the devices of one btrfs have the same fs.UUID.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Expected>,

    /// The least number of paths that must lead to the unit.
    #[arg(long, value_name = "COUNT", default_value = "1")]
    pub(crate) min_paths: usize,

    /// Whether the device is a multipath map: it must be one (require), it is one if
    /// multipathd makes one (prefer), or it is a path (off). Without a map, the device is the
    /// path with the best ALUA access state, and of equal paths the first.
    #[arg(long, value_name = "MODE", default_value = "prefer", value_parser = multipath)]
    pub(crate) multipath: Multipath,

    #[command(flatten)]
    pub(crate) iscsi: Iscsi,

    #[command(flatten)]
    pub(crate) nbd: Nbd,

    /// The name of the volume. With it the attach is recorded in the journal, for `recover`
    /// and for `detach --volume`.
    #[arg(long, value_name = "ID")]
    pub(crate) volume: Option<VolumeId>,

    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub(crate) journal: Option<PathBuf>,

    /// How long the command may take: 500ms, 30s, 2m.
    #[arg(long, default_value = "30s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

// The device or the volume that a command changes: a doc comment would become the help
// of the command.
#[derive(Debug, Args)]
pub(crate) struct DeviceOrVolume {
    /// A source, the node of a disk or of a map or a link to it, or unit:ID, a
    /// unique name of the unit, spelt as in --expect.
    #[arg(
        value_name = "SOURCE|DEVICE|unit:ID",
        required_unless_present = "volume"
    )]
    pub(crate) target: Option<DetachTarget>,

    /// A volume of the journal, in place of the target.
    #[arg(long, value_name = "ID", conflicts_with_all = ["target", "expect", "backend"])]
    pub(crate) volume: Option<VolumeId>,

    /// Refuse a SCSI unit that does not have this name.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Wwid>,

    /// The backend id with which an NBD source was attached, if it was given one.
    #[arg(long, value_name = "ID")]
    pub(crate) backend: Option<BackendId>,
}

#[derive(Debug, Args)]
pub(crate) struct Detach {
    #[command(flatten)]
    pub(crate) of: DeviceOrVolume,

    /// The journal's directory, by default /run/lunbd/journal. If the target is a volume of
    /// the journal, that volume is detached, with its record.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// Go on if the device cannot be written back within half of the time: UNWRITTEN DATA IS
    /// LOST. For a server or target that is gone for good.
    #[arg(long)]
    pub(crate) abandon_unwritten: bool,

    /// Leave the iSCSI sessions that `attach --log-in` made logged in, also those without a
    /// device.
    #[arg(long)]
    pub(crate) keep_sessions: bool,

    /// How long the command may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Resize {
    #[command(flatten)]
    pub(crate) of: DeviceOrVolume,

    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub(crate) journal: Option<PathBuf>,

    /// The least size in bytes that the unit, or the NBD server, must report.
    #[arg(long, value_name = "BYTES")]
    pub(crate) at_least: Option<u64>,

    /// How long the command may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

fn multipath(text: &str) -> Result<Multipath, String> {
    match text {
        "require" => Ok(Multipath::Require),
        "prefer" => Ok(Multipath::Prefer),
        "off" => Ok(Multipath::Off),
        _ => Err("expected require, prefer or off".to_owned()),
    }
}
