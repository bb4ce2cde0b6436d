//! The lock on the creation of sessions, which one process of the whole machine has at a time.
//!
//! A session's `creator` is the port number of the socket that requested it
//! (`iscsi_if_create_session`), and an iscsid that starts takes over each session whose
//! creator is not -1. So the socket gets the port -1 if it can. Any local user may bind that
//! port (`netlink_bind`), so the port is not the lock: the lock is on a file that root alone
//! can open, and if -1 is taken, the socket gets another port.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use netlink_sys::{Socket, protocols::NETLINK_ISCSI};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::socket::open_as;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result};
use crate::kernel::Roots;
use crate::kernel::locks;
use crate::kernel::netlink_port::{self, Holder};

/// How long a look for the holder of the port may take.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// How long the look at the deadline may take.
const LAST_LOOK_LIMIT: Duration = Duration::from_secs(1);

/// The port from which sessions are created: -1 as an unsigned number.
const CREATOR_PORT: u32 = u32::MAX;
/// How long to wait for a process that may make sessions to free the port: earlier versions
/// of lunbd take no lock, and hold the port while they make a session.
const PORT_LIMIT: Duration = Duration::from_secs(2);
/// How many random ports are tried, since each may be taken.
const MAX_TRIES: usize = 16;

/// The right to make a session. A process holds it from before it makes a session until that
/// is started. So the holder knows that no other process works on a session that was never
/// started. The kernel releases it when the process dies.
#[derive(Debug)]
pub(crate) struct CreateLock {
    socket: Socket,
    _lock: Flock<File>,
}

/// While this exists, no process of this machine makes a session, in any container.
#[derive(Debug)]
pub struct CreateGuard {
    /// `None` if the process that has the port cannot make a session.
    _port: Option<Socket>,
    _lock: Flock<File>,
}

impl CreateLock {
    /// Waits for the right. **Blocks** for as long as another process has it. If another
    /// process has the port -1, the session is made from another port, and the log names that
    /// process.
    ///
    /// # Errors
    /// `InUse`, naming the process, if another process of lunbd had the right all the time
    /// until `deadline`; `NotPermitted` without root.
    pub(crate) fn wait(roots: &Roots, deadline: Deadline) -> Result<Self> {
        let lock = lock(roots, deadline)?;
        let socket = match bind(roots, deadline.at_most(PORT_LIMIT))? {
            PortBinding::Bound(socket) => socket,
            PortBinding::Taken(holder) => {
                let (socket, port) = bind_other_port()?;
                tracing::warn!(
                    "{} has the netlink port -1: a session is made from the port {port}, and an \
                     iscsid that starts later takes it over; end that process unless it is \
                     lunbd",
                    holder.description
                );
                socket
            }
        };
        Ok(Self {
            socket,
            _lock: lock,
        })
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }
}

impl CreateGuard {
    /// Waits until no process makes a session, also none of an earlier version of lunbd, which
    /// holds the port alone. It does not wait for a process that has the port and cannot make
    /// a session.
    ///
    /// # Errors
    /// `InUse`, naming the process, if another process had the right, or may have had it, all
    /// the time until `deadline`.
    pub(crate) fn wait(roots: &Roots, deadline: Deadline) -> Result<Self> {
        let lock = lock(roots, deadline)?;
        let port = match bind(roots, deadline)? {
            PortBinding::Bound(socket) => Some(socket),
            PortBinding::Taken(holder) if !holder.may_administer => None,
            PortBinding::Taken(holder) => {
                let message = format!(
                    "{} has the netlink port from which sessions are made: end that process unless \
                     it is lunbd",
                    holder.description
                );
                return Err(Error::new(ErrorKind::InUse, message));
            }
        };
        Ok(Self {
            _port: port,
            _lock: lock,
        })
    }
}

/// The process that has the port -1 now, in words; `None` if no process has it.
pub(crate) fn holder_of_port(roots: &Roots) -> Option<String> {
    let holder = netlink_port::holder(roots, NETLINK_ISCSI, CREATOR_PORT, LOOK_LIMIT);
    holder.map(|holder| holder.description)
}

enum PortBinding {
    Bound(Socket),
    Taken(Holder),
}

/// Binds the port -1 as soon as it is free. It does not wait for a holder that cannot make
/// sessions.
fn bind(roots: &Roots, deadline: Deadline) -> Result<PortBinding> {
    let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(10));
    let mut is_checked = false;
    loop {
        match open_as(CREATOR_PORT) {
            Err(error) if has_errno(&error, Errno::EADDRINUSE) => {}
            opened => return opened.map(PortBinding::Bound),
        }
        if !is_checked || deadline.has_passed() {
            is_checked = true;
            let limit = deadline.remaining().clamp(LAST_LOOK_LIMIT, LOOK_LIMIT);
            match netlink_port::holder(roots, NETLINK_ISCSI, CREATOR_PORT, limit) {
                Some(holder) if !holder.may_administer || deadline.has_passed() => {
                    return Ok(PortBinding::Taken(holder));
                }
                None if deadline.has_passed() => {
                    return Ok(PortBinding::Taken(Holder::one_after_another()));
                }
                _ => {}
            }
        }
        deadline.pause(pauses.pause());
    }
}

/// Binds a random negative port. A daemon's port is its process number, which is positive. No
/// process can hold all negative ports.
fn bind_other_port() -> Result<(Socket, i32)> {
    let mut tries = 0;
    loop {
        let mut random = [0; 4];
        getrandom::fill(&mut random).map_err(|error| {
            let message = format!("the kernel gives no random bytes: {error}");
            Error::new(ErrorKind::Io, message)
        })?;
        let port = i32::from_ne_bytes(random) | i32::MIN;
        tries += 1;
        match open_as(port.cast_unsigned()) {
            Err(error) if has_errno(&error, Errno::EADDRINUSE) && tries < MAX_TRIES => {}
            opened => return opened.map(|socket| (socket, port)),
        }
    }
}

/// A file of the driver, which each process sees in any container, and root alone can open
/// (mode 0200, `module_uevent` of `kernel/params.c`).
fn lock_file(roots: &Roots) -> PathBuf {
    roots.sysfs.join("module/iscsi_tcp/uevent")
}

fn lock(roots: &Roots, deadline: Deadline) -> Result<Flock<File>> {
    let path = lock_file(roots);
    // The kernel opens it only for writing (`kernfs_fop_open`). Nothing is written.
    let opened = File::options().write(true).open(&path);
    let mut file = opened.map_err(|error| Error::io("cannot open the lock", &path, &error))?;
    let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(10));
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, Errno::EWOULDBLOCK | Errno::EINTR)) => file = back,
            Err((_, errno)) => {
                let error = Error::of_errno("cannot take the lock", errno);
                return Err(error.with_path(path));
            }
        }
        if deadline.has_passed() {
            let holder = locks::holder(roots, &file).unwrap_or_else(|| "a process".to_owned());
            let message =
                format!("{holder} has the right to make iSCSI sessions, and did not give it back");
            return Err(Error::new(ErrorKind::InUse, message).with_path(path));
        }
        deadline.pause(pauses.pause());
    }
}

fn has_errno(error: &Error, errno: Errno) -> bool {
    error.errno() == Some(errno as i32)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn one_process_at_a_time_has_the_lock_and_the_next_waits_no_longer_than_its_deadline() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let path = lock_file(&roots);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        let soon = || Deadline::after(Duration::from_millis(50));
        let first = lock(&roots, soon()).unwrap();
        let error = lock(&roots, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.to_string().contains("right to make"), "{error}");
        drop(first);
        lock(&roots, soon()).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(
            lock(&roots, soon()).unwrap_err().kind(),
            ErrorKind::Vanished
        );
    }
}
