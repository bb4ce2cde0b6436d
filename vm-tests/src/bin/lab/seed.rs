//! The number by which a run chooses: the kernel of each test, the part of each sweep,
//! and what tests of chance do.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::SystemTime;

use anyhow::{Context, Result};

use crate::cache;

/// `LUNBD_VM_SEED`, or the number after the last whole run's that passed: five such runs
/// in a row take all parts of a sweep, and a run that failed is repeated as it was.
pub(crate) static SEED: LazyLock<u64> = LazyLock::new(|| {
    let given = std::env::var("LUNBD_VM_SEED").ok();
    given
        .and_then(|seed| seed.parse().ok())
        .or_else(|| after(&file()?))
        .unwrap_or_else(clock)
});

/// Notes that a whole run with this seed has passed.
pub(crate) fn passed() -> Result<()> {
    let file = file().context("no directory for the seed")?;
    fs::write(&file, SEED.to_string()).with_context(|| file.display().to_string())
}

fn file() -> Option<PathBuf> {
    Some(cache::directory().ok()?.join("seed"))
}

fn after(file: &Path) -> Option<u64> {
    let last = fs::read_to_string(file).ok()?;
    Some(last.trim().parse::<u64>().ok()?.wrapping_add(1))
}

fn clock() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(1, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_the_number_after_the_one_that_passed() {
        let file = std::env::temp_dir().join(format!("lunbd-seed-{}", std::process::id()));
        assert_eq!(after(&file), None);
        fs::write(&file, "41\n").unwrap();
        let next = after(&file);
        fs::write(&file, "no number").unwrap();
        let unreadable = after(&file);
        fs::remove_file(&file).unwrap();
        assert_eq!((next, unreadable), (Some(42), None));
    }
}
