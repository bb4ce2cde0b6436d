//! The waits at the end of a SCSI detach: for multipathd, and for other processes that remove
//! devices.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::call::CallContext;
use crate::engine::detach::run::DetachRun;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::multipath::Daemon;
use crate::scsi::ScsiDevice;

/// How long to wait for devices that other processes are removing and whose unit is
/// unknown. A host that hangs must not delay the others.
const REMOVALS_LIMIT: Duration = Duration::from_secs(2);

impl DetachRun<'_> {
    /// Waits until multipathd itself reports that it knows none of the paths.
    pub(super) fn wait_until_forgotten(&mut self, call: &mut CallContext) -> Result<()> {
        let deadline = call.deadline;
        let Some(daemon) = &self.daemon else {
            return Ok(());
        };
        call.enter(Stage::Forget);
        for path in &mut self.receipt.paths {
            let Some(name) = path.node.as_ref().and_then(|node| node.file_name()) else {
                continue;
            };
            let name = name.to_string_lossy().into_owned();
            let mut pauses = Backoff::new(Duration::from_millis(2), Duration::from_millis(200));
            path.forgotten = Some(false);
            // A new disk of the same name is not this path.
            let successor = self.engine.roots().sysfs.join("block").join(&name);
            let is_known = || match daemon.knows_path(&name, deadline) {
                // multipathd has ended, and so knows no path, or is being restarted.
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    Ok(Daemon::find(self.engine.roots())?.is_some())
                }
                known => known,
            };
            while !successor.exists() && is_known()? {
                if deadline.has_passed() {
                    let what = format!("multipathd to forget {name} ({})", path.hctl);
                    let error = Error::timed_out(Stage::Forget, deadline, &what);
                    return Err(error.with_last_seen("the path is gone from the kernel"));
                }
                self.maps.next(deadline.at_most(pauses.pause()));
            }
            path.forgotten = Some(true);
        }
        Ok(())
    }

    /// Waits briefly for devices that another process is removing: each may be a path of
    /// the unit whose last write is still to come. Returns a doubt for each that is not
    /// gone.
    pub(super) fn wait_for_removals(&mut self, deadline: Deadline) -> Result<Vec<String>> {
        let limit = deadline.at_most(REMOVALS_LIMIT);
        let mut pauses = Backoff::for_kernel_state();
        let (roots, scheduler) = (self.engine.roots(), &self.engine.scheduler);
        let mut being_removed = ScsiDevice::being_removed(roots)?;
        loop {
            being_removed.retain(|device| {
                // A device that this process works on belongs to another unit, since this
                // unit is locked by this call.
                let is_of_another = scheduler.is_at_work_on(device.hctl());
                device.is_there() && !device.is_on_bus(roots) && !is_of_another
            });
            if being_removed.is_empty() || limit.has_passed() {
                break;
            }
            self.maps.next(limit.at_most(pauses.pause()));
        }
        let doubt = |device: &ScsiDevice| {
            let hctl = device.hctl();
            format!("{hctl}, which may be a path of it, is still being removed")
        };
        Ok(being_removed.iter().map(doubt).collect())
    }
}
