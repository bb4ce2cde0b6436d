//! Counts the processes that this process and its descendants start, from the kernel's events
//! (`drivers/connector/cn_proc.c`).

use std::collections::HashSet;
use std::io::ErrorKind;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_CONNECTOR};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};

// From <linux/connector.h> and <linux/cn_proc.h>.
const CN_IDX_PROC: u32 = 1;
const CN_VAL_PROC: u32 = 1;
const LISTEN: u32 = 1;
const FORK: u32 = 1;
/// The lengths of `nlmsghdr` and `cn_msg`, and of what precedes an event's own data.
const HEADERS: usize = 16 + 20;
const EVENT: usize = HEADERS + 16;
/// Room for some ten thousand events.
const RECEIVE_BUFFER: usize = 16 << 20;

/// Records process events from its start on; needs root.
#[derive(Debug)]
pub struct OwnProcesses(Socket);

impl OwnProcesses {
    /// Subscribed when this returns.
    #[must_use]
    pub fn start() -> Self {
        super::enter();
        let mut socket = Socket::new(NETLINK_CONNECTOR).expect("a connector socket");
        setsockopt(&socket, RcvBufForce, &RECEIVE_BUFFER).expect("a large receive buffer");
        let group = SocketAddr::new(0, CN_IDX_PROC);
        socket.bind(&group).expect("the group of process events");
        let kernel = SocketAddr::new(0, 0);
        socket
            .send_to(&subscription(), &kernel, 0)
            .expect("a subscription");
        socket
            .set_non_blocking(true)
            .expect("a socket that does not block");
        let watch = Self(socket);
        // The kernel's answer, and the events that came before it.
        let _before = watch.forks();
        watch
    }

    /// How many processes this process and its descendants have started since. Threads do not
    /// count.
    #[must_use]
    pub fn count(&self) -> usize {
        let mut family = HashSet::from([std::process::id()]);
        let forks = self.forks().into_iter();
        let own = forks.filter(|fork| family.contains(&fork.parent) && family.insert(fork.child));
        own.count()
    }

    /// All forks of the machine, in order. The kernel reports them inside fork(2).
    fn forks(&self) -> Vec<Fork> {
        let mut forks = Vec::new();
        loop {
            let mut message = Vec::with_capacity(4096);
            match self.0.recv_from(&mut message, 0) {
                Ok(_) => forks.extend(Fork::parse(&message)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return forks,
                Err(error) => panic!("receiving process events: {error}"),
            }
        }
    }
}

/// A fork that made a process, not a thread.
#[derive(Debug, PartialEq, Eq)]
struct Fork {
    parent: u32,
    child: u32,
}

impl Fork {
    fn parse(message: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            let bytes = message.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_ne_bytes(bytes))
        };
        let (parent, thread, child) = (word(EVENT + 4)?, word(EVENT + 8)?, word(EVENT + 12)?);
        (word(HEADERS)? == FORK && thread == child).then_some(Self { parent, child })
    }
}

fn subscription() -> Vec<u8> {
    const NLMSG_DONE: u16 = 3;
    let length = u32::try_from(HEADERS + 4).expect("a short message");
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(NLMSG_DONE.to_ne_bytes());
    message.extend([0; 10]);
    for word in [CN_IDX_PROC, CN_VAL_PROC, 0, 0] {
        message.extend(word.to_ne_bytes());
    }
    message.extend(4_u16.to_ne_bytes());
    message.extend(0_u16.to_ne_bytes());
    message.extend(LISTEN.to_ne_bytes());
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's event of a fork: the thread and process of the parent, then those of the
    /// child.
    fn event(what: u32, ids: [u32; 4]) -> Vec<u8> {
        let mut message = vec![0; HEADERS];
        message.extend(what.to_ne_bytes());
        message.resize(EVENT, 0);
        message.extend(ids.iter().flat_map(|id| id.to_ne_bytes()));
        message
    }

    #[test]
    fn a_new_process_differs_from_a_new_thread_and_from_other_events() {
        let fork = Fork {
            parent: 7,
            child: 12,
        };
        assert_eq!(Fork::parse(&event(FORK, [8, 7, 12, 12])), Some(fork));
        assert_eq!(Fork::parse(&event(FORK, [8, 7, 13, 7])), None);
        assert_eq!(Fork::parse(&event(2, [8, 7, 12, 12])), None);
        assert_eq!(Fork::parse(&event(FORK, [8, 7, 12, 12])[..EVENT]), None);
    }
}
