//! The arguments of the commands that work on a journal, and of `reap`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use lunbd::id::VolumeId;

use super::limit::limit;
use crate::detach_limit::DetachLimit;

#[derive(Debug, Args)]
pub(crate) struct Recover {
    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// How long the command may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Apply {
    /// The wanted volumes, in TOML: [[volume]] with id, source or sources, and optionally
    /// expect, min_paths, multipath, min_size (bytes or "16GiB"; the device grows with its unit
    /// on the array, and is never shrunk), [volume.log_in] and [volume.nbd]. EVERY OTHER VOLUME
    /// OF THE JOURNAL IS DETACHED. An empty file is refused; `volume = []` wants no volume. A file
    /// whose first line is `has_end = true` is refused if its last line is not [end].
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: PathBuf,

    /// Show the plan and do nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Exit with 0 if the plan is empty, with 2 if it has a step (also one that waits or is
    /// refused), and with 1 if the file is refused. Another failure has its own code and never
    /// 2: 3 if the file or this machine's iSCSI name is missing.
    #[arg(long, requires = "dry_run")]
    pub(crate) exit_code: bool,

    /// Run until interrupted: keep the volumes as they are wanted, recover the iSCSI sessions
    /// that they log in to, and follow changes of the file.
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) watch: bool,

    /// How many volumes the file, or one change of it with --watch, may detach at once: a
    /// number or all. The default is half of them if there are at least four, and else all.
    /// Volumes that the last version of the file already detaches do not count.
    #[arg(long, value_name = "COUNT")]
    pub(crate) allow_detach: Option<DetachLimit>,

    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// How many volumes are worked on at once.
    #[arg(long, value_name = "COUNT", default_value = "8")]
    pub(crate) threads: NonZeroUsize,

    /// How long the command may take, or with --watch each step of a volume and each read of
    /// the file: 500ms, 60s, 2m.
    #[arg(long, default_value = "2m", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Show only this volume, and the files of the journal that were set aside from it.
    #[arg(long, value_name = "ID")]
    pub(crate) volume: Option<VolumeId>,

    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Journal {
    /// Print each record, and each file that is not a record, also while an agent holds the
    /// journal.
    Show {
        /// Print only the record of this volume.
        #[arg(long, value_name = "ID")]
        volume: Option<VolumeId>,

        #[command(flatten)]
        place: JournalPlace,
    },
    /// Remove the record of a volume, or a file that was set aside. A DEVICE THAT IS ATTACHED
    /// STAYS ATTACHED, and no longer belongs to a volume.
    Forget {
        /// A volume, or the name of a file that was set aside.
        #[arg(value_name = "ID|FILE")]
        what: String,

        #[command(flatten)]
        place: JournalPlace,
    },
    /// Make a file that was set aside the record of its volume again.
    Restore {
        /// The name of the file in the journal's directory.
        #[arg(value_name = "FILE")]
        file: PathBuf,

        #[command(flatten)]
        place: JournalPlace,
    },
}

#[derive(Debug, Args)]
pub(crate) struct JournalPlace {
    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Reap {
    /// Remove nothing; print the proof for each device, and what would be done with it.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// The directory of another journal whose volumes are left alone, besides those of
    /// /run/lunbd/journal. An agent may hold it.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// How long the command may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}
