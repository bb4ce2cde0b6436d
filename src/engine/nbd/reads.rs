//! The reads that test whether NBD devices serve I/O: one of each device at a time. The
//! kernel holds the thread of a read until the device answers, and a device without a server
//! may never answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::id::NbdIndex;
use crate::kernel::Roots;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::worker::{self, Pending};
use crate::nbd::NbdDevice;

/// The devices that are being read.
#[derive(Debug, Default)]
pub(in crate::engine) struct NbdReads(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    under_way: Mutex<UnderWay>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct UnderWay {
    next: u64,
    /// The number of each device's read.
    reads: BTreeMap<NbdIndex, u64>,
}

impl NbdReads {
    /// The right to read a device; `None` if an earlier read has not returned by `deadline`.
    fn guard(&self, index: NbdIndex, deadline: Deadline) -> Option<ReadGuard> {
        let mut under_way = self.0.under_way.lock();
        while under_way.reads.contains_key(&index) {
            if deadline.has_passed() {
                return None;
            }
            self.0.ended.wait_for(&mut under_way, deadline.max_sleep());
        }
        let number = under_way.next;
        under_way.next += 1;
        under_way.reads.insert(index, number);
        let shared = Arc::clone(&self.0);
        Some(ReadGuard {
            shared,
            index,
            number,
        })
    }

    /// Starts a read of a device once an earlier one has returned; `None` if that has not
    /// returned by `deadline`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(in crate::engine) fn start<T: Send + 'static>(
        &self,
        device: &NbdDevice,
        roots: &Roots,
        deadline: Deadline,
        read: impl FnOnce(&BlockDevice, &Roots) -> Result<T> + Send + 'static,
    ) -> Result<Option<Pending<T>>> {
        let Some(guard) = self.guard(device.index(), deadline) else {
            return Ok(None);
        };
        let (disk, roots) = (device.disk().clone(), roots.clone());
        let call = move || {
            let _until_it_returns = guard;
            read(&disk, &roots)
        };
        worker::start_with_own_fd_table(Stage::Probe, call).map(Some)
    }

    /// How many reads have begun.
    #[cfg(test)]
    pub(in crate::engine) fn begun(&self) -> u64 {
        self.0.under_way.lock().next
    }

    /// Notes that the kernel took a new connection of the device. A read over an old one waits
    /// for its own timeout, and the next read need not wait for it.
    pub(in crate::engine) fn note_new_connection(&self, index: NbdIndex) {
        self.0.under_way.lock().reads.remove(&index);
        self.0.ended.notify_all();
    }
}

/// Held by the thread that reads.
struct ReadGuard {
    shared: Arc<Shared>,
    index: NbdIndex,
    number: u64,
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        let mut under_way = self.shared.under_way.lock();
        if under_way.reads.get(&self.index) == Some(&self.number) {
            under_way.reads.remove(&self.index);
        }
        drop(under_way);
        self.shared.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn index(number: u32) -> NbdIndex {
        NbdIndex::new(number).unwrap()
    }

    fn now() -> Deadline {
        Deadline::after(Duration::ZERO)
    }

    #[test]
    fn a_device_is_read_again_when_its_read_has_returned_and_others_do_not_wait_for_it() {
        let reads = NbdReads::default();
        let first = reads.guard(index(0), now()).expect("nobody reads it");
        assert!(reads.guard(index(0), now()).is_none());
        assert!(reads.guard(index(1), now()).is_some());
        let soon = Deadline::after(Duration::from_secs(60));
        let later = std::thread::scope(|scope| {
            let later = scope.spawn(|| reads.guard(index(0), soon));
            drop(first);
            later.join().unwrap()
        });
        assert!(later.is_some());
    }

    #[test]
    fn a_read_over_an_old_connection_does_not_hold_up_one_over_the_new_nor_end_its_turn() {
        let reads = NbdReads::default();
        let old = reads.guard(index(0), now()).unwrap();
        reads.note_new_connection(index(0));
        let new = reads
            .guard(index(0), now())
            .expect("it has a new connection");
        drop(old);
        assert!(reads.guard(index(0), now()).is_none());
        drop(new);
        assert!(reads.guard(index(0), now()).is_some());
    }
}
