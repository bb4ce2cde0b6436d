//! The command line's commands and options.
#![allow(
    clippy::doc_markdown,
    reason = "clap prints these comments as they are"
)]

mod device;
mod discover;
mod heal;
mod iscsi;
mod journal;
mod limit;
mod nbd;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

pub(crate) use self::device::{Attach, Detach, Resize};
pub(crate) use self::discover::{Discover, DiscoverAt};
pub(crate) use self::heal::Heal;
pub(crate) use self::journal::{Apply, Journal, JournalPlace, Reap, Recover, Status};

/// Attach and detach block devices by talking to the kernel alone.
///
/// SOURCE is scsi:HOST:CHANNEL:TARGET:LUN, as sysfs and lsscsi print it (a LUN may also be
/// written as flat-N, which is flat space address N, or as 0x and 16 hex digits, which are the
/// wire bytes); iscsi://PORTAL[,PORTAL...]/IQN/LUN, over existing sessions or over those that
/// `attach --log-in` makes; fc://WWPN[,WWPN...]/LUN, over the local ports that see these ports
/// of the target; or an NBD URI: nbd://HOST[:PORT]/EXPORT, nbds://HOST[:PORT]/EXPORT, which uses
/// TLS, or nbd+unix:///EXPORT?socket=PATH.
///
/// Exit codes: 0 done, 1 other, 2 usage, 3 not found or too few paths, 4 identity mismatch, 5 in
/// use, 6 timed out, 7 not permitted, 8 not supported here, 9 `status` found a volume that is
/// not as wanted, 130 and 143 ended by SIGINT and SIGTERM; an attach that is so ended is
/// undone.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Print one JSON object on standard output; `apply`, `watch` and `heal --watch` print one
    /// object on each line. Print an error as one object on standard error.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Show on standard error what the engine does: -v shows its steps, -vv also what it
    /// reads. LUNBD_LOG=LEVEL or LUNBD_LOG=MODULE=LEVEL,... chooses in more detail.
    /// `apply --watch` and `heal --watch` always show warnings.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Command {
    /// Whether it runs until it is interrupted: then no caller waits for its exit code.
    pub(crate) fn runs_until_interrupted(&self) -> bool {
        match self {
            Self::Apply(what) => what.watch,
            Self::Heal(what) => what.watch,
            _ => false,
        }
    }
}

// `defer`: clap builds only the arguments of the command that is typed. A doc comment on the
// struct of the arguments would replace the command's own text.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum Command {
    /// Attach one device and wait until it has settled.
    Attach(Attach),
    /// Flush and detach one unit with all its paths. A unit that is in use is refused.
    Detach(Detach),
    /// Give a device the size that its SCSI unit has on the array now: first all its paths,
    /// then its multipath map; or the size that its NBD server reports. An NBD device is never
    /// shrunk.
    Resize(Resize),
    /// Give new connections to NBD devices whose server is back, or log in again to lost iSCSI
    /// sessions.
    Heal(Heal),
    /// Ask an iSCSI portal for the targets that it knows and the portals of each, or an NBD
    /// server for the exports that it lists, with their size and flags. No daemon is needed.
    Discover(Discover),
    /// Recover after a crash: find every volume of the journal on this machine, finish or undo
    /// what was begun, and report the result.
    Recover(Recover),
    /// Bring the volumes of the journal to what a file says: attach the volumes that it wants,
    /// and detach all others. Print the plan, do it, and print what is left of it.
    Apply(Apply),
    /// Show the state of every volume of the journal, also while an agent holds the journal. For
    /// each volume that the agent cannot bring to what is wanted, show why, and when the agent
    /// tries again.
    Status(Status),
    /// Show, forget or restore records of the journal. No device is touched.
    #[command(subcommand)]
    Journal(Journal),
    /// Remove the SCSI devices whose unit is gone on the array, but only if the target itself
    /// says so and no process uses the device. Volumes of the journal are left alone: detach
    /// them.
    Reap(Reap),
    /// List the SCSI units with their paths, maps and mounts, and the connected
    /// NBD devices.
    List,
    /// List all iSCSI sessions, also those of other programs; with --json also all that was
    /// agreed on.
    Sessions,
    /// Print the name with which this machine logs in to iSCSI targets, from
    /// /etc/iscsi/initiatorname.iscsi.
    InitiatorName(InitiatorName),
    /// Print kernel and udev events as they come, until interrupted.
    Watch,
    /// Show what this machine lacks, and how to mend it.
    Doctor,
    /// Print the completions for a shell: bash, elvish, fish, powershell or zsh.
    Completions {
        /// The shell.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Print the manual page, in roff, of lunbd or of one of its commands.
    Man {
        /// The command; by default lunbd itself.
        command: Option<String>,
    },
    /// Print the JSON Schema of the objects that --json prints.
    Schema,
}

#[derive(Debug, Args)]
pub(crate) struct InitiatorName {
    /// If the file does not exist, first create it with a random name in the form of
    /// open-iscsi's names. An existing file is never changed.
    #[arg(long)]
    pub(crate) create: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        super::Arguments::command().debug_assert();
    }
}
