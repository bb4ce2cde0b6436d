//! Warns in one line if a machine lacks libudev's headers. The crate that links
//! libudev needs them, and its panic is long and names no package. Cargo builds
//! this crate before it.

use std::env;
use std::process::{Command, Stdio};

#[allow(clippy::disallowed_methods, reason = "a build may ask pkg-config")]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let pkg_config = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let found = Command::new(pkg_config)
        .args(["--exists", "libudev"])
        .stderr(Stdio::null())
        .status();
    // Only warn, never fail: a cross build may find libudev elsewhere.
    if !found.is_ok_and(|status| status.success()) {
        println!(
            "cargo::warning=libudev was not found; on Debian: apt-get install libudev-dev pkg-config"
        );
        // This path never exists, so the next build looks for libudev again.
        println!("cargo::rerun-if-changed=libudev-was-not-found");
    }
}
