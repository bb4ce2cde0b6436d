//! The content of a device, as far as it is known without a request to the server.

use super::content;
use super::device::NbdDevice;
use super::first_bytes::{Content, FirstBytes};
use crate::error::{Error, ErrorKind, Result};
use crate::id::ContentName;
use crate::kernel::{Roots, sysfs, udev_record};

/// What was read of a volume, and the write counter of its device at that time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KnownContent {
    pub(crate) first: FirstBytes,
    /// How many write and discard requests the kernel had completed; `None` if it did not
    /// count.
    pub(crate) written: Option<u64>,
}

impl KnownContent {
    /// The content of a device to which this one was served, with its write counter; `None` if
    /// it was not read.
    pub(crate) fn of(served: Content, written: Option<u64>) -> Option<Self> {
        match served {
            Content::Read(first) => Some(Self { first, written }),
            Content::Unread(_) => None,
        }
    }
}

impl NbdDevice {
    /// The names of its content as udev last read them: when it was connected, or when a
    /// process that had it open for writing closed it. `None` if udev has no record.
    ///
    /// # Errors
    /// Fails if the record cannot be read.
    pub fn content_by_udev(&self, roots: &Roots) -> Result<Option<Vec<ContentName>>> {
        let properties = udev_record::read_properties(roots, self.disk().devno())?;
        Ok(properties.map(|properties| content::names_by_udev(&properties)))
    }

    /// How many write and discard requests the kernel has completed since the disk
    /// appeared. The counters continue from one connection to the next
    /// (`Documentation/admin-guide/iostats.rst`, fields 5 and 12). `None` if the kernel does
    /// not count the requests of the disk, as [`QueueFacts`](super::QueueFacts) say.
    pub(crate) fn written(&self, counts_requests: bool) -> Result<Option<u64>> {
        if !counts_requests {
            return Ok(None);
        }
        let counters = sysfs::read(&self.disk().dir().join("stat"))?;
        let field = |place: usize| counters.split_whitespace().nth(place)?.parse::<u64>().ok();
        let count = field(4).zip(field(11));
        let count = count.map(|(writes, discards)| writes.saturating_add(discards));
        count.map(Some).ok_or_else(|| {
            let message = format!("{} has odd counters: {counters:?}", self.index().name());
            Error::new(ErrorKind::Io, message)
        })
    }

    /// Whether the kernel may have accepted write requests that are not completed: those
    /// that it counts, or any if it does not count.
    pub(crate) fn may_have_writes_in_flight(&self, counts_requests: bool) -> Result<bool> {
        if !counts_requests {
            return Ok(true);
        }
        let counts = sysfs::read(&self.disk().dir().join("inflight"))?;
        Ok(counts.split_whitespace().nth(1) != Some("0"))
    }

    /// Whether the kernel counts the disk's requests, in `stat` and in `inflight`
    /// (`Documentation/ABI/stable/sysfs-block`, `queue/iostats`; `block/blk-mq.c`,
    /// `blk_mq_check_inflight`). It **blocks** as [`read_queue_facts`](Self::read_queue_facts) does.
    pub(crate) fn counts_requests(&self) -> Result<bool> {
        let shown = sysfs::read_if_there(&self.disk().dir().join("queue/iostats"))?;
        Ok(shown.is_some_and(|shown| shown.trim() == "1"))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::id::NbdIndex;

    #[test]
    fn writes_and_discards_are_counted_unless_the_kernel_counts_no_request() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let dir = roots.sysfs.join("block/nbd0");
        fs::create_dir_all(dir.join("queue")).unwrap();
        fs::write(dir.join("dev"), "43:0\n").unwrap();
        let device = NbdDevice::find(&roots, NbdIndex::new(0).unwrap());
        let device = device.unwrap().unwrap();
        // Linux 6.1 shows this text.
        let stat = "  95  0  3360  4  70  1  560  9  0  16  14  5  0  2048  1  3  2\n";
        fs::write(dir.join("stat"), stat).unwrap();
        let counting = dir.join("queue/iostats");
        for (counts, expected) in [(None, None), (Some("0\n"), None), (Some("1\n"), Some(75))] {
            if let Some(counts) = counts {
                fs::write(&counting, counts).unwrap();
            }
            let counts_requests = device.counts_requests().unwrap();
            let written = device.written(counts_requests).unwrap();
            assert_eq!(written, expected, "{counts:?}");
        }
        fs::write(dir.join("stat"), "1 2\n").unwrap();
        assert!(device.written(true).is_err());
        for (counts, has_some) in [("       0        0\n", false), ("0 2\n", true)] {
            fs::write(dir.join("inflight"), counts).unwrap();
            assert_eq!(device.may_have_writes_in_flight(true).unwrap(), has_some);
        }
        fs::write(dir.join("inflight"), "0 0\n").unwrap();
        assert!(device.may_have_writes_in_flight(false).unwrap());
    }
}
