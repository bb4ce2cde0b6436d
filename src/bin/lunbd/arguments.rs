//! What may be typed.
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
/// SOURCE is scsi:HOST:CHANNEL:TARGET:LUN, as sysfs and lsscsi print it (a LUN
/// may also be written flat-N, flat space address N, or as 0x and 16 hex digits,
/// the wire bytes); iscsi://PORTAL[,PORTAL...]/IQN/LUN over sessions that are
/// logged in, or that `attach --log-in` makes; fc://WWPN[,WWPN...]/LUN over the ports that see the target's; or an
/// NBD URI: nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH.
///
/// Exit codes: 0 done, 1 other, 2 usage, 3 not found or too few paths, 4 identity mismatch, 5 in
/// use, 6 timed out, 7 not permitted, 8 not supported here, 9 `status` found a volume that
/// is not as wanted, 130 and 143 ended by SIGINT and
/// SIGTERM, with what an attach brought undone.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Print one JSON object (`watch`: one a line) on standard output; an error
    /// is one object on standard error.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Show what the engine does, on standard error: -v its steps, -vv also what it
    /// looks at. LUNBD_LOG=LEVEL or LUNBD_LOG=MODULE=LEVEL,... says it more finely.
    /// `apply --watch` and `heal --watch` show warnings in any case.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Command {
    /// Whether it runs until it is interrupted, so that nobody waits for its exit code.
    pub(crate) fn stays(&self) -> bool {
        match self {
            Self::Apply(what) => what.watch,
            Self::Heal(what) => what.watch,
            _ => false,
        }
    }
}

// `defer`: of all commands only the one that is typed has its arguments built. They come
// after the command's own text, which a doc comment of theirs would replace.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum Command {
    /// Attach one device and wait until it has settled.
    Attach(Attach),
    /// Flush and detach one unit with all its paths; refused while it is in use.
    Detach(Detach),
    /// Take in the size that a SCSI unit has on the array now: all its paths,
    /// then its multipath map; or that the server of an NBD device says. Nothing is
    /// shrunk on NBD.
    Resize(Resize),
    /// Give NBD devices whose server went away and came back their new
    /// connections.
    Heal(Heal),
    /// Ask an iSCSI portal which targets it knows, and where each is to be
    /// reached; or an NBD server which exports it lists, with their size and flags. No
    /// daemon is needed.
    Discover(Discover),
    /// After a crash: find every volume of the journal on this machine, finish or
    /// undo what was begun, and say what was found.
    Recover(Recover),
    /// Bring the volumes of the journal to what a file says: attach what it wants
    /// and detach all else. The plan is shown, done, and what is left of it shown.
    Apply(Apply),
    /// Say of every volume of the journal how it stands, also while an agent holds
    /// the journal; and of each that the agent fails to bring to what is wanted, why
    /// and when it is tried again.
    Status(Status),
    /// Show, forget or restore what the journal has written down. No device is touched.
    #[command(subcommand)]
    Journal(Journal),
    /// Take away the SCSI devices whose unit is gone on the array: only where the
    /// target itself says so, and nobody uses the device. Volumes of the journal
    /// are left to their detach.
    Reap(Reap),
    /// List the SCSI units with their paths, maps and mounts, and the connected
    /// NBD devices.
    List,
    /// List the iSCSI sessions, whoever made them; with --json all that was agreed
    /// on.
    Sessions,
    /// Print the name by which this machine logs in to iSCSI targets, as
    /// /etc/iscsi/initiatorname.iscsi has it.
    InitiatorName(InitiatorName),
    /// Print kernel and udev events as they come, until interrupted.
    Watch,
    /// Say what this machine lacks, and how to mend it.
    Doctor,
    /// Print the completions for a shell: bash, elvish, fish, powershell or zsh.
    Completions {
        /// The shell.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Print the manual page, in roff, of lunbd or of one of its commands.
    Man {
        /// One of the commands; without it the page of all.
        command: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// What to attach; several are paths of one SCSI unit.
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<Source>,

    /// Attach only if the unit itself says that it has this name: naa.HEX,
    /// eui.HEX, t10.TEXT, iqn.TEXT, wwn-0xHEX, or udev's 3HEX. Of an NBD source, only
    /// if its content has it: gpt.GUID, mbr.SIGNATURE, luks.UUID, lvm.UUID or fs.UUID.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Expected>,

    /// How many paths must lead to the unit.
    #[arg(long, value_name = "COUNT", default_value = "1")]
    pub(crate) min_paths: usize,

    /// Whether the device is a multipath map: it must be one (require), it is one
    /// where multipathd makes it (prefer), or it is the first path (off).
    #[arg(long, value_name = "MODE", default_value = "prefer", value_parser = multipath)]
    pub(crate) multipath: Multipath,

    #[command(flatten)]
    pub(crate) iscsi: Iscsi,

    #[command(flatten)]
    pub(crate) nbd: Nbd,

    /// What the volume is called: the attach is written down in the journal, for
    /// `recover` and for `detach --volume`.
    #[arg(long, value_name = "ID")]
    pub(crate) volume: Option<VolumeId>,

    /// The journal's directory; without it /run/lunbd/journal.
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub(crate) journal: Option<PathBuf>,

    /// How long the whole may take: 500ms, 30s, 2m.
    #[arg(long, default_value = "30s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Recover {
    /// The journal's directory; without it /run/lunbd/journal.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// How long the whole may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Apply {
    /// The volumes that are wanted, in TOML: [[volume]] with id, source or sources,
    /// and where wanted expect, min_paths, multipath, min_size (bytes or "16GiB"; a unit that the
    /// array has grown is taken in, none is shrunk), [volume.log_in] and [volume.nbd].
    /// NO OTHER VOLUME OF THE JOURNAL STAYS. An empty file is refused; `volume = []`
    /// wants no volume.
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: PathBuf,

    /// Show the plan and do nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Exit with 2 where the plan has something to do, and with 0 where it has not.
    #[arg(long, requires = "dry_run")]
    pub(crate) exit_code: bool,

    /// Stay, keep the volumes as they are wanted and the iSCSI sessions that they log
    /// in to, and follow changes of the file, until interrupted.
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) watch: bool,

    /// How many volumes the file, or one change of it with --watch, may detach at once:
    /// a number or all. Without it half of them, where there are at least four.
    #[arg(long, value_name = "COUNT")]
    pub(crate) allow_detach: Option<DetachLimit>,

    /// The journal's directory; without it /run/lunbd/journal.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// How many volumes are worked on at once.
    #[arg(long, value_name = "COUNT", default_value = "8")]
    pub(crate) threads: NonZeroUsize,

    /// How long the whole may take: 500ms, 60s, 2m; with --watch, each step of a
    /// volume.
    #[arg(long, default_value = "2m", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Only this volume.
    #[arg(long, value_name = "ID")]
    pub(crate) volume: Option<VolumeId>,

    /// The journal's directory; without it /run/lunbd/journal.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Journal {
    /// Print each record and each file that is none, also while an agent holds the
    /// journal.
    Show {
        /// Only the record of this volume.
        #[arg(long, value_name = "ID")]
        volume: Option<VolumeId>,

        #[command(flatten)]
        place: JournalPlace,
    },
    /// Remove the record of a volume, or a file that was set aside. A DEVICE THAT
    /// IS ATTACHED STAYS ATTACHED, and belongs to no volume any more.
    Forget {
        /// A volume, or the name of a file that was set aside.
        #[arg(value_name = "ID|FILE")]
        what: String,

        #[command(flatten)]
        place: JournalPlace,
    },
    /// Take a file that was set aside in again as the record of its volume.
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
    /// The journal's directory; without it /run/lunbd/journal.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Reap {
    /// Take nothing away; print the proofs, and what would become of each.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// The directory of a journal whose volumes are left alone too, besides those of
    /// /run/lunbd/journal. An agent may hold it.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// How long the whole may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

// How an iSCSI source is logged in.
#[derive(Debug, Args)]
#[command(next_help_heading = "iSCSI")]
pub(crate) struct Iscsi {
    /// Log in where no session is there, through all portals at once; no daemon is
    /// needed. The detach of the last device on such a session logs it out.
    #[arg(long)]
    log_in: bool,

    /// Offer the target checksums over headers and data (CRC32C), or require them:
    /// --digests=require.
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "offer", requires = "log_in")]
    digests: Option<Digests>,

    /// How long I/O waits for a session that is lost before it fails, in whole
    /// seconds; without it 5s where a multipath map is wanted, else 2m.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "log_in")]
    recovery_timeout: Option<Duration>,

    /// Set one of: nop_interval and nop_timeout (seconds; 0 pings never), queue_depth,
    /// commands_max, abort_timeout, lu_reset_timeout, target_reset_timeout (seconds),
    /// first_burst, max_burst, receive_segment, send_segment (bytes). For the sessions that
    /// are made; one that stands keeps its own, and what differs is printed.
    #[arg(long, value_name = "NAME=VALUE", value_parser = tunable, requires = "log_in")]
    tune: Vec<(Tunable, u32)>,

    #[command(flatten)]
    local: LocalEnd,

    #[command(flatten)]
    who: Initiator,
}

// Where a login comes from.
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
    /// `None` where no login is wanted.
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
        // Where they are and not what they are, for the journal.
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

// Who logs in at an iSCSI portal.
#[derive(Debug, Args)]
pub(crate) struct Initiator {
    /// The name to log in as; without it that of this machine, in
    /// /etc/iscsi/initiatorname.iscsi.
    #[arg(long, value_name = "NAME")]
    initiator: Option<Iqn>,

    /// Log in with CHAP: a file of lines user=NAME and secret=SECRET, and for mutual
    /// CHAP target_secret=SECRET and, to check it, target_user=NAME; and, to offer
    /// others than all, algorithms=SHA3-256,SHA1,MD5,SHA256, the most wanted first.
    /// Without it the same from LUNBD_CHAP_USER, LUNBD_CHAP_SECRET,
    /// LUNBD_CHAP_TARGET_SECRET, LUNBD_CHAP_TARGET_USER and LUNBD_CHAP_ALGORITHMS,
    /// where they are set. A line [IQN] or [PORTAL] begins a section for that target or
    /// portal alone. The file is to be readable by its owner alone (chmod 0600).
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

    /// Where they are, if there are any.
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
    /// The device, /dev/nbdN; without it the lowest that is free.
    #[arg(long, value_name = "N")]
    index: Option<NbdIndex>,

    /// The id under which the kernel keeps the device; without it the URI.
    #[arg(long, value_name = "ID")]
    pub(crate) backend: Option<BackendId>,

    /// How many connections carry I/O, where the server allows several.
    #[arg(long, value_name = "COUNT", default_value = "1")]
    connections: NonZeroU16,

    /// Have the kernel refuse writes.
    #[arg(long)]
    read_only: bool,

    /// The logical block size, for images whose partition table was not made with
    /// 512-byte sectors; without it the server's minimum and at least 512.
    #[arg(long, value_name = "BYTES")]
    block_size: Option<u32>,

    /// Attach also where the content of the volume has other names than the journal has
    /// of it, and write down the new ones.
    #[arg(long, requires = "volume")]
    accept_content: bool,

    /// How long one request may take before its connection is taken for dead.
    #[arg(long, value_name = "LIMIT", default_value = "30s", value_parser = limit)]
    io_timeout: Duration,

    /// How long requests wait for a server that is gone before they fail.
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
    /// The device of this NBD source alone, or the iSCSI sessions of lunbd's that lead to
    /// this iSCSI source; without it every NBD device that was attached by its URI.
    #[arg(group = "one")]
    pub(crate) source: Option<Source>,

    /// What one volume of the journal is attached by, in place of the source.
    #[arg(long, value_name = "ID", group = "one", conflicts_with = "backend")]
    pub(crate) volume: Option<VolumeId>,

    /// The journal's directory; without it /run/lunbd/journal.
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub(crate) journal: Option<PathBuf>,

    /// The id under which the kernel keeps the device; without it the URI.
    #[arg(long, value_name = "ID", requires = "source", help_heading = "NBD")]
    backend: Option<BackendId>,

    /// From now on: how long one request may take before its connection is taken for
    /// dead. Without it what the device was attached with.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "one", help_heading = "NBD")]
    io_timeout: Option<Duration>,

    /// From now on: how long requests wait for a server that is gone before they
    /// fail. Without it what the device was attached with.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "one", help_heading = "NBD")]
    dead_timeout: Option<Duration>,

    /// Take whatever the server serves now for the volume, also where its content is
    /// another's.
    #[arg(long, requires = "one", help_heading = "NBD")]
    accept_content: bool,

    /// Stay, and heal links as they die, until interrupted; iSCSI sessions that
    /// `attach --log-in` made are logged in again when they are lost.
    #[arg(long, conflicts_with = "one")]
    pub(crate) watch: bool,

    /// Log in again with CHAP, from a file as of `attach --chap-file`, which is read
    /// before each login; without it from the same environment.
    #[arg(long, value_name = "FILE", help_heading = "iSCSI")]
    chap_file: Option<PathBuf>,

    /// Offer the target checksums (CRC32C) where it is not known whether a session had
    /// them: of one that was lost before this command began.
    #[arg(long, help_heading = "iSCSI")]
    digests: bool,

    /// How long to dial servers that are not back: 30s, 5m.
    #[arg(long, default_value = "30s", value_parser = limit, conflicts_with = "watch")]
    pub(crate) timeout: Duration,
}

impl Heal {
    /// How the device of one source is healed.
    pub(crate) fn nbd_options(&self) -> NbdOptions {
        let mut options = NbdOptions::default();
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

    /// What is said of sessions where none are logged in again.
    pub(crate) fn refuse_without_sessions(&self) -> lunbd::Result<()> {
        if !self.digests && self.chap_file.is_none() {
            return Ok(());
        }
        let message = "--digests and --chap-file are for iSCSI sessions: name an iSCSI source, or \
                       give --watch";
        Err(Error::new(ErrorKind::InvalidInput, message))
    }

    /// How sessions are logged in again.
    pub(crate) fn recovery_options(&self) -> SessionRecoveryOptions {
        /// A file system that does not answer holds up one login and not all.
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
    /// Make a random name first, of the form of open-iscsi's, where there is no such
    /// file. A file that is there is never changed.
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

    /// The journal's directory; without it /run/lunbd/journal. A target that it has as a
    /// volume is detached as that, with its record.
    #[arg(long, value_name = "DIR")]
    pub(crate) journal: Option<PathBuf>,

    /// Detach only the SCSI unit that has this name.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Wwid>,

    /// The id that an NBD source was attached under, where it was given one.
    #[arg(long, value_name = "ID")]
    pub(crate) backend: Option<BackendId>,

    /// Go on where the device cannot be written back, after half of the time:
    /// what was not written is LOST. For a server or target that is gone for
    /// good.
    #[arg(long)]
    pub(crate) abandon_unwritten: bool,

    /// Leave the iSCSI sessions that `attach --log-in` made logged in, also where
    /// no device is left on one.
    #[arg(long)]
    pub(crate) keep_sessions: bool,

    /// How long the whole may take: 500ms, 60s, 2m.
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

    /// The journal's directory; without it /run/lunbd/journal.
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub(crate) journal: Option<PathBuf>,

    /// Resize only the SCSI unit that has this name.
    #[arg(long, value_name = "ID")]
    pub(crate) expect: Option<Wwid>,

    /// The id that an NBD source was attached under, where it was given one.
    #[arg(long, value_name = "ID")]
    pub(crate) backend: Option<BackendId>,

    /// The size in bytes that the unit, or the NBD server, must say at least.
    #[arg(long, value_name = "BYTES")]
    pub(crate) at_least: Option<u64>,

    /// How long the whole may take: 500ms, 60s, 2m.
    #[arg(long, default_value = "60s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Discover {
    /// HOST or HOST:PORT of an iSCSI portal, an IPv6 address in brackets; or an NBD
    /// server, nbd://HOST[:PORT], nbds://HOST[:PORT] or nbd+unix:///?socket=PATH.
    #[arg(value_name = "PORTAL|NBD-URI")]
    pub(crate) at: DiscoverAt,

    #[command(flatten)]
    pub(crate) who: Initiator,

    #[command(flatten)]
    pub(crate) local: LocalEnd,

    /// How long the whole may take: 500ms, 30s, 2m.
    #[arg(long, default_value = "30s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

/// Whom to ask for what it serves.
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
