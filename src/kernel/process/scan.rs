//! A look at the descriptors of all processes.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use super::descriptor_tables::DescriptorTables;
use super::descriptors::{has_gone, unless_denied, writes};
use super::kernel_threads::KernelThreads;
use super::opener::{Means, Opener, Openers, command};
use super::pids::pids_without;
use super::rings;
use super::threads::ThreadList;
use super::without_descriptor::Process;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::kernel::devices::NumberedDevice;
use crate::kernel::{Roots, directory};

/// How many times the look at one process is repeated while threads of it end.
const MAX_LOOKS: usize = 16;

/// How many times a table is read while the process closes descriptors: it may have moved them.
const MAX_READS: usize = 4;

/// How many times the processes are listed while new ones start.
const MAX_LISTS: usize = 16;

/// A look for the processes that have one of some devices open.
pub(super) struct DescriptorScan<'a> {
    roots: &'a Roots,
    devices: &'a [NumberedDevice],
    tables: &'a DescriptorTables,
    kernel_threads: KernelThreads<'a>,
    /// Nothing is repeated after this.
    deadline: Deadline,
    /// The processes that were looked at.
    known: BTreeSet<u32>,
    pub(super) openers: Openers,
}

impl<'a> DescriptorScan<'a> {
    pub(super) fn new(
        roots: &'a Roots,
        devices: &'a [NumberedDevice],
        tables: &'a DescriptorTables,
        deadline: Deadline,
    ) -> Self {
        Self {
            roots,
            devices,
            tables,
            kernel_threads: KernelThreads::read(roots, tables),
            deadline,
            known: BTreeSet::new(),
            openers: Openers::default(),
        }
    }

    /// Looks at all processes, and hands those that have memory to `look_at_memory`. Repeats that
    /// with the processes that have started meanwhile: a process may end before the look at it, and
    /// have started another one that has the same files.
    pub(super) fn look_at_all(
        &mut self,
        look_at_memory: &mut dyn FnMut(&mut Openers, Vec<Process>),
    ) -> Result<()> {
        for list in 1.. {
            let mut pids = pids_without(self.roots, &self.kernel_threads)?;
            pids.retain(|pid| self.known.insert(*pid));
            if pids.is_empty() {
                break;
            }
            let mut processes = Vec::new();
            let mut ended = Vec::new();
            for pid in pids {
                let look = self.look_at(pid);
                if look.has_ended {
                    ended.push(pid);
                } else if !self.kernel_threads.is_parent(pid) {
                    // A thread of the kernel has no memory.
                    processes.push(look.process);
                }
            }
            look_at_memory(&mut self.openers, processes);
            if list == MAX_LISTS || self.deadline.has_passed() {
                self.openers.unreadable.extend(ended);
                break;
            }
        }
        Ok(())
    }

    /// Adds what a process has open.
    fn look_at(&mut self, pid: u32) -> ProcessLook {
        let mut look = ProcessLook::new(self.roots, pid);
        for number in 1.. {
            let all_seen = look.add_tables(self);
            if all_seen || !look.is_complete {
                break;
            }
            if number == MAX_LOOKS || self.deadline.has_passed() {
                look.is_complete = false;
                break;
            }
        }
        if !look.is_complete {
            self.openers.unreadable.insert(pid);
        }
        self.openers.found.append(&mut look.found);
        look
    }
}

/// A look at the descriptors of one process.
struct ProcessLook {
    path: PathBuf,
    process: Process,
    found: Vec<Opener>,
    /// Whether the kernel showed all that it was asked for.
    is_complete: bool,
    has_ended: bool,
}

impl ProcessLook {
    fn new(roots: &Roots, pid: u32) -> Self {
        Self {
            path: roots.proc.join(pid.to_string()),
            process: Process {
                pid,
                rings: BTreeSet::new(),
            },
            found: Vec::new(),
            is_complete: true,
            has_ended: false,
        }
    }

    /// Adds the descriptors in each table of the process. `false` if the look may have missed a
    /// table, because a thread has ended meanwhile.
    fn add_tables(&mut self, scan: &DescriptorScan<'_>) -> bool {
        self.process.rings.clear();
        let threads = unless_denied(ThreadList::read(&self.path), &mut self.is_complete);
        let threads = threads.unwrap_or_default();
        // This is read after the list, because a thread that executes a program takes the number
        // of its process, and with it this directory (`fs/exec.c`, `de_thread`).
        if !self.add_table(scan, &self.path.join("fd")) {
            self.has_ended = true;
            return true;
        }
        let first = self.process.pid;
        let mut last = first;
        let mut all_seen = threads.count_matches();
        for &thread in threads.numbers.iter().filter(|thread| **thread != first) {
            // No thread can join another one's table. Threads that share one now have shared it
            // since it was read.
            let share_table = |other| scan.tables.compare(other, thread) == Ok(true);
            if share_table(first) || (last != first && share_table(last)) {
                continue;
            }
            last = thread;
            let table = self.path.join(format!("task/{thread}/fd"));
            all_seen &= self.add_table(scan, &table);
        }
        all_seen
    }

    /// Adds the descriptors in a table. `false` if the kernel no longer shows its thread.
    fn add_table(&mut self, scan: &DescriptorScan<'_>, table: &Path) -> bool {
        for _ in 0..MAX_READS {
            let mut descriptors = Vec::new();
            let add = |name: &OsStr| descriptors.push(table.join(name));
            let read = directory::open_and_read_names(table, add);
            if read.as_ref().is_err_and(has_gone) {
                return false;
            }
            // If the process is this one, the directory itself is one of the descriptors. It stays
            // open, so that it does not count as gone.
            let _open = unless_denied(read, &mut self.is_complete);
            let mut any_gone = false;
            for descriptor in descriptors {
                any_gone |= !self.add(scan, descriptor);
            }
            if !any_gone {
                break;
            }
        }
        true
    }

    /// Adds a descriptor. `false` if it has gone.
    fn add(&mut self, scan: &DescriptorScan<'_>, descriptor: PathBuf) -> bool {
        let devices = &scan.roots.devices;
        let link = fs::read_link(&descriptor);
        match &link {
            Ok(link) if rings::is_ring(link) => {
                self.process.rings.insert(descriptor);
                return true;
            }
            Ok(link) if is_no_path(link) => return true,
            _ => {}
        }
        let device = match devices.device_at(&descriptor) {
            // The kernel lets us look, but the file's own file system does not: a file
            // system in user space refuses other users (`fs/fuse/dir.c`,
            // `fuse_allow_current_process`). Such a file is no disk of this machine.
            Err(error) if !has_gone(&error) && link.is_ok() => return true,
            Err(error) => {
                self.is_complete &= has_gone(&error);
                return !has_gone(&error);
            }
            Ok(device) => device,
        };
        let Some(device) = device.filter(|device| scan.devices.contains(device)) else {
            return true;
        };
        let writes = writes(&descriptor);
        // The process may have closed the descriptor, and the flags are those of another file
        // that has its number now.
        match devices.device_at(&descriptor) {
            Ok(now) if now != Some(device) => return false,
            Err(error) if has_gone(&error) => return false,
            _ => {}
        }
        let Some(writes) = writes else {
            return true;
        };
        let mut known = self.found.iter_mut();
        match known.find(|opener| opener.device == device) {
            Some(known) => known.writes |= writes,
            None => self.found.push(Opener {
                device,
                pid: self.process.pid,
                command: command(&self.path),
                writes,
                means: Means::Descriptor,
            }),
        }
        true
    }
}

/// Whether the link of a descriptor names something that is on no file system.
fn is_no_path(link: &Path) -> bool {
    let text = link.as_os_str().as_encoded_bytes();
    let names: [&[u8]; 3] = [b"socket:", b"pipe:", b"anon_inode:"];
    names.iter().any(|name| text.starts_with(name))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;
    use std::sync::mpsc::{self, Sender};
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;
    use crate::id::DevNo;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(600))
    }

    fn openers(roots: &Roots) -> Openers {
        let tables = DescriptorTables::read(roots);
        let mut scan = DescriptorScan::new(roots, &[FULL], &tables, soon());
        scan.look_at_all(&mut |_, _| {}).unwrap();
        scan.openers
    }

    const FULL: NumberedDevice = NumberedDevice::Character(DevNo { major: 1, minor: 7 });

    #[test]
    fn a_descriptor_whose_number_another_file_has_meanwhile_does_not_open_the_device() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let process = roots.proc.join("7");
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::create_dir_all(process.join("fdinfo")).unwrap();
        // The look at the flags waits in this pipe.
        let flags = process.join("fdinfo/3");
        mkfifo(&flags, Mode::S_IRWXU).unwrap();
        let descriptor = process.join("fd/3");
        symlink("/dev/full", &descriptor).unwrap();
        let openers_after = |successor: &str| {
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut pipe = fs::File::options().write(true).open(&flags).unwrap();
                    fs::remove_file(&descriptor).unwrap();
                    symlink(successor, &descriptor).unwrap();
                    pipe.write_all(b"flags:\t01\n").unwrap();
                });
                openers(&roots).found
            })
        };
        let [writer] = <[Opener; 1]>::try_from(openers_after("/dev/full")).unwrap();
        assert!(writer.writes, "{writer:?}");
        assert_eq!(openers_after("/dev/null"), []);
    }

    #[test]
    fn a_process_that_another_one_starts_before_it_ends_is_looked_at() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let start = |pid: &str| {
            let process = roots.proc.join(pid);
            fs::create_dir_all(process.join("fd")).unwrap();
            fs::create_dir_all(process.join("fdinfo")).unwrap();
            symlink("/dev/full", process.join("fd/3")).unwrap();
            process.join("fdinfo/3")
        };
        // The look at the first process waits in this pipe.
        let flags = start("7");
        mkfifo(&flags, Mode::S_IRWXU).unwrap();
        let found = thread::scope(|scope| {
            scope.spawn(|| {
                let mut pipe = fs::File::options().write(true).open(&flags).unwrap();
                fs::write(start("6"), "flags:\t01\n").unwrap();
                fs::remove_dir_all(roots.proc.join("7/fd")).unwrap();
                pipe.write_all(b"flags:\t01\n").unwrap();
            });
            openers(&roots)
        });
        let pids: Vec<u32> = found.found.iter().map(|opener| opener.pid).collect();
        assert_eq!(pids, [6]);
        assert!(found.unreadable.is_empty(), "{found:?}");
    }

    /// Starts a thread with a table of its own, and opens `file` there. It ends when the sender is
    /// dropped.
    fn thread_with_own_table(file: &'static str) -> (Sender<()>, JoinHandle<()>) {
        let (told, is_open) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let apart = thread::spawn(move || {
            lunbd_sys::files::unshare_fd_table().unwrap();
            let file = fs::File::open(file).unwrap();
            told.send(()).unwrap();
            let _ended = ended.recv();
            drop(file);
        });
        is_open.recv().unwrap();
        (end, apart)
    }

    #[test]
    fn a_thread_is_found_while_threads_that_the_kernel_lists_before_it_end() {
        const ROUNDS: usize = 100;
        let roots = Roots::default();
        let tables = DescriptorTables::read(&roots);
        let (mut looks, mut incomplete) = (0, 0);
        for _ in 0..ROUNDS {
            let earlier: Vec<_> = (0..4).map(|_| thread_with_own_table("/dev/null")).collect();
            let (end, kept) = thread_with_own_table("/dev/full");
            let ending = thread::spawn(move || {
                for (end, thread) in earlier {
                    drop(end);
                    thread.join().unwrap();
                }
            });
            while !ending.is_finished() {
                let mut scan = DescriptorScan::new(&roots, &[FULL], &tables, soon());
                scan.look_at(std::process::id());
                let Openers { found, unreadable } = scan.openers;
                assert!(!unreadable.is_empty() || found.len() == 1, "{found:?}");
                looks += 1;
                incomplete += unreadable.len();
            }
            drop(end);
            kept.join().unwrap();
            ending.join().unwrap();
        }
        assert!(
            incomplete * 2 <= looks,
            "{incomplete} of {looks} are incomplete"
        );
    }

    #[test]
    fn a_process_without_descriptors_that_is_still_there_is_looked_at() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        fs::create_dir_all(roots.proc.join("7/fd")).unwrap();
        let (stays, ends) = (vec![7], vec![]);
        for expected in [stays, ends] {
            let tables = DescriptorTables::read(&roots);
            let mut scan = DescriptorScan::new(&roots, &[FULL], &tables, soon());
            let mut pids = Vec::new();
            let mut note = |_: &mut Openers, processes: Vec<Process>| {
                pids.extend(processes.into_iter().map(|process| process.pid));
            };
            scan.look_at_all(&mut note).unwrap();
            assert_eq!(pids, expected);
            assert!(scan.openers.unreadable.is_empty());
            fs::remove_dir(roots.proc.join("7/fd")).unwrap_or_default();
        }
    }
}
