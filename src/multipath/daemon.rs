//! A client of multipathd: one command, one reply.

mod wire;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::UnixAddr;

use crate::crash::point;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::stream::DeadlineStream;
use crate::kernel::{Roots, unix_socket};

/// `DEFAULT_SOCKET` of multipath-tools, 0.4.9 and later.
const NAME: &str = "/org/kernel/linux/storage/multipathd";
/// `PATHNAME_SOCKET` of multipath-tools 0.12 and later, in `/run`.
const FILE: &str = "multipathd.socket";
/// What it says where it has no time (`multipathd/uxlsnr.c`, `default_reply`).
const BUSY: &str = "timeout";

/// The multipathd of this machine. Each command is a connection of its own and
/// needs root. The daemon answers `timeout` by itself after `uxsock_timeout`
/// (4 s), in which it waited for its own lock or did what it was told
/// (`multipathd/uxlsnr.c`, `check_timeout`): so it says of a map that is long in
/// the making. It is asked again then until the deadline, but where it is to let
/// go of something: what follows shows whether it did.
///
/// After a timeout the daemon may still do what it was told. Besides what each
/// method names, all say `Unreachable` where the daemon is gone, `NotReady`
/// where it is too busy to answer, `NotPermitted`, `Protocol`, and `TimedOut`
/// at the stage that the command belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Daemon {
    socket: Socket,
}

/// Where it listens.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Socket {
    /// In the abstract name space of one network namespace.
    Abstract(String),
    /// In the file system, where other network namespaces reach it too.
    File(PathBuf),
}

impl Socket {
    fn address(&self) -> nix::Result<UnixAddr> {
        match self {
            Self::Abstract(name) => UnixAddr::new_abstract(name.as_bytes()),
            Self::File(path) => UnixAddr::new(path),
        }
    }
}

/// What the daemon says to a command that it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// It is done.
    Done,
    /// The path, or the map, is none that it manages, by its configuration; it says
    /// so as well of a path that does not exist.
    NotWanted,
    /// It will be done: the map is being made, and the daemon waits for udev.
    Delayed,
}

impl Daemon {
    /// The daemon, if it runs or systemd would start it on a connection; `None`
    /// where nobody listens on its sockets. One before 0.12 listens in the host's
    /// network namespace alone and is not found from another. A newer one also has
    /// `/run/multipathd.socket`, which is tried by a connection where there is no
    /// abstract socket: the file of a daemon that was killed stays.
    ///
    /// # Errors
    /// `NotPermitted` or `Io` where `/proc/self/net/unix` cannot be read.
    pub fn find(roots: &Roots) -> Result<Option<Self>> {
        /// A connection that waits longer waits for a place in a living queue.
        const LIMIT: Duration = Duration::from_secs(1);
        if unix_socket::is_abstract_name_bound(roots, NAME)? {
            let socket = Socket::Abstract(NAME.to_owned());
            return Ok(Some(Self { socket }));
        }
        let socket = Socket::File(roots.run.join(FILE));
        let connected = socket
            .address()
            .and_then(|address| unix_socket::connect(&address, Deadline::after(LIMIT)));
        Ok(connected.is_ok().then_some(Self { socket }))
    }

    /// Has it take the disk `name` (`sda`), which udev must have handled, and
    /// make or extend the map. One that it has already is [`Answer::Done`], and so is
    /// one that its `find_multipaths` leaves without a map: look.
    ///
    /// # Errors
    /// `Refused`.
    pub fn add_path(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        self.command(Stage::Map, "add path", name, deadline)
    }

    /// Has it forget the disk `name` (`sda`) and take it out of its map; the
    /// map of the last path is removed if nobody has it open. One that it does
    /// not know is [`Answer::Done`].
    ///
    /// # Errors
    /// `Refused`.
    pub fn delete_path(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        let answer = self.command_once(Stage::Forget, "del path", name, deadline);
        match answer {
            // It says `fail` of one that it has forgotten already.
            Err(error) if error.kind() == ErrorKind::Refused => {
                if self.knows_path(name, deadline)? {
                    return Err(error);
                }
                Ok(Answer::Done)
            }
            answer => answer,
        }
    }

    /// Whether it has the disk `name` (`sda`), in a map or not.
    ///
    /// # Errors
    /// None but those of every command.
    pub fn knows_path(&self, name: &str, deadline: Deadline) -> Result<bool> {
        const COMMAND: &str = "show paths raw format %d";
        let reply = self.ask(Stage::Forget, COMMAND, deadline)?;
        // What it says where there is no path.
        if reply.trim() == "ok" {
            return Ok(false);
        }
        let names: Vec<&str> = reply.lines().collect();
        if names.iter().any(|name| name.contains(char::is_whitespace)) || is_refusal(&reply) {
            return Err(refused(Stage::Forget, COMMAND, &reply));
        }
        Ok(names.contains(&name))
    }

    /// What it calls the unit of each of its disks, by the disk's name: the value of
    /// its `uid_attribute`, which is in the uuid of the unit's map. A disk of which it
    /// has read no such name is left out.
    ///
    /// # Errors
    /// `Refused`.
    pub fn wwids(&self, deadline: Deadline) -> Result<BTreeMap<String, String>> {
        const COMMAND: &str = "show paths raw format %d/%w";
        let reply = self.ask(Stage::Map, COMMAND, deadline)?;
        if is_refusal(&reply) {
            return Err(refused(Stage::Map, COMMAND, &reply));
        }
        let named = reply.lines().filter_map(|line| line.trim().split_once('/'));
        let known = named.filter(|(_, wwid)| !matches!(*wwid, "" | "[undef]"));
        Ok(known
            .map(|(disk, wwid)| (disk.to_owned(), wwid.to_owned()))
            .collect())
    }

    /// Has it make the map of the unit that it calls `wwid` (see [`Daemon::wwids`])
    /// out of the paths that it has, also where its `find_multipaths` would leave them
    /// alone; its blacklists count. It writes the name into its file of WWIDs, as it
    /// does for every map that it makes, and makes the map by itself from then on.
    ///
    /// A version before 0.10 says `fail` of a map that has another name than the unit
    /// (`user_friendly_names`), although it made it: look.
    ///
    /// # Errors
    /// `Refused`.
    pub fn add_map(&self, wwid: &str, deadline: Deadline) -> Result<Answer> {
        self.command(Stage::Map, "add map", wwid, deadline)
    }

    /// Has it remove the map of this name (the alias: it knows no `dm-N` here). The
    /// reply does not tell a map in use from one that is gone: look.
    ///
    /// # Errors
    /// `Refused`, and then the map is in use, or gone, or none of its own.
    pub fn delete_map(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        self.command_once(Stage::RemoveMap, "del map", name, deadline)
    }

    /// Has it give the map of this name (the alias or `dm-N`) the size of its
    /// first path. That it is done does not say that the size has changed.
    ///
    /// # Errors
    /// `Refused`.
    pub fn resize_map(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        self.command(Stage::Resize, "resize map", name, deadline)
    }

    /// Has it turn queueing off for the map of this name (the alias or `dm-N`),
    /// and leave it off.
    ///
    /// # Errors
    /// `Refused`.
    pub fn disable_queueing(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        self.command(Stage::Map, "disablequeueing map", name, deadline)
    }

    /// Tells it until it has time.
    fn command(&self, stage: Stage, verb: &str, name: &str, deadline: Deadline) -> Result<Answer> {
        tell(stage, verb, name, |it| self.ask(stage, it, deadline))
    }

    fn command_once(
        &self,
        stage: Stage,
        verb: &str,
        name: &str,
        deadline: Deadline,
    ) -> Result<Answer> {
        tell(stage, verb, name, |it| self.ask_once(stage, it, deadline))
    }

    /// Its reply; `timeout` only when the deadline has passed.
    fn ask(&self, stage: Stage, command: &str, deadline: Deadline) -> Result<String> {
        let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        loop {
            let reply = self.ask_once(stage, command, deadline)?;
            if reply.trim() != BUSY || deadline.has_passed() {
                return Ok(reply);
            }
            tracing::debug!(command, "multipathd is busy");
            deadline.pause(pauses.pause());
        }
    }

    fn ask_once(&self, stage: Stage, command: &str, deadline: Deadline) -> Result<String> {
        let socket = self.connect(stage, command, deadline)?;
        let mut stream = DeadlineStream::new(socket.as_fd(), deadline);
        let failed = |seen: &str, error: &io::Error| match error.kind() {
            // A connection that timed out by itself is not our deadline.
            io::ErrorKind::TimedOut if deadline.has_passed() => {
                timed_out(stage, command, deadline).with_last_seen(seen)
            }
            io::ErrorKind::InvalidData => {
                let message = format!("multipathd was told {command:?}, and {error}");
                Error::new(ErrorKind::Protocol, message).at(stage)
            }
            _ => {
                let message = format!("multipathd went away at {command:?}: {error}");
                Error::new(ErrorKind::Unreachable, message).at(stage)
            }
        };
        wire::send(&mut stream, command).map_err(|error| failed("connected", &error))?;
        wire::receive(&mut stream).map_err(|error| failed("told, and no whole reply", &error))
    }

    fn connect(&self, stage: Stage, command: &str, deadline: Deadline) -> Result<OwnedFd> {
        let failed = |errno: Errno| {
            let error = Error::of_errno("cannot connect to multipathd", errno).at(stage);
            match errno {
                Errno::ECONNREFUSED | Errno::ENOENT => error.with_kind(ErrorKind::Unreachable),
                _ => error,
            }
        };
        let address = self.socket.address().map_err(failed)?;
        let connected = unix_socket::connect(&address, deadline).map_err(failed)?;
        connected.ok_or_else(|| {
            timed_out(stage, command, deadline).with_last_seen("its queue of connections is full")
        })
    }
}

fn tell(
    stage: Stage,
    verb: &str,
    name: &str,
    ask: impl FnOnce(&str) -> Result<String>,
) -> Result<Answer> {
    let command = format!("{verb} {}", argument(name)?);
    point!(MultipathdToTell);
    let reply = ask(&command)?;
    point!(MultipathdTold);
    tracing::debug!(command, reply = reply.trim(), "multipathd");
    match reply.trim() {
        "ok" => Ok(Answer::Done),
        // `add map` has it followed by `fail` (`cli_add_map`).
        "blacklisted" | "blacklisted\nfail" => Ok(Answer::NotWanted),
        // `del map` has it followed by `fail` (`cli_del_map`).
        "delayed" | "delayedfail" => Ok(Answer::Delayed),
        _ => Err(refused(stage, &command, &reply)),
    }
}

fn timed_out(stage: Stage, command: &str, deadline: Deadline) -> Error {
    let what = format!("multipathd to answer {command:?}");
    Error::timed_out(stage, deadline, &what)
}

/// A name that is one word of a command.
fn argument(name: &str) -> Result<&str> {
    /// `DM_NAME_LEN`; a disk's name is shorter.
    const LONGEST: usize = 128;
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\'');
    if !name.is_empty() && name.len() < LONGEST && name.chars().all(plain) {
        return Ok(name);
    }
    let message = format!("{name:?} is no name that multipathd can be told");
    Err(Error::new(ErrorKind::InvalidInput, message))
}

/// Whether it is a word that multipathd says instead of an answer
/// (`multipathd/uxlsnr.c`, `default_reply`).
fn is_refusal(reply: &str) -> bool {
    matches!(reply.trim(), "fail" | BUSY)
}

fn refused(stage: Stage, command: &str, reply: &str) -> Error {
    // To a command that it does not know it says all those that it does.
    let first = reply.lines().next().unwrap_or_default();
    let (kind, what) = if first == BUSY {
        (ErrorKind::NotReady, "is too busy to do")
    } else if first.starts_with("permission") {
        (ErrorKind::NotPermitted, "refused")
    } else {
        (ErrorKind::Refused, "refused")
    };
    let message = format!("multipathd {what} {command:?} and says {first:?}");
    Error::new(kind, message).at(stage)
}

#[cfg(test)]
mod tests;
