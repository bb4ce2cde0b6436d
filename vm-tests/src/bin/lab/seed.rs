//! The number by which a run chooses the kernel of each test, the part of each sweep, and the
//! random actions of tests.

use std::process::Command;
use std::sync::LazyLock;
use std::time::SystemTime;

use crate::programs::package_directory;

/// `LUNBD_VM_SEED`, or the number of commits, or the clock if git has no answer. Two runs of
/// one commit do the same, and five commits in a row take all parts of a sweep.
pub(crate) static SEED: LazyLock<u64> = LazyLock::new(|| {
    let given = std::env::var("LUNBD_VM_SEED").ok();
    given
        .and_then(|seed| seed.parse().ok())
        .or_else(commits)
        .unwrap_or_else(clock)
});

fn commits() -> Option<u64> {
    let mut git = Command::new("git");
    git.args(["rev-list", "--count", "HEAD"]);
    let counted = git.current_dir(package_directory()).output().ok()?;
    let count = String::from_utf8(counted.stdout).ok()?;
    count.trim().parse().ok()
}

fn clock() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(1, |now| now.as_secs())
}
