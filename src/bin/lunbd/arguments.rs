//! The command line's commands and options.
#![allow(
    clippy::doc_markdown,
    reason = "clap prints these comments as they are"
)]

use std::net::IpAddr;
use std::num::{NonZeroU16, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use lunbd::engine::{Multipath, NbdOptions, SessionRecoveryOptions};
use lunbd::id::{
    BackendId, Expected, InterfaceName, Iqn, NbdIndex, NbdServer, NbdUri, Portal, VolumeId, Wwid,
};
use lunbd::iscsi::{
    Credentials, CredentialsFile, CredentialsSource, INITIATOR_NAME_FILE, SessionOptions, Tunable,
    Tunables, initiator_name,
};
use lunbd::{Deadline, DetachTarget, Error, ErrorKind, Source};

use crate::detach_limit::DetachLimit;

/// Attach and detach block devices by talking to the kernel alone.
///
/// SOURCE is scsi:HOST:CHANNEL:TARGET:LUN, as sysfs and lsscsi print it (a LUN may also be
/// written as flat-N, which is flat space address N, or as 0x and 16 hex digits, which are the
/// wire bytes); iscsi://PORTAL[,PORTAL...]/IQN/LUN, over existing sessions or over those that
/// `attach --log-in` makes; fc://WWPN[,WWPN...]/LUN, over the local ports that see these ports
/// of the target; or an NBD URI: nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH.
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

    /// Print one JSON object (`watch`: one a line) on standard output, and an error as one
    /// object on standard error.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Show on standard error what the engine does: -v shows its steps, -vv also what it
    /// reads. LUNBD_LOG=LEVEL or LUNBD_LOG=MODULE=LEVEL,... chooses in more detail.
    /// `apply --watch` and `heal --watch` always show warnings.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Command {
    /// Whether it runs until it is interrupted, so that no caller waits for its exit code.
    pub(crate) fn stays(&self) -> bool {
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
    /// Give new connections to NBD devices whose server went away and came back.
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
pub(crate) struct Attach {
    /// What to attach. Several sources are paths of one SCSI unit.
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<Source>,

    /// Attach only if the unit itself reports this name: naa.HEX, eui.HEX, t10.TEXT,
    /// iqn.TEXT, wwn-0xHEX, or udev's 3HEX. For an NBD source, only if its content has this
    /// name: gpt.GUID, mbr.SIGNATURE, luks.UUID, lvm.UUID or fs.UUID.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Expected>,

    /// The least number of paths that must lead to the unit.
    #[arg(long, value_name = "COUNT", default_value = "1")]
    pub(crate) min_paths: usize,

    /// Whether the device is a multipath map: it must be one (require), it is one if
    /// multipathd makes one (prefer), or it is the first path (off).
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
    /// OF THE JOURNAL IS DETACHED. An empty file is refused; `volume = []` wants no volume.
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: PathBuf,

    /// Show the plan and do nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Exit with 0 if the plan is empty, with 2 if it has a step (also one that waits or is
    /// refused), and with 1 if the file is refused.
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

// How the command logs in to an iSCSI source.
#[derive(Debug, Args)]
#[command(next_help_heading = "iSCSI")]
pub(crate) struct Iscsi {
    /// Log in through each portal without a session, all at once. No daemon is needed. The
    /// detach of the last device on such a session logs it out.
    #[arg(long)]
    log_in: bool,

    /// Offer the target checksums over headers and data (CRC32C), or require them:
    /// --digests=require.
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "offer", requires = "log_in")]
    digests: Option<Digests>,

    /// How long I/O waits for a lost session before it fails, in whole seconds. The default
    /// is 5s if a multipath map with other paths is wanted, and else 2m.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "log_in")]
    recovery_timeout: Option<Duration>,

    /// Set one of: nop_interval and nop_timeout (seconds; 0 never pings), queue_depth,
    /// commands_max, abort_timeout, lu_reset_timeout, target_reset_timeout (seconds),
    /// first_burst, max_burst, receive_segment, send_segment (bytes). This is for new
    /// sessions: an existing one keeps its own settings, and those that differ are printed.
    #[arg(long, value_name = "NAME=VALUE", value_parser = tunable, requires = "log_in")]
    tune: Vec<(Tunable, u32)>,

    #[command(flatten)]
    local: LocalEnd,

    #[command(flatten)]
    who: Initiator,
}

// The local end of a login's connection.
#[derive(Debug, Args)]
pub(crate) struct LocalEnd {
    /// Connect through this network interface alone.
    #[arg(long, value_name = "NAME")]
    pub(crate) interface: Option<InterfaceName>,

    /// Connect from this address of this machine.
    #[arg(long, value_name = "IP")]
    pub(crate) source_address: Option<IpAddr>,
}

impl LocalEnd {
    pub(crate) fn is_given(&self) -> bool {
        self.interface.is_some() || self.source_address.is_some()
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Digests {
    /// The target chooses.
    Offer,
    /// A target that does not take them is refused.
    Require,
}

impl Iscsi {
    /// The options of the login; `None` if no login is wanted.
    pub(crate) fn options(&self) -> lunbd::Result<Option<SessionOptions>> {
        if !self.log_in {
            if self.local.is_given() {
                let message = "--interface and --source-address need --log-in";
                return Err(Error::new(ErrorKind::InvalidInput, message));
            }
            return Ok(None);
        }
        let initiator = self.who.initiator()?;
        let mut options = SessionOptions::new(initiator);
        options = match self.digests {
            None => options,
            Some(Digests::Offer) => options.digests(true, true),
            Some(Digests::Require) => options.require_digests(),
        };
        // The journal stores where the credentials are, and not what they are.
        if let Some(source) = self.who.credentials()? {
            options = options.credentials_from(source);
        }
        if let Some(limit) = self.recovery_timeout {
            options = options.recovery_timeout(limit);
        }
        let mut tunables = Tunables::default();
        for (tunable, value) in &self.tune {
            tunables.set(*tunable, *value)?;
        }
        options = options.tunables(tunables);
        if let Some(name) = &self.local.interface {
            options = options.interface(name.clone());
        }
        if let Some(address) = self.local.source_address {
            options = options.source_address(address);
        }
        Ok(Some(options))
    }
}

// The name and the credentials of a login at an iSCSI portal.
#[derive(Debug, Args)]
pub(crate) struct Initiator {
    /// The name with which to log in, by default this machine's in
    /// /etc/iscsi/initiatorname.iscsi.
    #[arg(long, value_name = "NAME")]
    initiator: Option<Iqn>,

    /// Log in with CHAP: a file of lines user=NAME and secret=SECRET; for mutual CHAP also
    /// target_secret=SECRET, and target_user=NAME to check the target's name; and
    /// algorithms=SHA3-256,SHA1,MD5,SHA256 to offer these instead of all, the most wanted
    /// first. Without the file, LUNBD_CHAP_USER, LUNBD_CHAP_SECRET,
    /// LUNBD_CHAP_TARGET_SECRET, LUNBD_CHAP_TARGET_USER and LUNBD_CHAP_ALGORITHMS give the
    /// same if they are set. A line [IQN] or [PORTAL] begins a section for that target or
    /// portal alone. Only its owner should be able to read the file (chmod 0600).
    #[arg(long, value_name = "FILE")]
    chap_file: Option<PathBuf>,
}

impl Initiator {
    pub(crate) fn initiator(&self) -> lunbd::Result<Iqn> {
        match &self.initiator {
            Some(name) => Ok(name.clone()),
            None => initiator_name(Path::new(INITIATOR_NAME_FILE)),
        }
    }

    /// Where the credentials are, if there are any.
    pub(crate) fn credentials(&self) -> lunbd::Result<Option<CredentialsSource>> {
        let Some(file) = &self.chap_file else {
            let source = CredentialsSource::Environment(CredentialsSource::VARIABLES.to_owned());
            return Ok(Credentials::from_environment()?.map(|_| source));
        };
        let path = std::path::absolute(file).unwrap_or(file.clone());
        Ok(Some(CredentialsSource::File(path)))
    }
}

// How an NBD source is attached.
#[derive(Debug, Args)]
#[command(next_help_heading = "NBD")]
pub(crate) struct Nbd {
    /// The device /dev/nbdN, by default the lowest free one.
    #[arg(long, value_name = "N")]
    index: Option<NbdIndex>,

    /// The id that the kernel stores with the device, by default the URI.
    #[arg(long, value_name = "ID")]
    pub(crate) backend: Option<BackendId>,

    /// How many connections carry I/O, if the server allows several.
    #[arg(long, value_name = "COUNT", default_value = "1")]
    connections: NonZeroU16,

    /// Have the kernel refuse writes.
    #[arg(long)]
    read_only: bool,

    /// The logical block size, for images whose partition table was not made with 512-byte
    /// sectors. The default is the server's minimum, and at least 512.
    #[arg(long, value_name = "BYTES")]
    block_size: Option<u32>,

    /// Attach also if the volume's content has other names than the journal's record of it,
    /// and record the new ones.
    #[arg(long, requires = "volume")]
    accept_content: bool,

    /// How long one request may take before its connection is taken for dead.
    #[arg(long, value_name = "LIMIT", default_value = "30s", value_parser = limit)]
    io_timeout: Duration,

    /// How long requests wait for a server that is gone, before they fail.
    #[arg(long, value_name = "LIMIT", default_value = "5m", value_parser = limit)]
    dead_timeout: Duration,
}

impl Nbd {
    pub(crate) fn options(self) -> NbdOptions {
        let mut options = NbdOptions::default()
            .connections(self.connections)
            .io_timeout(self.io_timeout)
            .dead_connection_timeout(self.dead_timeout);
        if let Some(index) = self.index {
            options = options.index(index);
        }
        if let Some(id) = self.backend {
            options = options.backend(id);
        }
        if self.read_only {
            options = options.read_only();
        }
        if let Some(bytes) = self.block_size {
            options = options.block_size(bytes);
        }
        if self.accept_content {
            options = options.accept_content();
        }
        options
    }
}

#[derive(Debug, Args)]
pub(crate) struct Heal {
    /// Heal only the device of this NBD source, or lunbd's sessions that lead to this iSCSI
    /// source. By default, heal every NBD device that was attached by its URI.
    #[arg(group = "one")]
    pub(crate) source: Option<Source>,

    /// Heal only the source of this volume of the journal.
    #[arg(long, value_name = "ID", group = "one", conflicts_with = "backend")]
    pub(crate) volume: Option<VolumeId>,

    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub(crate) journal: Option<PathBuf>,

    /// The id that the kernel stores with the device, by default the URI.
    #[arg(long, value_name = "ID", requires = "source", help_heading = "NBD")]
    backend: Option<BackendId>,

    /// How long one request may take from now on before its connection is taken for dead, by
    /// default as at the attach.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "one", help_heading = "NBD")]
    io_timeout: Option<Duration>,

    /// How long requests wait from now on for a server that is gone, before they fail; by
    /// default as at the attach.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "one", help_heading = "NBD")]
    dead_timeout: Option<Duration>,

    /// Accept what the server serves now as the volume, also if its content is that of another
    /// volume.
    #[arg(long, requires = "one", help_heading = "NBD")]
    accept_content: bool,

    /// Run until interrupted: heal links as they die, and log in again to lost iSCSI sessions
    /// that `attach --log-in` made.
    #[arg(long, conflicts_with = "one")]
    pub(crate) watch: bool,

    /// Log in again with CHAP, from a file as for `attach --chap-file`, which is read before
    /// each login; without the file from the same environment variables.
    #[arg(long, value_name = "FILE", help_heading = "iSCSI")]
    chap_file: Option<PathBuf>,

    /// Offer the target checksums (CRC32C) if it is not known whether a session had them,
    /// because it was lost before this command began.
    #[arg(long, help_heading = "iSCSI")]
    digests: bool,

    /// How long to dial servers that are not back yet: 30s, 5m.
    #[arg(long, default_value = "30s", value_parser = limit, conflicts_with = "watch")]
    pub(crate) timeout: Duration,
}

impl Heal {
    /// The options with which the device of one source is healed.
    pub(crate) fn nbd_options(&self, mut options: NbdOptions) -> NbdOptions {
        if let Some(id) = &self.backend {
            options = options.backend(id.clone());
        }
        if let Some(limit) = self.io_timeout {
            options = options.io_timeout(limit);
        }
        if let Some(limit) = self.dead_timeout {
            options = options.dead_connection_timeout(limit);
        }
        if self.accept_content {
            options = options.accept_content();
        }
        options
    }

    /// Refuses options for sessions if no session is logged in again.
    pub(crate) fn refuse_without_sessions(&self) -> lunbd::Result<()> {
        if !self.digests && self.chap_file.is_none() {
            return Ok(());
        }
        let message = "--digests and --chap-file are for iSCSI sessions: name an iSCSI source, or \
                       give --watch";
        Err(Error::new(ErrorKind::InvalidInput, message))
    }

    /// The options with which sessions are logged in again.
    pub(crate) fn recovery_options(&self) -> SessionRecoveryOptions {
        /// A file system that does not answer delays one login, and not all of them.
        const TO_READ: Duration = Duration::from_secs(10);
        let file = self.chap_file.clone();
        let patience = self.timeout.min(TO_READ);
        let options = SessionRecoveryOptions::new().digests(self.digests, self.digests);
        options.credentials(move |session| match &file {
            Some(file) => {
                let known = CredentialsFile::read_within(file, Deadline::after(patience))?;
                Ok(known.find(Some(&session.target), &session.portal).cloned())
            }
            None => Credentials::from_environment(),
        })
    }
}

#[derive(Debug, Args)]
pub(crate) struct InitiatorName {
    /// If the file does not exist, first create it with a random name in the form of
    /// open-iscsi's names. An existing file is never changed.
    #[arg(long)]
    pub(crate) create: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Detach {
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

    /// The journal's directory, by default /run/lunbd/journal. If the target is a volume of
    /// the journal, that volume is detached, with its record.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// Detach only the SCSI unit that has this name.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Wwid>,

    /// The backend id with which an NBD source was attached, if it was given one.
    #[arg(long, value_name = "ID")]
    pub(crate) backend: Option<BackendId>,

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

    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub(crate) journal: Option<PathBuf>,

    /// Resize only the SCSI unit that has this name.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Wwid>,

    /// The backend id with which an NBD source was attached, if it was given one.
    #[arg(long, value_name = "ID")]
    pub(crate) backend: Option<BackendId>,

    /// The least size in bytes that the unit, or the NBD server, must report.
    #[arg(long, value_name = "BYTES")]
    pub(crate) at_least: Option<u64>,

    /// How long the command may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Discover {
    /// An iSCSI portal, HOST or HOST:PORT, with an IPv6 address in brackets; or an NBD server,
    /// nbd://HOST[:PORT], nbds://HOST[:PORT] or nbd+unix:///?socket=PATH.
    #[arg(value_name = "PORTAL|NBD-URI")]
    pub(crate) at: DiscoverAt,

    #[command(flatten)]
    pub(crate) who: Initiator,

    #[command(flatten)]
    pub(crate) local: LocalEnd,

    /// How long the command may take: 500ms, 30s, 2m.
    #[arg(long, default_value = "30s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

/// The server that is asked for what it serves.
#[derive(Debug, Clone)]
pub(crate) enum DiscoverAt {
    Iscsi(Portal),
    Nbd(NbdServer),
}

impl FromStr for DiscoverAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.starts_with("nbd") || !text.contains("://") {
            let portal = text.parse::<Portal>();
            return portal.map(Self::Iscsi).map_err(|error| error.to_string());
        }
        let uri = text.parse::<NbdUri>().map_err(|error| error.to_string())?;
        if !uri.export().is_empty() {
            return Err("expected an NBD server without an export".to_owned());
        }
        Ok(Self::Nbd(uri.server().clone()))
    }
}

fn multipath(text: &str) -> Result<Multipath, String> {
    match text {
        "require" => Ok(Multipath::Require),
        "prefer" => Ok(Multipath::Prefer),
        "off" => Ok(Multipath::Off),
        _ => Err("expected require, prefer or off".to_owned()),
    }
}

fn tunable(text: &str) -> Result<(Tunable, u32), String> {
    let (name, value) = text
        .split_once('=')
        .ok_or("expected NAME=VALUE, as in queue_depth=64")?;
    let tunable: Tunable = name.parse().map_err(|error: Error| error.to_string())?;
    let value = value
        .parse()
        .map_err(|_| format!("{value:?} is no whole number of 32 bits"))?;
    let mut alone = Tunables::default();
    alone
        .set(tunable, value)
        .map_err(|error| error.to_string())?;
    Ok((tunable, value))
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
