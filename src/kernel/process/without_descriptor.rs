//! The files that processes keep open without a descriptor: they have mapped them, or
//! registered them with an `io_uring`.
//!
//! The kernel shows both, and may not answer: a process that waits for a file server while it
//! changes its memory blocks every reader of its mappings. Such a process is given up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::descriptors::unless_denied;
use super::mappings::{Mapped, Mappings};
use super::opener::Means;
use super::rings;
use super::threads::ThreadList;
use crate::deadline::Deadline;
use crate::error::Stage;
use crate::kernel::Roots;
use crate::kernel::devices::NumberedDevice;
use crate::kernel::worker::{self, Pending};

/// How long one process may take. If the process changes its memory only for a moment, the
/// kernel answers within this time.
const MAX_PROCESS_TIME: Duration = Duration::from_secs(2);

/// How many times the threads of a process are listed until none ends meanwhile.
const MAX_LISTS: usize = 16;

/// A busy machine may take this long to run a thread.
const MIN_PROCESS_TIME: Duration = Duration::from_millis(200);

/// One process takes no more than this part of the time that the caller has left, so that
/// several that hang leave most of it.
const PART_OF_TIME: u32 = 8;

/// A process whose descriptors were read.
#[derive(Debug, Clone)]
pub(super) struct Process {
    pub(super) pid: u32,
    /// Those of its descriptors that are rings.
    pub(super) rings: BTreeSet<PathBuf>,
}

/// What was found for one process.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) pid: u32,
    pub(super) opened: Vec<(NumberedDevice, Means)>,
    /// Whether everything could be looked at.
    pub(super) is_complete: bool,
}

/// The processes that were given up and whose kernel calls have not returned: each holds a
/// thread, and is not looked at a second time.
static GIVEN_UP: Mutex<BTreeMap<u32, Pending<()>>> = Mutex::new(BTreeMap::new());

/// The devices of `wanted` that these processes keep open without a descriptor, each process
/// in its turn. A process for which the kernel does not answer in time is incomplete.
pub(super) fn read(
    roots: &Roots,
    wanted: &[NumberedDevice],
    processes: Vec<Process>,
    deadline: Deadline,
) -> Vec<Found> {
    let mut found = Vec::new();
    GIVEN_UP
        .lock()
        .retain(|_, pending| pending.wait(Deadline::after(Duration::ZERO)).is_none());
    let (hanging, left): (Vec<_>, Vec<_>) = {
        let given_up = GIVEN_UP.lock();
        let is_hanging = |process: &Process| given_up.contains_key(&process.pid);
        processes.into_iter().partition(is_hanging)
    };
    let incomplete = |process: &Process| Found {
        pid: process.pid,
        opened: Vec::new(),
        is_complete: false,
    };
    found.extend(hanging.iter().map(incomplete));
    let mut left = VecDeque::from(left);
    while !left.is_empty() && !deadline.has_passed() {
        let Ok(scan) = RunningScan::start(roots, wanted, &left) else {
            break;
        };
        let (answered, unended) = scan.wait(deadline);
        left.drain(..answered.len());
        found.extend(answered);
        let Some(pending) = unended else {
            // A thread that died has left some processes.
            break;
        };
        if let Some(process) = left.pop_front() {
            tracing::warn!(pid = process.pid, "the kernel does not show its mappings");
            found.push(incomplete(&process));
            GIVEN_UP.lock().insert(process.pid, pending);
        }
    }
    found.extend(left.iter().map(incomplete));
    found
}

/// A look at each process in its turn, on a thread that may never return.
struct RunningScan {
    pending: Pending<()>,
    progress: Arc<Mutex<Progress>>,
}

struct Progress {
    /// What was found for the processes that the kernel has answered for.
    answered: Vec<Found>,
    /// When the look at the next process began.
    next_since: Instant,
    is_given_up: bool,
}

impl RunningScan {
    fn start(
        roots: &Roots,
        wanted: &[NumberedDevice],
        processes: &VecDeque<Process>,
    ) -> crate::error::Result<Self> {
        let (roots, wanted, processes) = (roots.clone(), wanted.to_vec(), processes.clone());
        let progress = Arc::new(Mutex::new(Progress {
            answered: Vec::new(),
            next_since: Instant::now(),
            is_given_up: false,
        }));
        let told = Arc::clone(&progress);
        let pending = worker::start_with_own_fd_table(Stage::Claim, move || {
            let mut mappings = Mappings::default();
            for process in &processes {
                let found = read_process(&roots, &wanted, process, &mut mappings);
                let mut progress = told.lock();
                if progress.is_given_up {
                    break;
                }
                progress.answered.push(found);
                progress.next_since = Instant::now();
            }
            Ok(())
        })?;
        Ok(Self { pending, progress })
    }

    /// Waits until the scan has ended, one process has taken too long, or the deadline has passed.
    /// Returns what was found until then, and the call if it has not ended.
    fn wait(self, deadline: Deadline) -> (Vec<Found>, Option<Pending<()>>) {
        let Self { pending, progress } = self;
        loop {
            let limit = process_limit(deadline);
            let spent = progress.lock().next_since.elapsed();
            let has_ended = pending
                .wait(deadline.at_most(limit.saturating_sub(spent)))
                .is_some();
            let mut progress = progress.lock();
            let hangs = progress.next_since.elapsed() >= limit || deadline.has_passed();
            if has_ended || hangs {
                progress.is_given_up = true;
                let answered = std::mem::take(&mut progress.answered);
                return (answered, (!has_ended).then_some(pending));
            }
        }
    }
}

/// How long the kernel may take to answer for one process.
fn process_limit(deadline: Deadline) -> Duration {
    (deadline.remaining() / PART_OF_TIME).clamp(MIN_PROCESS_TIME, MAX_PROCESS_TIME)
}

fn read_process(
    roots: &Roots,
    wanted: &[NumberedDevice],
    process: &Process,
    mappings: &mut Mappings,
) -> Found {
    let mut is_complete = true;
    let directory = roots.proc.join(process.pid.to_string());
    let memory = match mappings.read(roots, &directory, &mut is_complete) {
        Some(mapped) if !mapped.is_empty => Some((directory, mapped)),
        _ => memory_of_other_threads(roots, &directory, mappings, &mut is_complete),
    };
    // A process without memory has ended.
    let Some((directory, mapped)) = memory else {
        return Found {
            pid: process.pid,
            opened: Vec::new(),
            is_complete,
        };
    };
    // A ring still works while it is mapped, and without a descriptor nothing shows its files.
    is_complete &= !mapped.has_ring || !process.rings.is_empty();
    let mut opened = Vec::new();
    for device in mapped.devices {
        if matches!(device, NumberedDevice::Block(_)) && wanted.contains(&device) {
            opened.push((device, Means::Mapping));
        }
    }
    for ring in &process.rings {
        let files = rings::fixed_files(roots, &directory, ring, wanted, &mut is_complete);
        opened.extend(files.into_iter().map(|device| (device, Means::FixedFile)));
    }
    opened.sort_unstable();
    opened.dedup();
    Found {
        pid: process.pid,
        opened,
        is_complete,
    }
}

/// The mappings of a process whose first thread has shown none, and the directory of the thread
/// that shows them.
fn memory_of_other_threads(
    roots: &Roots,
    process: &Path,
    mappings: &mut Mappings,
    is_complete: &mut bool,
) -> Option<(PathBuf, Mapped)> {
    for _ in 0..MAX_LISTS {
        let list = unless_denied(ThreadList::read(process), is_complete)?;
        let others = list.numbers.iter();
        let others = others.map(|thread| roots.proc.join(thread.to_string()));
        let mut any_gone = false;
        // A thread that executes a program takes the number of its process.
        for directory in iter::once(process.to_owned()).chain(others) {
            match mappings.read(roots, &directory, is_complete) {
                Some(mapped) if !mapped.is_empty => return Some((directory, mapped)),
                mapped => any_gone |= mapped.is_none(),
            }
        }
        if !*is_complete || (list.count_matches() && !any_gone) {
            return None;
        }
    }
    *is_complete = false;
    None
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    fn process(pid: u32) -> Process {
        Process {
            pid,
            rings: BTreeSet::new(),
        }
    }

    fn whole(found: &[Found]) -> Vec<(u32, bool)> {
        let mut each: Vec<_> = found.iter().map(|one| (one.pid, one.is_complete)).collect();
        each.sort_unstable();
        each
    }

    fn maps(roots: &Roots, pid: u32) -> PathBuf {
        let process = roots.proc.join(pid.to_string());
        fs::create_dir_all(&process).unwrap();
        process.join("maps")
    }

    /// Makes a file whose open waits, since no process has its other end open.
    fn hang(path: &Path) {
        mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    }

    #[test]
    fn a_process_that_the_kernel_does_not_answer_for_is_given_up_and_holds_up_no_other() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        // The numbers of no process of this machine, and of no other test.
        let [before, hanging, behind] = [4_194_310, 4_194_311, 4_194_312];
        fs::write(maps(&roots, before), "").unwrap();
        fs::write(maps(&roots, behind), "").unwrap();
        hang(&maps(&roots, hanging));
        let all = || [before, hanging, behind].map(process).to_vec();
        let short = || Deadline::after(Duration::from_secs(16));
        let expected = [(before, true), (hanging, false), (behind, true)];
        assert_eq!(whole(&read(&roots, &[], all(), short())), expected);
        // It is not waited for again.
        let long = Deadline::after(Duration::from_secs(600));
        assert_eq!(whole(&read(&roots, &[], all(), long)), expected);
        assert!(long.elapsed() < Duration::from_secs(1));
        let release = OpenOptions::new().write(true).open(maps(&roots, hanging));
        drop(release.unwrap());
        fs::remove_file(maps(&roots, hanging)).unwrap();
        while !read(&roots, &[], all(), long)
            .iter()
            .all(|one| one.is_complete)
        {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_ring_that_is_mapped_and_has_no_descriptor_makes_the_look_incomplete() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let line = "3000-4000 rw-s 00000000 00:0f 9      anon_inode:[io_uring]\n";
        fs::write(maps(&roots, 4_194_313), line).unwrap();
        let long = Deadline::after(Duration::from_secs(600));
        let mut mapper = process(4_194_313);
        let found = read(&roots, &[], vec![mapper.clone()], long);
        assert_eq!(whole(&found), [(4_194_313, false)]);
        mapper.rings.insert(roots.proc.join("4194313/fd/3"));
        let found = read(&roots, &[], vec![mapper.clone()], long);
        assert_eq!(
            whole(&found),
            [(4_194_313, false)],
            "its descriptor has gone"
        );
        let fdinfo = roots.proc.join("4194313/fdinfo");
        fs::create_dir_all(&fdinfo).unwrap();
        fs::write(fdinfo.join("3"), "UserFiles:\t0\nUserBufs:\t0\n").unwrap();
        let found = read(&roots, &[], vec![mapper], long);
        assert_eq!(whole(&found), [(4_194_313, true)]);
    }

    #[test]
    fn the_memory_of_a_process_whose_first_thread_has_ended_is_read_through_another_thread() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let [first, other] = [4_194_314, 4_194_315];
        let line = "3000-4000 rw-s 00000000 00:0f 9      anon_inode:[io_uring]\n";
        fs::write(maps(&roots, first), "").unwrap();
        fs::write(maps(&roots, other), line).unwrap();
        let long = Deadline::after(Duration::from_secs(600));
        let is_complete = || read(&roots, &[], vec![process(first)], long)[0].is_complete;
        assert!(is_complete(), "it has ended");
        let directory = roots.proc.join(first.to_string());
        for thread in [first, other] {
            fs::create_dir_all(directory.join(format!("task/{thread}"))).unwrap();
        }
        let stat = format!("{first} (a) Z 2 7 7 0 -1 0 1 2 3 4 5 6 7 8 20 0 2 0 99\n");
        fs::write(directory.join("stat"), stat).unwrap();
        assert!(!is_complete(), "a ring is mapped");
    }
}
