//! A look at the users of disks that are about to be flushed and removed.

use std::time::{Duration, Instant};

use super::{Act, Extent, NotLookedAt, Users};
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::error::Result;
use crate::kernel::blockdev::BlockDevice;

/// A look that is older than this no longer counts: a process that began to write during a
/// long flush would lose its data.
const OLD: Duration = Duration::from_secs(1);

/// Disks and the users that they had at some moment.
pub(in crate::engine) struct Looked {
    at: Instant,
    disks: Vec<BlockDevice>,
    users: Vec<Users>,
}

impl Looked {
    /// Looks at the users of these disks.
    ///
    /// # Errors
    /// Those of [`Engine::users_of_each`].
    pub(in crate::engine) fn at(
        engine: &Engine,
        disks: &[&BlockDevice],
        extent: Extent,
        deadline: Deadline,
    ) -> Result<Self> {
        let users = match disks {
            [] => Vec::new(),
            disks => engine.users_of_each(disks, extent, deadline)?,
        };
        Ok(Self {
            at: Instant::now(),
            disks: disks.iter().map(|&disk| disk.clone()).collect(),
            users,
        })
    }

    /// # Errors
    /// `InUse`, naming the users of a disk that would lose what they write.
    pub(in crate::engine) fn refuse_writers(&self, engine: &Engine) -> Result<()> {
        let mut each = self.disks.iter().zip(&self.users);
        each.try_for_each(|(disk, users)| users.refuse_busy(engine.roots(), disk, Act::TakeFlushed))
    }

    /// Looks and refuses once more, under the claims, if the first look is old.
    ///
    /// # Errors
    /// Those of [`Looked::at`] and [`Looked::refuse_writers`].
    pub(in crate::engine) fn again_if_old(
        &self,
        engine: &Engine,
        deadline: Deadline,
    ) -> Result<()> {
        if self.at.elapsed() < OLD {
            return Ok(());
        }
        let disks: Vec<&BlockDevice> = self.disks.iter().collect();
        let again = Self::at(engine, &disks, Extent::BesideClaim, deadline)?;
        again.refuse_writers(engine)
    }

    /// The places where unseen users may be.
    pub(in crate::engine) fn not_looked_at(&self) -> Vec<NotLookedAt> {
        let first = self.users.first();
        first.map_or_else(Vec::new, |users| users.not_looked_at.clone())
    }
}
