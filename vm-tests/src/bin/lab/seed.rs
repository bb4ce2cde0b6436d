//! The number by which a run chooses the kernel of each test, the part of each sweep, and the
//! random actions of tests.

use std::env;
use std::process::Command;
use std::sync::LazyLock;
use std::time::SystemTime;

use anyhow::{Result, bail};

use crate::programs::package_directory;

/// `LUNBD_VM_SEED`, or the number of commits, or the clock if git does not know the number, as in a
/// shallow clone. With the number of commits, two runs of one commit do the same. How many runs with
/// consecutive seeds take all parts of a sweep is in `src/guest/rotation.rs`. Where each run follows
/// as many commits, such as five, the same parts may come each time.
pub(crate) static SEED: LazyLock<u64> = LazyLock::new(|| {
    given()
        .ok()
        .flatten()
        .or_else(commits)
        .unwrap_or_else(clock)
});

/// The seed that `LUNBD_VM_SEED` names.
pub(crate) fn given() -> Result<Option<u64>> {
    match env::var("LUNBD_VM_SEED") {
        Ok(seed) if !seed.is_empty() => match seed.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => bail!("LUNBD_VM_SEED={seed}: expected a number"),
        },
        _ => Ok(None),
    }
}

/// The number of commits. A shallow clone does not have all of them.
fn commits() -> Option<u64> {
    let is_shallow = git(&["rev-parse", "--is-shallow-repository"])?;
    (is_shallow == "false")
        .then(|| git(&["rev-list", "--count", "HEAD"]))?
        .and_then(|count| count.parse().ok())
}

fn git(arguments: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    git.args(arguments).current_dir(package_directory());
    let output = git.output().ok()?.stdout;
    Some(String::from_utf8(output).ok()?.trim().to_owned())
}

fn clock() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(1, |now| now.as_secs())
}
