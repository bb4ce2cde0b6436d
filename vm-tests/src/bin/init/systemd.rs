//! A boot in which systemd is pid 1 and the work is one of its services.

use std::convert::Infallible;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

const SYSTEMD: &str = "/lib/systemd/systemd";
const SERVICE: &str = "lunbd-vm.service";
/// The whole job is one start of the service, which has no time limit.
const UNIT: &str = "\
[Service]
Type=oneshot
ExecStart=/init
TimeoutStartSec=infinity
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
";

pub(crate) fn is_installed() -> bool {
    Path::new(SYSTEMD).exists()
}

/// Returns only if it fails.
pub(crate) fn become_pid_1() -> Result<Infallible> {
    let path = format!("/etc/systemd/system/{SERVICE}");
    fs::create_dir_all("/etc/systemd/system").context("systemd's directory")?;
    fs::write(&path, UNIT).context(path)?;
    let failed = Command::new(SYSTEMD)
        .arg(format!("--unit={SERVICE}"))
        .args([
            "--show-status=no",
            "--log-target=console",
            "--log-level=warning",
        ])
        .exec();
    Err(failed).context(SYSTEMD)
}
