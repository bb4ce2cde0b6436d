//! The proof that the kernel receives over each connection of a device.
//!
//! Each connection has a receiver: a work item that runs until the connection ends
//! (`drivers/block/nbd.c`, `recv_work`). On a busy machine the rescue thread of the device's
//! work queue takes several of them and runs one after the other (`kernel/workqueue.c`,
//! `rescuer_thread`): the next begins when a connection ends. Over its connection requests
//! go out, and their replies stay in the socket until the requests time out. Linux 7.0
//! takes one at a time, as does 6.18 since 2026.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::socket::{MsgFlags, recv};
use nix::unistd::Pid;

use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{NbdServer, NbdUri};
use crate::kernel::worker::{self, Pending};
use crate::kernel::{Roots, sysfs};
use crate::nbd::NbdDevice;

/// How long a reply stays in a socket at most where the kernel receives.
const UNREAD: Duration = Duration::from_secs(2);

/// Whether the kernel receives.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Receives {
    OverEach,
    /// A reply stays in a socket.
    NotOverEach,
}

impl Receives {
    /// # Errors
    /// `NotReady` where it does not over each connection.
    pub(super) fn require(self, device: &NbdDevice) -> Result<()> {
        match self {
            Self::OverEach => Ok(()),
            Self::NotOverEach => {
                let message = format!(
                    "the kernel does not receive over each connection of nbd{}: on a busy machine                      Linux before 7.0 may begin with one only when another ends; attach again, or                      with one connection",
                    device.index()
                );
                Err(Error::new(ErrorKind::NotReady, message).at(Stage::Connect))
            }
        }
    }
}

/// Reads a block over each connection, past the page cache. The kernel chooses the
/// connection by the processor that a request comes from, so one that no processor of
/// this process has is not looked at. `sockets` are our ends; those of TLS do not show what
/// is in them.
///
/// # Errors
/// `TimedOut` where a read has not returned by `deadline`.
pub(super) fn look(
    device: &NbdDevice,
    roots: &Roots,
    uri: &NbdUri,
    sockets: &[OwnedFd],
    deadline: Deadline,
) -> Result<Receives> {
    if sockets.len() < 2 {
        return Ok(Receives::OverEach);
    }
    let is_tls = matches!(uri.server(), NbdServer::Tls { .. });
    let mut unread = Unread::default();
    for read in reads(device, roots)? {
        let mut pauses = Backoff::new(Duration::from_millis(10), Duration::from_millis(200));
        // An error is an answer too.
        while read.wait(deadline.at_most(pauses.pause())).is_none() {
            if !is_tls && unread.since(sockets).elapsed() >= UNREAD {
                return Ok(Receives::NotOverEach);
            }
            if deadline.has_passed() {
                let what = format!("a read over each connection of nbd{}", device.index());
                let error = Error::timed_out(Stage::Connect, deadline, &what);
                return Err(error.with_last_seen(device.disk().describe()));
            }
        }
    }
    Ok(Receives::OverEach)
}

/// A read for each of the device's hardware queues, of which each connection has one.
fn reads(device: &NbdDevice, roots: &Roots) -> Result<Vec<Pending<()>>> {
    let queues = device.disk().dir().join("mq");
    let of_queue = |name: String| {
        let processors = sysfs::read(&queues.join(name).join("cpu_list")).unwrap_or_default();
        let processors: Vec<usize> = processors
            .split(',')
            .filter_map(|number| number.trim().parse().ok())
            .collect();
        let (disk, roots) = (device.disk().clone(), roots.clone());
        worker::start_with_own_fd_table(Stage::Connect, move || {
            on_one_of(&processors, || disk.read_first_block(&roots)).unwrap_or(Ok(()))
        })
    };
    sysfs::names(&queues)?.into_iter().map(of_queue).collect()
}

/// Runs `call` on these processors; `None` where this thread may use none of them.
fn on_one_of<T>(processors: &[usize], call: impl FnOnce() -> T) -> Option<T> {
    let this_thread = Pid::from_raw(0);
    let allowed = sched_getaffinity(this_thread).ok()?;
    let mut wanted = CpuSet::new();
    for processor in processors {
        if allowed.is_set(*processor).unwrap_or(false) {
            wanted.set(*processor).ok()?;
        }
    }
    sched_setaffinity(this_thread, &wanted).ok()?;
    let result = call();
    if let Err(errno) = sched_setaffinity(this_thread, &allowed) {
        tracing::debug!(%errno, "a thread stays bound to its processor");
    }
    Some(result)
}

/// Since when a socket has had something to read at each look.
#[derive(Default)]
struct Unread(Vec<Option<Instant>>);

impl Unread {
    /// Of the socket that has had it for longest; now where none has.
    fn since(&mut self, sockets: &[OwnedFd]) -> Instant {
        let now = Instant::now();
        self.0.resize(sockets.len(), None);
        for (since, socket) in self.0.iter_mut().zip(sockets) {
            *since = has_unread(socket).then(|| since.unwrap_or(now));
        }
        self.0.iter().flatten().min().copied().unwrap_or(now)
    }
}

fn has_unread(socket: &OwnedFd) -> bool {
    let looks = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    recv(socket.as_raw_fd(), &mut [0], looks).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_is_unread_from_the_first_look_that_finds_something_until_it_is_read() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let mut receiver = ours.try_clone().unwrap();
        let (_quiet, other) = UnixStream::pair().unwrap();
        let sockets = [other.into(), ours.into()];
        let mut unread = Unread::default();
        let start = Instant::now();
        assert!(unread.since(&sockets) >= start);
        theirs.write_all(b"reply").unwrap();
        let first = unread.since(&sockets);
        assert_eq!(unread.since(&sockets), first);
        receiver.read_exact(&mut [0; 5]).unwrap();
        assert!(unread.since(&sockets) > first);
    }

    #[test]
    fn a_call_runs_on_the_processor_that_it_is_given_and_the_thread_goes_on_as_before() {
        let this_thread = Pid::from_raw(0);
        let before = sched_getaffinity(this_thread).unwrap();
        let last = (0..CpuSet::count()).rfind(|number| before.is_set(*number).unwrap());
        let last = last.unwrap();
        let during = on_one_of(&[last], || sched_getaffinity(this_thread).unwrap()).unwrap();
        let only_last: Vec<usize> = (0..CpuSet::count())
            .filter(|number| during.is_set(*number).unwrap())
            .collect();
        assert_eq!(only_last, [last]);
        assert_eq!(sched_getaffinity(this_thread).unwrap(), before);
        assert_eq!(on_one_of(&[], || ()), None);
    }
}
