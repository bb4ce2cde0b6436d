//! The content of a device, as far as it is known without a request to the server.

use super::content;
use super::device::NbdDevice;
use crate::error::{Error, ErrorKind, Result};
use crate::id::ContentName;
use crate::kernel::{Roots, sysfs, udev_record};

/// The names that were read from a device, and its write counter at that time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KnownContent {
    /// The names of the content.
    pub(crate) names: Vec<ContentName>,
    /// How many write and discard requests the kernel had completed.
    pub(crate) written: u64,
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
    /// (`Documentation/admin-guide/iostats.rst`, fields 5 and 12).
    pub(crate) fn written(&self) -> Result<u64> {
        let counters = sysfs::read(&self.disk().dir().join("stat"))?;
        let field = |place: usize| counters.split_whitespace().nth(place)?.parse::<u64>().ok();
        let count = field(4).zip(field(11));
        let count = count.map(|(writes, discards)| writes.saturating_add(discards));
        count.ok_or_else(|| {
            let message = format!("{} has odd counters: {counters:?}", self.index().name());
            Error::new(ErrorKind::Io, message)
        })
    }

    /// Whether the kernel has accepted write requests that are not completed.
    pub(crate) fn has_writes_in_flight(&self) -> Result<bool> {
        let counts = sysfs::read(&self.disk().dir().join("inflight"))?;
        Ok(counts.split_whitespace().nth(1) != Some("0"))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::id::NbdIndex;

    #[test]
    fn what_was_written_is_counted_with_what_was_discarded() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let dir = roots.sysfs.join("block/nbd0");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("dev"), "43:0\n").unwrap();
        let device = NbdDevice::find(&roots, NbdIndex::new(0).unwrap());
        let device = device.unwrap().unwrap();
        // Linux 6.1 shows this text.
        let stat = "  95  0  3360  4  70  1  560  9  0  16  14  5  0  2048  1  3  2\n";
        fs::write(dir.join("stat"), stat).unwrap();
        assert_eq!(device.written().unwrap(), 75);
        fs::write(dir.join("stat"), "1 2\n").unwrap();
        assert!(device.written().is_err());
        for (counts, has_some) in [("       0        0\n", false), ("0 2\n", true)] {
            fs::write(dir.join("inflight"), counts).unwrap();
            assert_eq!(device.has_writes_in_flight().unwrap(), has_some);
        }
    }
}
