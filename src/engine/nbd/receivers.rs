//! The proof that the kernel receives over each connection of a device.
//!
//! Each connection has a receiver: a work item that runs until the connection ends
//! (`drivers/block/nbd.c`, `recv_work`). On a busy machine the rescue thread of the device's
//! work queue takes several of them and runs one after the other (`kernel/workqueue.c`,
//! `rescuer_thread`): the next begins when a connection ends. Until then requests go out over
//! the connection of the next, and their replies stay in the socket until the requests time
//! out. In Linux 7.0, and in 6.18 since 2026, the rescue thread takes one item at a time.

use std::sync::Arc;
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::nbd::known::change_own_link;
use crate::engine::nbd::reads::NbdReads;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, process, sysfs, worker};
use crate::nbd::{Link, NbdDevice};

/// The longest time that a reply stays in a socket from which the kernel receives.
pub(in crate::engine) const UNREAD_LIMIT: Duration = Duration::from_secs(2);

/// How many receivers of the device run; `None` if this process does not see the kernel's
/// threads. Linux 5.14 and 5.15 call the work queue `knbdN-recv`, also later stable ones until
/// 5.15.34.
pub(in crate::engine) fn count(roots: &Roots, index: NbdIndex) -> Option<usize> {
    let queues = ["nbd", "knbd"].map(|name| format!("{name}{index}-recv"));
    process::running_items(roots, &queues).ok().flatten()
}

/// Whether the kernel receives over each connection.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::engine) enum ReceiverCheck {
    /// No reply stays in a socket.
    AllReceive,
    /// A reply stays in a socket, or a connection has ended: the kernel may have ended it,
    /// because it did not receive over it.
    NotAllReceive,
}

/// What the sockets of a device show.
#[derive(Debug, Clone, Copy, Default)]
struct Sockets {
    /// How many have not ended.
    live: usize,
    /// How long a reply has stayed unread in one.
    unread_for: Duration,
}

impl ReceiverCheck {
    /// # Errors
    /// `NotReady` if the kernel does not receive over each connection.
    pub(in crate::engine) fn require(self, device: &NbdDevice) -> Result<()> {
        match self {
            Self::AllReceive => Ok(()),
            Self::NotAllReceive => {
                let message = format!(
                    "the kernel does not receive over each connection of nbd{}, or one has ended: \
                     on a busy machine Linux before 7.0 may begin with one only when another \
                     ends; attach again, or with one connection",
                    device.index()
                );
                Err(Error::new(ErrorKind::NotReady, message).at(Stage::Connect))
            }
        }
    }
}

/// Whether the kernel receives over each connection of this process, and has as many as
/// `connections`. If that is one, any read of the device proves this.
///
/// # Errors
/// Those of [`check`].
pub(in crate::engine) fn check_own(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
    connections: usize,
    deadline: Deadline,
) -> Result<ReceiverCheck> {
    if connections < 2 {
        return Ok(ReceiverCheck::AllReceive);
    }
    let sockets = |link: &mut Link| Sockets {
        live: link.state().live,
        unread_for: link.unread_for(),
    };
    let look = || change_own_link(engine, device, backend, sockets).unwrap_or_default();
    let (reads, roots) = (&engine.nbd_reads, engine.roots());
    let check = check(reads, device, roots, connections, look, deadline)?;
    if check == ReceiverCheck::AllReceive {
        change_own_link(engine, device, backend, Link::note_receivers_began);
    }
    Ok(check)
}

/// Reads a block over each connection, past the page cache. The kernel chooses the
/// connection by the processor from which a request comes. So this cannot read over a
/// connection of which this process may use no processor, and over those beyond the number of
/// processors, of which there are `connections` together with the others. The log has how many
/// it read over. For the rest it counts the receivers that run, if this process sees the
/// kernel's threads. `look` looks at the sockets of the connections.
///
/// A read over a connection that ends meanwhile returns over another one, and proves nothing of
/// the first.
///
/// # Errors
/// `TimedOut` if a read has not returned by `deadline`.
fn check(
    reads: &NbdReads,
    device: &NbdDevice,
    roots: &Roots,
    connections: usize,
    mut look: impl FnMut() -> Sockets,
    deadline: Deadline,
) -> Result<ReceiverCheck> {
    let queues = queues(device)?;
    let is_awaited = Arc::new(());
    let begin = |turn| {
        let (queues, is_awaited) = (queues.clone(), Arc::downgrade(&is_awaited));
        let read = move |disk: &BlockDevice, roots: &Roots| {
            // Without a caller that waits, the device may be another one by now.
            let go_on = || is_awaited.strong_count() > 0;
            // An error is an answer too.
            Ok(read_over(&queues, go_on, || {
                drop(disk.read_first_block(roots));
            }))
        };
        reads.start(device, roots, turn, read)
    };
    let mut pauses = Backoff::new(Duration::from_millis(10), Duration::from_millis(200));
    let mut read = None;
    let read = loop {
        let turn = deadline.at_most(pauses.pause());
        if read.is_none() {
            read = begin(turn)?;
        }
        let answer = read.as_ref().and_then(|read| read.wait(turn));
        if let Some(answer) = answer {
            break answer?;
        }
        if look().unread_for >= UNREAD_LIMIT {
            return Ok(ReceiverCheck::NotAllReceive);
        }
        if deadline.has_passed() {
            let what = format!("a read over each connection of nbd{}", device.index());
            let error = Error::timed_out(Stage::Connect, deadline, &what);
            return Err(error.with_last_seen(device.disk().describe()));
        }
    };
    let index = device.index();
    if read < connections {
        tracing::warn!(%index, read, connections, "the check did not read over every connection");
        let until = deadline.at_most(UNREAD_LIMIT);
        if !has_as_many_receivers(roots, index, connections, until) {
            return Ok(ReceiverCheck::NotAllReceive);
        }
    }
    if look().live < connections {
        return Ok(ReceiverCheck::NotAllReceive);
    }
    Ok(ReceiverCheck::AllReceive)
}

/// Waits until as many receivers of the device run, or more. True if this process does not see
/// them: a device that answers has one at least.
fn has_as_many_receivers(
    roots: &Roots,
    index: NbdIndex,
    connections: usize,
    until: Deadline,
) -> bool {
    let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));
    loop {
        let running = count(roots, index).filter(|running| *running > 0);
        if running.is_none_or(|running| running >= connections) {
            return true;
        }
        if until.has_passed() {
            return false;
        }
        until.pause(pauses.pause());
    }
}

/// Calls `read` on a processor of each queue while `go_on` holds. Returns how many times: this
/// process may use no processor of some queues.
fn read_over(queues: &[Vec<usize>], go_on: impl Fn() -> bool, read: impl Fn()) -> usize {
    let each = queues.iter().take_while(|_| go_on());
    each.filter_map(|processors| on_one_processor_of(processors, &read))
        .count()
}

/// The processors of each hardware queue of the device. Each connection has one queue.
fn queues(device: &NbdDevice) -> Result<Vec<Vec<usize>>> {
    let queues = device.disk().dir().join("mq");
    let of_queue = |name: String| {
        let processors = sysfs::read(&queues.join(name).join("cpu_list")).unwrap_or_default();
        let processors = processors.split(',');
        processors
            .filter_map(|number| number.trim().parse().ok())
            .collect()
    };
    Ok(sysfs::names(&queues)?.into_iter().map(of_queue).collect())
}

/// Runs `call` on these processors; `None` if this thread may use none of them.
fn on_one_processor_of<T>(processors: &[usize], call: impl FnOnce() -> T) -> Option<T> {
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
        worker::emit(move || tracing::debug!(%errno, "a thread stays bound to its processor"));
    }
    Some(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_receivers_of_one_device_are_counted_by_either_name_of_their_work_queue() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let names = [
            "kthreadd",
            "kworker/u5:2+nbd0-recv",
            "kworker/u5:3+knbd0-recv",
            "kworker/u5:4+nbd10-recv",
        ];
        for (pid, name) in (2..).zip(names) {
            let process = roots.proc.join(pid.to_string());
            std::fs::create_dir_all(&process).unwrap();
            std::fs::write(process.join("comm"), format!("{name}\n")).unwrap();
            let stat = format!("{pid} ({name}) I 2 0 0 0 -1 {} 0\n", 0x0020_0000);
            std::fs::write(process.join("stat"), stat).unwrap();
        }
        let device = |index| NbdIndex::new(index).unwrap();
        assert_eq!(count(&roots, device(0)), Some(2));
        assert_eq!(count(&roots, device(1)), Some(0));
    }

    #[test]
    fn a_call_runs_on_its_given_processor_and_the_thread_keeps_its_own_afterwards() {
        let this_thread = Pid::from_raw(0);
        let before = sched_getaffinity(this_thread).unwrap();
        let last = (0..CpuSet::count()).rfind(|number| before.is_set(*number).unwrap());
        let last = last.unwrap();
        let during =
            on_one_processor_of(&[last], || sched_getaffinity(this_thread).unwrap()).unwrap();
        let only_last: Vec<usize> = (0..CpuSet::count())
            .filter(|number| during.is_set(*number).unwrap())
            .collect();
        assert_eq!(only_last, [last]);
        assert_eq!(sched_getaffinity(this_thread).unwrap(), before);
        assert_eq!(on_one_processor_of(&[], || ()), None);
    }

    #[test]
    fn only_the_queues_of_processors_that_this_process_may_use_count_as_read_over() {
        let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let may_use = |number: &usize| allowed.is_set(*number).unwrap();
        let (mine, others): (Vec<_>, Vec<_>) = (0..CpuSet::count()).partition(may_use);
        let queues = [mine.clone(), others, Vec::new(), mine];
        let reads = std::cell::Cell::new(0);
        let read = || reads.set(reads.get() + 1);
        assert_eq!(read_over(&queues, || true, read), 2);
        assert_eq!(reads.get(), 2);
        assert_eq!(read_over(&queues, || false, read), 0);
    }
}
