//! Says in one line what a machine without libudev's headers lacks. The crate
//! that links libudev needs them, and its panic is long and names no package;
//! this crate is built before it.

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
    // A word of help, never a refusal: a cross build may be told elsewhere.
    if !found.is_ok_and(|status| status.success()) {
        println!(
            "cargo::warning=libudev was not found; on Debian: apt-get install libudev-dev pkg-config"
        );
        // A path that is never there: it is looked for again at the next build.
        println!("cargo::rerun-if-changed=libudev-was-not-found");
    }
}
