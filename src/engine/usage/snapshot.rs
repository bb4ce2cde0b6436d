//! The users of disks that are about to be flushed and removed, at one moment.

use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::usage::{Extent, NotLookedAt, Removal, Users, users_of_each};
use crate::error::Result;
use crate::kernel::blockdev::BlockDevice;

/// A snapshot that is older than this no longer counts: a process that began to write during
/// a long flush would lose its data.
const MAX_AGE: Duration = Duration::from_millis(100);

/// Disks and the users that they had at some moment.
pub(in crate::engine) struct UsageSnapshot {
    taken_at: Instant,
    disks: Vec<BlockDevice>,
    users: Vec<Users>,
}

impl UsageSnapshot {
    /// Reads the users of these disks.
    ///
    /// # Errors
    /// Those of [`users_of_each`].
    pub(in crate::engine) fn take(
        engine: &Engine,
        disks: &[&BlockDevice],
        extent: Extent,
        deadline: Deadline,
    ) -> Result<Self> {
        let users = match disks {
            [] => Vec::new(),
            disks => users_of_each(engine, disks, extent, deadline)?,
        };
        Ok(Self {
            taken_at: Instant::now(),
            disks: disks.iter().map(|&disk| disk.clone()).collect(),
            users,
        })
    }

    /// # Errors
    /// `InUse`, naming the users of a disk that would lose what they write.
    pub(in crate::engine) fn refuse_writers(&self, engine: &Engine) -> Result<()> {
        let mut each = self.disks.iter().zip(&self.users);
        each.try_for_each(|(disk, users)| {
            users.refuse_busy(engine.roots(), disk, Removal::FlushedDisk)
        })
    }

    /// Reads the users again under the claims and refuses writers, if this snapshot is old.
    ///
    /// # Errors
    /// Those of [`UsageSnapshot::take`] and [`UsageSnapshot::refuse_writers`].
    pub(in crate::engine) fn recheck_if_old(
        &self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<()> {
        if self.taken_at.elapsed() < MAX_AGE {
            return Ok(());
        }
        let disks: Vec<&BlockDevice> = self.disks.iter().collect();
        let again = Self::take(engine, &disks, Extent::NotExcludedByClaim, deadline)?;
        again.refuse_writers(engine)
    }

    /// The places where unseen users may be.
    pub(in crate::engine) fn not_looked_at(&self) -> Vec<NotLookedAt> {
        let first = self.users.first();
        first.map_or_else(Vec::new, |users| users.not_looked_at.clone())
    }
}
