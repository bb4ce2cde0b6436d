//! Whether the bytes that a socket has received are read.

use std::os::fd::OwnedFd;
use std::time::Instant;

/// The result of repeated looks at one socket.
#[derive(Debug, Default)]
pub(super) struct Unread(Option<(Instant, Count)>);

/// The bytes of a socket.
#[derive(Debug, Clone, Copy)]
struct Count {
    unread: u64,
    /// All bytes that the socket has received; only TCP counts them.
    received: Option<u64>,
}

impl Count {
    fn of(socket: &OwnedFd) -> Option<Self> {
        let received = lunbd_sys::socket::tcp_bytes_received(socket).ok();
        let unread = lunbd_sys::socket::unread_bytes(socket).ok()?;
        Some(Self { unread, received })
    }

    /// Whether the counts show that a process or the kernel has read since `before`. Those of
    /// a socket other than TCP show it only if it read more than has arrived meanwhile.
    fn shows_a_read_since(self, before: Self) -> bool {
        match self.received.zip(before.received) {
            Some((now, then)) => {
                now.saturating_sub(self.unread) != then.saturating_sub(before.unread)
            }
            None => self.unread < before.unread,
        }
    }
}

impl Unread {
    /// Looks at the socket, and returns since when it has had bytes of which none was read;
    /// `None` if it has no bytes.
    pub(super) fn look(&mut self, socket: &OwnedFd) -> Option<Instant> {
        let count = Count::of(socket).filter(|count| count.unread > 0);
        self.0 = count.map(|count| match self.0 {
            Some((since, before)) if !count.shows_a_read_since(before) => (since, count),
            _ => (Instant::now(), count),
        });
        self.since()
    }

    /// The answer of the last look.
    pub(super) fn since(&self) -> Option<Instant> {
        self.0.map(|(since, _)| since)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Writes and reads `stream`, of which `socket` is a duplicate.
    fn follow(mut peer: impl Write, mut stream: impl Read, socket: &OwnedFd) {
        let mut unread = Unread::default();
        assert_eq!(unread.look(socket), None);
        peer.write_all(b"two replies").unwrap();
        let first = unread.look(socket).unwrap();
        assert_eq!(unread.look(socket), Some(first));
        stream.read_exact(&mut [0; 3]).unwrap();
        let second = unread.look(socket).unwrap();
        assert!(second > first);
        peer.write_all(b" and one").unwrap();
        assert_eq!(unread.look(socket), Some(second));
        stream.read_exact(&mut [0; 16]).unwrap();
        assert_eq!(unread.look(socket), None);
    }

    #[test]
    fn what_a_socket_brings_is_unread_from_the_first_look_until_somebody_reads() {
        let (peer, ours) = UnixStream::pair().unwrap();
        follow(peer, ours.try_clone().unwrap(), &ours.into());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        follow(peer, ours.try_clone().unwrap(), &ours.into());
    }

    #[test]
    fn a_tcp_socket_that_brings_as_much_as_is_read_meanwhile_is_read() {
        let before = Count {
            unread: 16,
            received: Some(100),
        };
        let more = |unread, received| Count {
            unread,
            received: Some(received),
        };
        assert!(more(16, 132).shows_a_read_since(before));
        assert!(!more(48, 132).shows_a_read_since(before));
    }
}
