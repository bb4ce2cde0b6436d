//! What the kernel reports about a socket.

use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

/// `SK_MEMINFO_VARS` of `include/uapi/linux/sock_diag.h`.
const VARS: usize = 9;
/// `SK_MEMINFO_DROPS`.
const DROPS: usize = 8;

/// How many messages the kernel has dropped because this socket's buffer was
/// full (`SO_MEMINFO`, Linux 4.12).
///
/// The count stays: compare it with the last one. The next call on the socket
/// clears `ENOBUFS`, and a library may swallow that.
///
/// # Errors
/// The errno of `getsockopt`; `EINVAL` if the kernel's answer is too short to
/// hold the count.
#[doc(alias = "SO_MEMINFO")]
pub fn dropped_messages(socket: impl AsFd) -> nix::Result<u32> {
    let mut meminfo = [0_u32; VARS];
    let full = size_of::<[u32; VARS]>();
    let mut length = libc::socklen_t::try_from(full).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the descriptor is open for as long as `socket` is borrowed; the
    // kernel writes at most `length` bytes into an array of exactly that size,
    // and any bit pattern is a u32.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            meminfo.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    if usize::try_from(length).is_ok_and(|length| length < full) {
        return Err(Errno::EINVAL);
    }
    Ok(meminfo[DROPS])
}

/// How many bytes a TCP connection has received: its payload, and one for its
/// end (`TCP_INFO`, `tcpi_bytes_received`, Linux 4.1).
///
/// # Errors
/// The errno of `getsockopt`: `EOPNOTSUPP` if it is no TCP socket; `EINVAL` if
/// the kernel's answer is too short to hold the count.
#[doc(alias = "TCP_INFO")]
pub fn tcp_bytes_received(socket: impl AsFd) -> nix::Result<u64> {
    /// `offsetof(struct tcp_info, tcpi_bytes_received)` of
    /// `include/uapi/linux/tcp.h`.
    const OFFSET: usize = 128;
    let mut info = [0_u8; OFFSET + size_of::<u64>()];
    let mut length = libc::socklen_t::try_from(info.len()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the descriptor is open for as long as `socket` is borrowed; the
    // kernel writes at most `length` bytes into an array of exactly that size,
    // and any bit pattern is a byte.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    match (usize::try_from(length), info.last_chunk()) {
        (Ok(length), Some(count)) if length == info.len() => Ok(u64::from_ne_bytes(*count)),
        _ => Err(Errno::EINVAL),
    }
}

/// How many received bytes of a stream socket are not read yet (`FIONREAD`).
///
/// # Errors
/// The errno of `ioctl`; `EINVAL` where the kernel answers with a negative count.
#[doc(alias = "FIONREAD")]
pub fn unread_bytes(socket: impl AsFd) -> nix::Result<u64> {
    let mut count: libc::c_int = 0;
    // SAFETY: the descriptor is open for as long as `socket` is borrowed; the kernel writes
    // one `int`.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::FIONREAD, &raw mut count) };
    Errno::result(result)?;
    u64::try_from(count).map_err(|_| Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixDatagram, UnixStream};

    #[test]
    fn what_a_socket_has_brought_is_unread_until_it_is_read() {
        let (mut peer, mut ours) = UnixStream::pair().unwrap();
        assert_eq!(super::unread_bytes(&ours), Ok(0));
        peer.write_all(b"seventeen letters").unwrap();
        ours.read_exact(&mut [0; 7]).unwrap();
        assert_eq!(super::unread_bytes(&ours), Ok(10));
    }

    #[test]
    fn a_tcp_connection_counts_what_it_has_brought() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(super::tcp_bytes_received(&client), Ok(0));
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(b"seventeen letters").unwrap();
        client.read_exact(&mut [0; 17]).unwrap();
        assert_eq!(super::tcp_bytes_received(&client), Ok(17));
    }

    #[test]
    fn a_new_socket_has_dropped_nothing() {
        let (one, _other) = UnixDatagram::pair().unwrap();
        assert_eq!(super::dropped_messages(&one), Ok(0));
    }
}
