//! Waits until udev has handled the removal of a block device.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::mode::Mode;
use super::settle::{devpath, last_seen};
use super::watch::Watch;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result, Stage};
use crate::id::DevNo;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, udev_record};

/// A block device that is about to be removed, and the links that udev has made to
/// it.
#[derive(Debug)]
pub(crate) struct RemovedDevice {
    devpath: String,
    devno: DevNo,
    node: PathBuf,
    links: Vec<PathBuf>,
}

impl RemovedDevice {
    /// Call this before the device is removed.
    pub(crate) fn of(roots: &Roots, disk: &BlockDevice) -> Result<Self> {
        let links = udev_record::read_links(roots, disk.devno())?;
        Ok(Self {
            devpath: devpath(roots, disk.dir())?,
            devno: disk.devno(),
            node: disk.node(roots),
            links: links.iter().map(|link| roots.dev.join(link)).collect(),
        })
    }

    /// Whether a link still leads to the device's name. A link that another device
    /// also has leads to that device now.
    fn has_links(&self) -> bool {
        let leads_here = |link: &PathBuf| {
            let to = fs::read_link(link);
            to.is_ok_and(|to| to.file_name() == self.node.file_name())
        };
        self.links.iter().any(leads_here)
    }
}

/// Waits until udev has handled the removal of a block device. Its links are gone
/// then, and a late removal cannot affect the next device of that name.
///
/// # Errors
/// `TimedOut` at stage `settle`: the device is gone and udev has not handled that
/// yet.
pub(crate) fn settle_removal(
    watch: &mut Watch,
    mode: Mode,
    roots: &Roots,
    removed_device: &RemovedDevice,
    deadline: Deadline,
) -> Result<()> {
    /// How long to wait for the kernel's `remove` event. The kernel sends it before
    /// the device is gone from sysfs, so the caller has it already, or took its
    /// watch later.
    const REMOVE_EVENT_TIMEOUT: Duration = Duration::from_secs(1);
    if mode != Mode::Udev {
        return Ok(());
    }
    let RemovedDevice { devpath, devno, .. } = removed_device;
    let event_limit = Deadline::after(REMOVE_EVENT_TIMEOUT);
    let record = roots.run.join(format!("udev/data/b{devno}"));
    let successor = roots.sysfs.join(format!("dev/block/{devno}"));
    let mut backoff = Backoff::for_kernel_state();
    watch.drain();
    let mut missed = false;
    loop {
        missed |= watch.take_missed();
        let seen = watch.seen_events().of(devpath);
        // If the next device already has the number, ours was removed before it.
        // Otherwise a removal that an `add` followed was of an earlier device.
        let seen = seen.filter(|seen| seen.gone || successor.exists());
        let removed = seen.and_then(|seen| seen.removed);
        let handled = seen.and_then(|seen| seen.udev.as_ref());
        if let (Some(removed), Some(handled)) = (removed, handled)
            && handled.seqnum >= removed
        {
            return Ok(());
        }
        missed |= removed.is_none() && event_limit.has_passed();
        // The event is lost. udevd deletes the record when it begins with the
        // removal, and the links when its rules have run (`udev-event.c`,
        // `event_execute_rules_on_remove`). If a new device has the number, udevd
        // handled the removal before it.
        if missed && (successor.exists() || !(record.exists() || removed_device.has_links())) {
            return Ok(());
        }
        let limit = if missed {
            deadline.at_most(backoff.pause())
        } else if removed.is_none() {
            deadline.at_most(event_limit.remaining())
        } else {
            deadline
        };
        if watch.next(limit).is_none() && deadline.has_passed() {
            let what = format!("udev to handle the removal of {devpath}");
            let error = Error::timed_out(Stage::Settle, deadline, &what);
            let seen = last_seen(watch, devpath);
            return Err(error.with_last_seen(format!("the device is gone; {seen}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::Arc;

    use super::*;
    use crate::error::ErrorKind;
    use crate::uevent::dispatch::{Dispatch, Interest};
    use crate::uevent::subscription::Subscription;

    #[test]
    fn a_removal_that_was_announced_before_the_watch_is_handled_when_udevs_record_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let devno: DevNo = "8:16".parse().unwrap();
        let record = roots.run.join("udev/data/b8:16");
        fs::create_dir_all(record.parent().unwrap()).unwrap();
        fs::write(&record, "S:disk/by-id/scsi-3600\n").unwrap();
        let dispatch = Arc::<Dispatch>::default();
        let interest = Interest::Component("2:0:0:1".into());
        let mut watch = Watch::new(Subscription::new(&dispatch, interest));
        let mut settle = |limit: u64| {
            let leaving = RemovedDevice {
                devpath: "/devices/x/2:0:0:1/block/sdb".to_owned(),
                devno,
                node: roots.dev.join("sdb"),
                links: Vec::new(),
            };
            let deadline = Deadline::after(Duration::from_secs(limit));
            settle_removal(&mut watch, Mode::Udev, &roots, &leaving, deadline)
        };
        let error = settle(2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        fs::remove_file(&record).unwrap();
        settle(60).unwrap();
    }

    #[test]
    fn a_disk_has_left_when_no_link_of_its_record_leads_to_its_name() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let dir = roots.sysfs.join("devices/block/sda");
        let (data, by_id) = (roots.run.join("udev/data"), roots.dev.join("disk/by-id"));
        for folder in [&dir, &data, &by_id] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(dir.join("dev"), "8:0\n").unwrap();
        fs::write(data.join("b8:0"), "S:disk/by-id/one\nS:disk/by-id/two\n").unwrap();
        let disk = BlockDevice::at(&dir).unwrap().unwrap();
        let leaving = RemovedDevice::of(&roots, &disk).unwrap();
        assert!(!leaving.has_links());
        for (link, to) in [("one", "../../sda"), ("two", "../../sdb")] {
            symlink(to, by_id.join(link)).unwrap();
        }
        fs::remove_file(data.join("b8:0")).unwrap();
        assert!(leaving.has_links());
        fs::remove_file(by_id.join("one")).unwrap();
        assert!(!leaving.has_links());
    }
}
