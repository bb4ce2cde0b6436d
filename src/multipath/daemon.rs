//! A client of multipathd: it sends one command and reads one reply.

mod wire;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::UnixAddr;

use crate::crash::crash_point;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::stream::DeadlineStream;
use crate::kernel::{Roots, unix_socket};

/// The abstract socket: `DEFAULT_SOCKET` of multipath-tools, 0.4.9 and later.
const NAME: &str = "/org/kernel/linux/storage/multipathd";
/// The socket in `/run`: `PATHNAME_SOCKET` of multipath-tools, 0.12 and later.
const FILE: &str = "multipathd.socket";
/// The daemon's reply when it has no time (`multipathd/uxlsnr.c`, `default_reply`).
const BUSY: &str = "timeout";

/// The multipathd of this machine. Each command uses its own connection and needs root.
///
/// The daemon replies `timeout` if after `uxsock_timeout` (4 s) it still waits for its own
/// lock or still works on the command (`multipathd/uxlsnr.c`, `check_timeout`), as for a
/// map that takes long to make. This client then repeats the command until the deadline. It
/// does not repeat a removal: its caller sees whether that happened.
///
/// After a timeout the daemon may still execute the command. Besides the errors that each
/// method names, all return `Unreachable` if the daemon is gone, `NotReady` if it is too
/// busy to answer, `NotPermitted`, `Protocol`, and `TimedOut` at the stage that the command
/// belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Daemon {
    socket: Socket,
}

/// The socket on which the daemon listens.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Socket {
    /// A name in the abstract name space of one network namespace.
    Abstract(String),
    /// A path in the file system, which other network namespaces reach too.
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

/// The daemon's reply to a command that it accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// The command is done.
    Done,
    /// The daemon's configuration excludes the path or the map. It replies the same for a
    /// path that does not exist.
    Excluded,
    /// The command will be done: the map is being made, and the daemon waits for udev.
    Delayed,
}

impl Daemon {
    /// Finds the daemon if it runs, or if systemd would start it on a connection; `None` if
    /// nothing listens on its sockets. A version before 0.12 listens only in the host's
    /// network namespace and is not found from another. A newer version also has
    /// `/run/multipathd.socket`. Without an abstract socket this tries to connect to that
    /// file, because the file of a killed daemon stays.
    ///
    /// # Errors
    /// `NotPermitted` or `Io` if `/proc/self/net/unix` cannot be read.
    pub fn find(roots: &Roots) -> Result<Option<Self>> {
        /// A connect that takes longer waits for a place in the queue of a running daemon.
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

    /// Makes the daemon take the disk `name` (`sda`), which udev must have handled, and
    /// make or extend the map. The reply is [`Answer::Done`] also for a disk that it has
    /// already, and for a disk that its `find_multipaths` leaves without a map: the caller
    /// must check.
    ///
    /// # Errors
    /// `Refused`.
    pub fn add_path(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        self.run_until_accepted(Stage::Map, "add path", name, deadline)
    }

    /// Makes the daemon forget the disk `name` (`sda`) and remove it from its map. With the
    /// last path the map goes too, unless it is open. The reply for an unknown disk is
    /// [`Answer::Done`].
    ///
    /// # Errors
    /// `Refused`.
    pub fn delete_path(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        let answer = self.run_once(Stage::Forget, "del path", name, deadline);
        match answer {
            // The reply for a path that it has already forgotten is `fail`.
            Err(error) if error.kind() == ErrorKind::Refused => {
                if self.knows_path(name, deadline)? {
                    return Err(error);
                }
                Ok(Answer::Done)
            }
            answer => answer,
        }
    }

    /// Whether the daemon has the disk `name` (`sda`), in a map or not.
    ///
    /// # Errors
    /// Only those of every command.
    pub fn knows_path(&self, name: &str, deadline: Deadline) -> Result<bool> {
        const COMMAND: &str = "show paths raw format %d";
        let reply = self.ask(Stage::Forget, COMMAND, deadline)?;
        // This is the reply if there is no path.
        if reply.trim() == "ok" {
            return Ok(false);
        }
        let names: Vec<&str> = reply.lines().collect();
        if names.iter().any(|name| name.contains(char::is_whitespace)) || is_refusal(&reply) {
            return Err(refused(Stage::Forget, COMMAND, &reply));
        }
        Ok(names.contains(&name))
    }

    /// The daemon's name for the unit of each of its disks, by the disk's name. The name is
    /// the value of its `uid_attribute`, which is also in the uuid of the unit's map. A
    /// disk without such a name is left out.
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

    /// Makes the daemon make the map of the unit that it calls `wwid` (see
    /// [`Daemon::wwids`]) from the paths that it has, even if its `find_multipaths` would
    /// not. Its blacklists still apply. As for each map that it makes, it records the name
    /// in its file of WWIDs, and from then on makes the map by itself.
    ///
    /// A version before 0.10 replies `fail` for a map that has another name than the unit
    /// (`user_friendly_names`), although it made the map: the caller must check.
    ///
    /// # Errors
    /// `Refused`.
    pub fn add_map(&self, wwid: &str, deadline: Deadline) -> Result<Answer> {
        self.run_until_accepted(Stage::Map, "add map", wwid, deadline)
    }

    /// Makes the daemon remove the map of this name (the alias: this command knows no
    /// `dm-N`). The reply is the same for a map in use and for a map that is gone: the
    /// caller must check.
    ///
    /// # Errors
    /// `Refused`: the map is in use, or gone, or not managed by the daemon.
    pub fn delete_map(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        self.run_once(Stage::RemoveMap, "del map", name, deadline)
    }

    /// Makes the daemon give the map of this name (the alias or `dm-N`) the size of its
    /// first path. Success does not mean that the size has changed.
    ///
    /// # Errors
    /// `Refused`.
    pub fn resize_map(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        self.run_until_accepted(Stage::Resize, "resize map", name, deadline)
    }

    /// Makes the daemon turn queueing off for the map of this name (the alias or `dm-N`),
    /// and leave it off.
    ///
    /// # Errors
    /// `Refused`.
    pub fn disable_queueing(&self, name: &str, deadline: Deadline) -> Result<Answer> {
        self.run_until_accepted(Stage::Map, "disablequeueing map", name, deadline)
    }

    /// Repeats the command until the daemon has time for it.
    fn run_until_accepted(
        &self,
        stage: Stage,
        verb: &str,
        name: &str,
        deadline: Deadline,
    ) -> Result<Answer> {
        execute(stage, verb, name, |it| self.ask(stage, it, deadline))
    }

    fn run_once(&self, stage: Stage, verb: &str, name: &str, deadline: Deadline) -> Result<Answer> {
        execute(stage, verb, name, |it| self.ask_once(stage, it, deadline))
    }

    /// The daemon's reply, which is `timeout` only after the deadline.
    fn ask(&self, stage: Stage, command: &str, deadline: Deadline) -> Result<String> {
        let mut pauses = Backoff::for_other_process();
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
            // The socket's own timeout may come before the deadline.
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

fn execute(
    stage: Stage,
    verb: &str,
    name: &str,
    ask: impl FnOnce(&str) -> Result<String>,
) -> Result<Answer> {
    let command = format!("{verb} {}", argument(name)?);
    crash_point!(MultipathdToTell);
    let reply = ask(&command)?;
    crash_point!(MultipathdTold);
    tracing::debug!(command, reply = reply.trim(), "multipathd");
    match reply.trim() {
        "ok" => Ok(Answer::Done),
        // In the reply to `add map`, `fail` follows it (`cli_add_map`).
        "blacklisted" | "blacklisted\nfail" => Ok(Answer::Excluded),
        // In the reply to `del map`, `fail` follows it (`cli_del_map`).
        "delayed" | "delayedfail" => Ok(Answer::Delayed),
        _ => Err(refused(stage, &command, &reply)),
    }
}

fn timed_out(stage: Stage, command: &str, deadline: Deadline) -> Error {
    let what = format!("multipathd to answer {command:?}");
    Error::timed_out(stage, deadline, &what)
}

/// Requires a name that is one word of a command.
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

/// Whether the reply is a word that multipathd sends instead of an answer
/// (`multipathd/uxlsnr.c`, `default_reply`).
fn is_refusal(reply: &str) -> bool {
    matches!(reply.trim(), "fail" | BUSY)
}

fn refused(stage: Stage, command: &str, reply: &str) -> Error {
    // The reply to an unknown command lists all known commands.
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
