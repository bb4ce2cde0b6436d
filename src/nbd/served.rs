//! The export as the kernel got it at the connect of a device, read back from sysfs.

use nix::unistd::{SysconfVar, sysconf};

use super::block_size::{BlockSizes, Geometry};
use super::device::NbdDevice;
use super::difference::Difference;
use super::export::{Export, ExportFlags};
use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::NbdIndex;
use crate::kernel::{Devices, Roots, sysfs, worker};

/// The largest logical block size that the kernel accepts.
pub(crate) fn page_size() -> Result<u32> {
    let size = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    size.and_then(|size| u32::try_from(size).ok())
        .ok_or_else(|| Error::new(ErrorKind::Io, "the size of a page is not known"))
}

/// How many connections the kernel keeps for a device, each in a slot of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slots {
    pub(crate) count: usize,
    /// Whether there are no more than these.
    pub(crate) exact: bool,
}

/// What the queue of a connected device shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QueueFacts {
    /// The export as the kernel knows it: it keeps what it got when the device was connected,
    /// whatever a returning server announces. The name is not known.
    export: Export,
    /// Whether the kernel counts the disk's requests.
    pub(crate) counts_requests: bool,
}

impl QueueFacts {
    /// What the kernel got of an export.
    pub(crate) fn of_offer(export: &Export, geometry: Geometry, counts_requests: bool) -> Self {
        // The kernel shows neither of these.
        let unseen = ExportFlags::CAN_MULTI_CONN | ExportFlags::ROTATIONAL;
        let block_sizes = BlockSizes {
            minimum: geometry.block_size,
            preferred: geometry.block_size,
            maximum: export.maximum_payload(),
        };
        let export = Export {
            name: String::new(),
            size: geometry.size,
            flags: export.flags - unseen,
            block_sizes: Some(block_sizes),
        };
        Self {
            export,
            counts_requests,
        }
    }

    /// The same facts of the device with its present size, which is no attribute of the queue.
    ///
    /// # Errors
    /// Fails if sysfs cannot be read.
    pub(crate) fn with_size_of(mut self, device: &NbdDevice) -> Result<Self> {
        self.export.size = device.disk().size()?;
        Ok(self)
    }

    /// How `now`, which a server serves, differs from what the kernel got when the device was
    /// connected, as far as the kernel shows that.
    pub(crate) fn differences_of(&self, mut now: Export) -> Vec<Difference> {
        // The kernel keeps the block size of the connect, and only whole blocks of the
        // export.
        let block = self.export.block_sizes.unwrap_or_default().minimum;
        now.size -= now.size % u64::from(block.max(1));
        let mut differences = now.differences_from(&self.export);
        // sysfs shows neither the preferred size nor additional capabilities.
        differences.retain(|difference| {
            let harmless = matches!(
                difference,
                Difference::Flags { .. } | Difference::BlockSizes { .. }
            );
            !harmless || difference.prevents_reattach()
        });
        differences
    }
}

/// How many CPUs the kernel may have, from text like `0-3` or `0,2-5`.
fn processors(possible: &str) -> Option<usize> {
    let last = possible.trim().rsplit(['-', ',']).next()?;
    last.parse::<usize>().ok()?.checked_add(1)
}

impl NbdDevice {
    /// The indexes to try, lowest first: the unconnected ones, then the next index. This
    /// costs only one lookup for each device: there may be hundreds, and every attach does
    /// it.
    pub(crate) fn candidates(roots: &Roots) -> Result<Vec<NbdIndex>> {
        let mut indexes = Self::indexes(roots)?;
        let next = indexes
            .last()
            .map_or(0, |last| last.get().saturating_add(1));
        let block = roots.sysfs.join("block");
        indexes.retain(|index| !block.join(index.name()).join("pid").exists());
        indexes.extend(NbdIndex::new(next));
        Ok(indexes)
    }

    /// How many connections carry its I/O. The kernel creates one hardware queue for each
    /// (`drivers/block/nbd.c`, `nbd_start_device`), but no more queues than it may have
    /// CPUs (`block/blk-mq.c`, `blk_mq_update_nr_hw_queues`).
    pub fn connections(&self) -> Result<usize> {
        let queues = sysfs::names(&self.disk().dir().join("mq"))?;
        Ok(queues.len())
    }

    /// What sysfs reveals about how many connections the kernel keeps for the device.
    pub(crate) fn slots(&self, roots: &Roots) -> Result<Slots> {
        let count = self.connections()?.max(1);
        let possible = roots.sysfs.join("devices/system/cpu/possible");
        let possible = sysfs::read_if_there(&possible)?;
        let processors = possible.as_deref().and_then(processors);
        Ok(Slots {
            count,
            exact: processors.is_some_and(|processors| count < processors),
        })
    }

    /// The logical block size in bytes, which is the unit of partition tables. It **blocks** as
    /// [`read_queue_facts`](Self::read_queue_facts) does.
    fn block_size(&self) -> Result<u32> {
        sysfs::parse(&self.disk().dir().join("queue/logical_block_size"))
    }

    /// It **blocks** as [`read_queue_facts`](Self::read_queue_facts) does.
    ///
    /// # Errors
    /// `InUse` at stage `connect` if the device has another logical block size than
    /// `wanted`: the kernel keeps it until the device is disconnected.
    pub(crate) fn require_block_size(&self, wanted: u32) -> Result<()> {
        let found = self.block_size()?;
        if found == wanted {
            return Ok(());
        }
        let message = format!(
            "{} is attached with blocks of {found} bytes, and blocks of {wanted} bytes are \
             wanted: detach it first",
            self.index().name()
        );
        Err(Error::new(ErrorKind::InUse, message).at(Stage::Connect))
    }

    /// Makes the kernel send no request longer than `bytes`. If an earlier export left a
    /// lower limit on the index, this raises it to the driver's own.
    ///
    /// # Errors
    /// `TimedOut` at stage `connect`; by the errno of the write.
    pub(crate) fn limit_requests(&self, bytes: u32, deadline: Deadline) -> Result<()> {
        /// The limit of a new device in KiB (`drivers/block/nbd.c`, `nbd_dev_add`).
        const DRIVER_DEFAULT: u32 = 128;
        let attribute = self.disk().dir().join("queue/max_sectors_kb");
        let shown = attribute.clone();
        let now: u32 = worker::run(
            Stage::Connect,
            "the kernel to show the limit of the device's requests",
            deadline,
            || "max_sectors_kb is not shown".to_owned(),
            move || sysfs::parse(&shown),
        )?;
        let most = bytes / 1024;
        let wanted = now.clamp(most.min(DRIVER_DEFAULT), most);
        if now == wanted {
            return Ok(());
        }
        crash_point!(NbdToLimit);
        worker::run(
            Stage::Connect,
            "the kernel to limit the device's requests",
            deadline,
            || format!("max_sectors_kb={now}"),
            move || sysfs::write(&Devices::Kernel, &attribute, &wanted.to_string()),
        )?;
        crash_point!(NbdLimited);
        Ok(())
    }

    /// What the kernel shows of the export, and whether it counts the requests. It **blocks** while
    /// a process changes an attribute of the queue: that process waits for the requests in flight,
    /// and keeps a lock meanwhile (`block/blk-sysfs.c`, `queue_attr_store`, `queue_attr_show`).
    ///
    /// # Errors
    /// Fails if sysfs cannot be read.
    pub(crate) fn read_queue_facts(&self) -> Result<QueueFacts> {
        Ok(QueueFacts {
            export: self.read_served()?,
            counts_requests: self.counts_requests()?,
        })
    }

    fn read_served(&self) -> Result<Export> {
        let queue = |attribute: &str| self.disk().dir().join("queue").join(attribute);
        let number = |attribute: &str| sysfs::parse::<u64>(&queue(attribute));
        let mut flags = ExportFlags::HAS_FLAGS;
        flags.set(ExportFlags::READ_ONLY, self.disk().read_only()?);
        let flushes = sysfs::read(&queue("write_cache"))? == "write back";
        flags.set(ExportFlags::SEND_FLUSH, flushes);
        flags.set(ExportFlags::SEND_FUA, number("fua")? != 0);
        // Only both together show that the driver was told to trim. Until 5.18 the driver
        // keeps the largest discard when a device is disconnected (`drivers/block/nbd.c`,
        // `nbd_config_put`), and from 6.8 every queue has a granularity
        // (`block/blk-settings.c`).
        let trims = number("discard_max_bytes")? != 0 && number("discard_granularity")? != 0;
        flags.set(ExportFlags::SEND_TRIM, trims);
        let zeroes = number("write_zeroes_max_bytes")? != 0;
        flags.set(ExportFlags::SEND_WRITE_ZEROES, zeroes);

        let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let minimum = self.block_size()?;
        let longest = number("max_sectors_kb")?.saturating_mul(1024);
        Ok(Export {
            name: String::new(),
            size: self.disk().size()?,
            flags,
            block_sizes: Some(BlockSizes {
                minimum,
                preferred: minimum,
                maximum: narrow(longest),
            }),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_device_may_have_more_slots_than_queues_where_each_cpu_has_its_queue() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let (dir, cpus) = (
            roots.sysfs.join("block/nbd0"),
            roots.sysfs.join("devices/system/cpu"),
        );
        for dir in [dir.join("mq/0"), dir.join("mq/1"), cpus.clone()] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(dir.join("dev"), "43:0\n").unwrap();
        let index = NbdIndex::new(0).unwrap();
        let device = NbdDevice::find(&roots, index).unwrap().unwrap();
        for (possible, exact) in [("0-1\n", false), ("0-7\n", true), ("0,3\n", true)] {
            fs::write(cpus.join("possible"), possible).unwrap();
            let slots = Slots { count: 2, exact };
            assert_eq!(device.slots(&roots).unwrap(), slots, "{possible:?}");
        }
    }

    /// A connected device of 1 MiB, and the directory of its queue.
    pub(crate) fn connected(roots: &Roots) -> (NbdDevice, PathBuf) {
        let dir = roots.sysfs.join("block/nbd0");
        let queue = dir.join("queue");
        fs::create_dir_all(&queue).unwrap();
        for (attribute, value) in [
            ("dev", "43:0"),
            ("ro", "0"),
            ("size", "2048"),
            ("queue/write_cache", "write back"),
            ("queue/fua", "0"),
            ("queue/discard_max_bytes", "0"),
            ("queue/discard_granularity", "0"),
            ("queue/write_zeroes_max_bytes", "0"),
            ("queue/logical_block_size", "512"),
            ("queue/max_sectors_kb", "128"),
        ] {
            fs::write(dir.join(attribute), format!("{value}\n")).unwrap();
        }
        let index = NbdIndex::new(0).unwrap();
        (NbdDevice::find(roots, index).unwrap().unwrap(), queue)
    }

    #[test]
    fn an_index_that_was_used_before_shows_no_trim_of_a_server_that_has_none() {
        let root = tempfile::tempdir().unwrap();
        let (device, queue) = connected(&Roots::below(root.path()));
        // What each range of kernels shows for such a server, and for a server that
        // trims.
        for (max_bytes, granularity, trims) in [
            ("0", "0", false),
            // 5.10 to 5.18, from the second use of an index.
            ("2199023255040", "0", false),
            // From 6.8.
            ("0", "512", false),
            ("2199023255040", "512", true),
        ] {
            fs::write(queue.join("discard_max_bytes"), max_bytes).unwrap();
            fs::write(queue.join("discard_granularity"), granularity).unwrap();
            let flags = device.read_served().unwrap().flags;
            assert_eq!(
                flags.contains(ExportFlags::SEND_TRIM),
                trims,
                "discard_max_bytes={max_bytes} discard_granularity={granularity}"
            );
        }
    }

    #[test]
    fn an_attribute_that_the_kernel_does_not_show_costs_its_caller_the_deadline_alone() {
        let root = tempfile::tempdir().unwrap();
        let (device, queue) = connected(&Roots::below(root.path()));
        let attribute = queue.join("max_sectors_kb");
        fs::remove_file(&attribute).unwrap();
        // An open of this blocks until a writer comes.
        nix::unistd::mkfifo(&attribute, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let limit = Deadline::after(Duration::from_millis(20));
        let error = device.limit_requests(32 << 20, limit).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(error.stage(), Some(Stage::Connect), "{error}");
    }

    #[test]
    fn the_facts_of_an_offer_differ_from_an_export_as_those_that_the_kernel_shows() {
        let root = tempfile::tempdir().unwrap();
        let (device, _queue) = connected(&Roots::below(root.path()));
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::SEND_FLUSH;
        let export = |size, flags: ExportFlags| Export::new("a", size, flags.bits(), None).unwrap();
        let before = export((1 << 20) + 100, flags | ExportFlags::CAN_MULTI_CONN);
        let geometry = before.geometry(4096, None).unwrap();
        let offered = QueueFacts::of_offer(&before, geometry, true);
        let shown = device.read_queue_facts().unwrap();
        for (now, count) in [
            (export(1 << 20, flags), 0),
            (export((1 << 20) + 100, flags), 0),
            (export((1 << 20) + 512, flags), 1),
            (export(1 << 19, flags | ExportFlags::READ_ONLY), 2),
            (export(1 << 20, ExportFlags::HAS_FLAGS), 1),
        ] {
            let differences = offered.differences_of(now.clone());
            assert_eq!(differences.len(), count, "{differences:?}");
            assert_eq!(differences, shown.differences_of(now));
        }
    }

    #[test]
    fn the_devices_that_somebody_has_connected_are_no_candidates_and_the_next_is_one() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        for index in 0..4 {
            fs::create_dir_all(roots.sysfs.join(format!("block/nbd{index}"))).unwrap();
        }
        for connected in [0, 1, 3] {
            fs::write(roots.sysfs.join(format!("block/nbd{connected}/pid")), "1\n").unwrap();
        }
        let candidates = NbdDevice::candidates(&roots).unwrap();
        let numbers: Vec<u32> = candidates.iter().map(|index| index.get()).collect();
        assert_eq!(numbers, [2, 4]);
    }
}
