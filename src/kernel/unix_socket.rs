//! Unix stream sockets: connects by a deadline, and finds listening sockets.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};

use super::Roots;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};

/// A connected blocking socket without timeouts, closed on exec; `None` if the
/// server's queue stayed full until the deadline.
pub(crate) fn connect(address: &UnixAddr, deadline: Deadline) -> nix::Result<Option<OwnedFd>> {
    let family = AddressFamily::Unix;
    let socket = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    loop {
        // A nonblocking connect cannot wait for a place in the server's queue, but
        // a connect with a send timeout can (unix(7), EAGAIN).
        let limit = deadline.max_sleep();
        if limit.is_zero() {
            return Ok(None);
        }
        limit_connect(&socket, limit)?;
        match socket::connect(socket.as_raw_fd(), address) {
            Ok(()) => break,
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(errno) => return Err(errno),
        }
    }
    // A send timeout would end an idle connection.
    limit_connect(&socket, Duration::ZERO)?;
    Ok(Some(socket))
}

/// A limit of zero means no limit.
fn limit_connect(socket: &OwnedFd, limit: Duration) -> nix::Result<()> {
    const LONGEST: Duration = Duration::from_secs(3600);
    let microseconds = limit.min(LONGEST).as_micros();
    let rounded_to_none = microseconds == 0 && !limit.is_zero();
    let microseconds = i64::try_from(microseconds).unwrap_or(i64::MAX);
    let limit = TimeVal::microseconds(microseconds + i64::from(rounded_to_none));
    setsockopt(socket, sockopt::SendTimeout, &limit)
}

/// Whether a socket of this abstract name is in `/proc/self/net/unix`, which shows
/// the network namespace that a connection would use. It makes no connection, so
/// it starts no socket-activated service.
///
/// # Errors
/// By the errno. A machine without the file has no such socket.
pub(crate) fn is_abstract_name_bound(roots: &Roots, name: &str) -> Result<bool> {
    let path = roots.proc.join("self/net/unix");
    let failed = |error: &std::io::Error| Error::io("cannot read", &path, error);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) => {
            let error = failed(&error);
            let absent = error.kind() == ErrorKind::Vanished;
            return if absent { Ok(false) } else { Err(error) };
        }
    };
    // The name is the last field of a line, after the inode number.
    let end = format!(" @{name}");
    for line in BufReader::new(file).split(b'\n') {
        let line = line.map_err(|error| failed(&error))?;
        if line.ends_with(end.as_bytes()) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use super::*;

    #[test]
    fn a_name_is_bound_while_somebody_listens_on_it() {
        let name = format!("lunbd-test-bound-{}", std::process::id());
        let roots = Roots::default();
        assert!(!is_abstract_name_bound(&roots, &name).unwrap());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        assert!(is_abstract_name_bound(&roots, &name).unwrap());
        // A part of the name is another name.
        assert!(!is_abstract_name_bound(&roots, &name[1..]).unwrap());
        drop(listener);
        assert!(!is_abstract_name_bound(&roots, &name).unwrap());
    }

    #[test]
    fn a_proc_that_shows_processes_alone_has_the_list_of_this_one() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let own = roots.proc.join("self/net");
        std::fs::create_dir_all(&own).unwrap();
        let line = "0: 00000002 00000000 00010000 0001 01 20 @/multipathd\n";
        std::fs::write(own.join("unix"), line).unwrap();
        assert!(is_abstract_name_bound(&roots, "/multipathd").unwrap());
    }

    #[test]
    fn a_machine_without_the_list_has_no_such_socket() {
        assert!(!is_abstract_name_bound(&Roots::below("/no-such-machine"), "x").unwrap());
    }
}
