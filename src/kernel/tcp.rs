//! TCP: resolves a host's name and connects, within a deadline.

use std::ffi::OsString;
use std::io;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _,
};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{
    self, AddressFamily, SockFlag, SockType, SockaddrStorage, getsockopt, setsockopt, sockopt,
};

use super::stream::wait_until_ready;
use super::worker;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::InterfaceName;

/// How long sent data may stay unacknowledged, and a full window shut, before the kernel
/// gives the connection up (tcp(7), `TCP_USER_TIMEOUT`). It also bounds the probes of an
/// idle connection.
const DEAD_AFTER: Duration = Duration::from_secs(30);
const PROBE_AFTER_IDLE: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 4;

/// What a connection is bound to on this machine. By default it is bound to nothing, and
/// the kernel chooses by its routes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LocalEnd {
    /// All packets leave and arrive through this interface (`SO_BINDTODEVICE`).
    pub(crate) interface: Option<InterfaceName>,
    /// The address that the peer sees.
    pub(crate) address: Option<IpAddr>,
}

/// Connects to `peer` ("the NBD server"), as errors call it, at `host`. It tries the host's
/// addresses one after the other, each for an equal share of the remaining time.
///
/// The socket is blocking, sends at once (`TCP_NODELAY`) and has no receive or send
/// timeout. The kernel gives the connection up after 30 seconds in which sent data is not
/// acknowledged or not taken (`TCP_USER_TIMEOUT`). It also gives an idle connection up
/// after 30 seconds of unanswered probes (keepalive, first sent after 10 seconds).
///
/// # Errors
/// `Unreachable`, with each address that was tried and why it failed; `TimedOut` at stage
/// `resolve` or `dial`. The resolution of a name cannot be cancelled: after a timeout its
/// thread stays until the resolver returns.
pub(crate) fn connect(host: &str, port: u16, peer: &str, deadline: Deadline) -> Result<OwnedFd> {
    connect_from(&LocalEnd::default(), host, port, peer, deadline)
}

/// Like [`connect`], but bound to `local`. It reads the binding back from the socket.
///
/// # Errors
/// Those of [`connect`]; also `Unreachable`, with the cause, if this machine lacks the
/// interface or the address, or if every address of `host` is of the other IP version.
pub(crate) fn connect_from(
    local: &LocalEnd,
    host: &str,
    port: u16,
    peer: &str,
    deadline: Deadline,
) -> Result<OwnedFd> {
    let addresses = resolve(host, port, deadline)?;
    connect_to_any(local, &addresses, peer, deadline)
}

/// The two ends of a connection of this machine to itself, on its loopback interface.
///
/// # Errors
/// `Unreachable` if that interface is down, or drops packets.
pub(crate) fn pair(deadline: Deadline) -> Result<(OwnedFd, OwnedFd)> {
    /// Another program may connect first.
    const MAX_FOREIGN_CONNECTIONS: usize = 64;
    let make = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .or_else(|_| TcpListener::bind((Ipv6Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        // The standard library refuses a limit of zero.
        let limit = deadline.remaining().max(Duration::from_millis(1));
        let near = TcpStream::connect_timeout(&address, limit)?;
        near.set_nodelay(true)?;
        for _ in 0..MAX_FOREIGN_CONNECTIONS {
            // Our connection is in the queue, behind earlier ones.
            let (far, from) = listener.accept()?;
            if from == near.local_addr()? {
                return Ok((near.into(), far.into()));
            }
        }
        Err(io::ErrorKind::ConnectionRefused.into())
    };
    make().map_err(|error: io::Error| {
        let message = format!("this machine has no connection with itself: {error}");
        Error::new(ErrorKind::Unreachable, message)
    })
}

fn connect_to_any(
    local: &LocalEnd,
    addresses: &[SocketAddr],
    peer: &str,
    deadline: Deadline,
) -> Result<OwnedFd> {
    let mut failures = Vec::new();
    for (tried, address) in addresses.iter().enumerate() {
        let left = u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
        let share = deadline.remaining() / left;
        if share.is_zero() {
            break;
        }
        let connected = connect_within(local, address, deadline.at_most(share));
        match connected.and_then(prepare) {
            Ok(socket) => return Ok(socket),
            Err(error) => failures.push(format!("{address}: {error}")),
        }
    }
    let failures = failures.join("; ");
    if deadline.has_passed() {
        let what = format!("a TCP connection to {addresses:?}");
        let error = Error::timed_out(Stage::Dial, deadline, &what);
        return Err(error.with_last_seen(failures));
    }
    let message = format!("cannot connect to {peer}: {failures}");
    Err(Error::new(ErrorKind::Unreachable, message))
}

/// Like [`TcpStream::connect_timeout`], but a cancellation ends it.
fn connect_within(
    local: &LocalEnd,
    address: &SocketAddr,
    deadline: Deadline,
) -> io::Result<TcpStream> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(family, SockType::Stream, flags, None)?;
    bind(&socket, local, address)?;
    match socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(*address)) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS) => {
            wait_until_ready(socket.as_fd(), PollFlags::POLLOUT, deadline)?;
            match getsockopt(&socket, sockopt::SocketError)? {
                0 => {}
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
        }
        Err(errno) => return Err(errno.into()),
    }
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    require_bound(&stream, local)?;
    Ok(stream)
}

/// Binds a socket that will connect to `to`.
fn bind(socket: &OwnedFd, local: &LocalEnd, to: &SocketAddr) -> io::Result<()> {
    if let Some(interface) = &local.interface {
        let name = OsString::from(interface.as_str());
        setsockopt(socket, sockopt::BindToDevice, &name).map_err(|errno| {
            let why = match errno {
                Errno::ENODEV => "there is no such interface here".to_owned(),
                errno => errno.desc().to_owned(),
            };
            io::Error::other(format!("cannot use the interface {interface}: {why}"))
        })?;
    }
    let Some(address) = local.address else {
        return Ok(());
    };
    if address.is_ipv4() != to.is_ipv4() {
        let message = format!("the source address {address} is of the other IP version");
        return Err(io::Error::other(message));
    }
    // With this, several connections can share one local port, like unbound connections.
    setsockopt(socket, sockopt::IpBindAddressNoPort, &true)?;
    let storage = SockaddrStorage::from(SocketAddr::new(address, 0));
    socket::bind(socket.as_raw_fd(), &storage).map_err(|errno| {
        let why = match errno {
            Errno::EADDRNOTAVAIL => "this machine does not have it",
            errno => errno.desc(),
        };
        io::Error::other(format!("cannot use the source address {address}: {why}"))
    })
}

fn require_bound(stream: &TcpStream, local: &LocalEnd) -> io::Result<()> {
    if let Some(address) = local.address {
        let has = stream.local_addr()?.ip();
        if has != address {
            let message = format!("the source address is {has} and not {address}");
            return Err(io::Error::other(message));
        }
    }
    if let Some(interface) = &local.interface {
        let has = getsockopt(stream, sockopt::BindToDevice)?;
        let has = has.to_string_lossy();
        let has = has.trim_end_matches('\0');
        if has != interface.as_str() {
            let message = format!("the interface is {has:?} and not {interface}");
            return Err(io::Error::other(message));
        }
    }
    Ok(())
}

/// Sets how long the kernel waits before it gives the connection up, instead of 30 seconds:
/// `limit` limits unacknowledged or untaken data (`TCP_USER_TIMEOUT`), and unanswered
/// probes of an idle connection. It changes nothing for a socket that is not TCP.
///
/// # Errors
/// By the errno.
pub(crate) fn give_up_after(socket: &OwnedFd, limit: Duration) -> Result<()> {
    // Zero would mean the kernel's default of a quarter of an hour. The kernel takes no
    // more than an `int` holds (`net/ipv4/tcp.c`, `do_tcp_setsockopt`).
    let most = i32::MAX.unsigned_abs();
    let milliseconds = u32::try_from(limit.as_millis()).unwrap_or(most);
    let milliseconds = milliseconds.clamp(1, most);
    match setsockopt(socket, sockopt::TcpUserTimeout, &milliseconds) {
        Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOPROTOOPT) => Ok(()),
        Err(errno) => Err(Error::of_errno("cannot set TCP_USER_TIMEOUT", errno)),
    }
}

fn resolve(host: &str, port: u16, deadline: Deadline) -> Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let name = host.to_owned();
    worker::run(
        Stage::Resolve,
        &format!("the address of {host}"),
        deadline,
        || "no answer from the resolver".to_owned(),
        move || {
            let addresses = (name.as_str(), port).to_socket_addrs().map_err(|error| {
                let message = format!("cannot resolve {name}: {error}");
                Error::new(ErrorKind::Unreachable, message)
            })?;
            Ok(addresses.collect())
        },
    )
}

fn prepare(stream: TcpStream) -> io::Result<OwnedFd> {
    // On one machine a socket can connect to itself while the server is down. It would then
    // hold the server's port.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    let milliseconds = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    let socket = stream.as_fd();
    setsockopt(&socket, sockopt::KeepAlive, &true)?;
    setsockopt(&socket, sockopt::TcpKeepIdle, &seconds(PROBE_AFTER_IDLE))?;
    setsockopt(&socket, sockopt::TcpKeepInterval, &seconds(PROBE_EVERY))?;
    setsockopt(&socket, sockopt::TcpKeepCount, &PROBES)?;
    setsockopt(&socket, sockopt::TcpUserTimeout, &milliseconds(DEAD_AFTER))?;
    Ok(stream.into())
}

#[cfg(test)]
mod tests {
    use io::{Read as _, Write as _};

    use nix::sys::socket::getsockopt;

    use super::*;

    fn listen() -> TcpListener {
        TcpListener::bind("[::1]:0")
            .or_else(|_| TcpListener::bind("127.0.0.1:0"))
            .unwrap()
    }

    #[test]
    fn a_dead_link_is_noticed_by_the_kernel_also_when_it_is_idle() {
        let listener = listen();
        let address = listener.local_addr().unwrap();
        let deadline = Deadline::after(Duration::from_secs(10));
        let socket = connect(&address.ip().to_string(), address.port(), "it", deadline).unwrap();
        assert!(getsockopt(&socket, sockopt::TcpNoDelay).unwrap());
        assert!(getsockopt(&socket, sockopt::KeepAlive).unwrap());
        assert_eq!(getsockopt(&socket, sockopt::TcpKeepIdle), Ok(10));
        assert_eq!(getsockopt(&socket, sockopt::TcpKeepInterval), Ok(5));
        assert_eq!(getsockopt(&socket, sockopt::TcpKeepCount), Ok(4));
        assert_eq!(getsockopt(&socket, sockopt::TcpUserTimeout), Ok(30_000));
        give_up_after(&socket, Duration::from_secs(5)).unwrap();
        assert_eq!(getsockopt(&socket, sockopt::TcpUserTimeout), Ok(5_000));
        give_up_after(&socket, Duration::MAX).unwrap();
        assert_eq!(
            getsockopt(&socket, sockopt::TcpUserTimeout),
            Ok(i32::MAX.unsigned_abs())
        );
        let (unix, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        give_up_after(&unix.into(), Duration::from_secs(5)).unwrap();
    }

    #[test]
    fn after_an_address_without_a_listener_the_next_one_is_tried() {
        // No other test, which may run meanwhile, listens on this address.
        let listen = || TcpListener::bind("127.0.0.2:0").unwrap();
        let (gone, there) = (listen(), listen());
        let addresses = [&gone, &there].map(|listener| listener.local_addr().unwrap());
        drop(gone);
        let deadline = Deadline::after(Duration::from_secs(10));
        assert!(connect_to_any(&LocalEnd::default(), &addresses, "it", deadline).is_ok());
        drop(there);
        let error = connect_to_any(&LocalEnd::default(), &addresses, "it", deadline)
            .unwrap_err()
            .to_string();
        for address in addresses {
            assert!(error.contains(&address.to_string()), "{error}");
        }
    }

    #[test]
    fn a_connection_comes_from_the_address_and_the_interface_that_were_asked_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let deadline = Deadline::after(Duration::from_secs(10));
        let from = |interface: Option<&str>, address: &str| {
            let local = LocalEnd {
                interface: interface.map(|name| name.parse().unwrap()),
                address: Some(address.parse().unwrap()),
            };
            connect_from(&local, "127.0.0.1", port, "it", deadline)
        };
        let _near = from(None, "127.0.0.77").unwrap();
        let (_, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip().to_string(), "127.0.0.77");
        for (interface, address, names) in [
            (
                None,
                "192.0.2.1",
                "192.0.2.1: this machine does not have it",
            ),
            (
                None,
                "::1",
                "the source address ::1 is of the other IP version",
            ),
            (Some("lunbd-none"), "127.0.0.1", "interface lunbd-none"),
        ] {
            let error = from(interface, address).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unreachable);
            assert!(error.to_string().contains(names), "{error}");
        }
    }

    #[test]
    fn bytes_written_to_one_end_of_a_pair_are_read_from_the_other() {
        let deadline = Deadline::after(Duration::from_secs(10));
        let (near, far) = pair(deadline).unwrap();
        TcpStream::from(near).write_all(b"number").unwrap();
        let mut read = String::new();
        TcpStream::from(far).read_to_string(&mut read).unwrap();
        assert_eq!(read, "number");
    }

    #[test]
    fn a_socket_that_found_itself_is_no_server() {
        // Connect a bound socket to its own address.
        use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrIn};
        let kind = SockType::Stream;
        let socket =
            socket::socket(AddressFamily::Inet, kind, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&socket);
        socket::bind(descriptor, &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
        let own: SockaddrIn = socket::getsockname(descriptor).unwrap();
        socket::connect(descriptor, &own).unwrap();
        let error = prepare(socket.into()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
