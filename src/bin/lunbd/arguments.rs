//! What may be typed.

use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use lunbd::id::Wwid;
use lunbd::{DetachTarget, Source};

/// Attach and detach block devices by talking to the kernel alone.
///
/// SOURCE is scsi:HOST:CHANNEL:TARGET:LUN, as sysfs and lsscsi print it. A LUN
/// may also be written flat-N (flat space address N) or as 0x and 16 hex digits
/// (the wire bytes).
///
/// Exit codes: 0 done, 1 other, 2 usage, 3 not found, 4 identity mismatch, 5 in
/// use, 6 timed out, 7 not permitted, 8 not supported here.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Print one JSON object (`watch`: one a line) on standard output; an error
    /// is one object on standard error.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Attach one logical unit and wait until it has settled.
    Attach(Attach),
    /// Flush and detach one disk; refused while it is in use.
    Detach(Detach),
    /// List the SCSI disks.
    List,
    /// Print kernel and udev events as they come, until interrupted.
    Watch,
    /// Say what this machine lacks, and how to mend it.
    Doctor,
}

#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// What to attach.
    pub(crate) source: Source,

    /// Attach only if the unit itself says that it has this name: naa.HEX,
    /// eui.HEX, t10.TEXT, iqn.TEXT, wwn-0xHEX, or udev's 3HEX.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Wwid>,

    /// How long the whole may take: 500ms, 30s, 2m.
    #[arg(long, default_value = "30s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Detach {
    /// A source, or the path of a disk's node or of a link to it.
    #[arg(value_name = "SOURCE|DEVICE")]
    pub(crate) target: DetachTarget,

    /// How long the whole may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

fn limit(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{error}: expected a number and a unit, as in 500ms, 30s or 2m"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        super::Arguments::command().debug_assert();
    }
}
