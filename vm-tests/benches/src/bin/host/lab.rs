//! The lab: it boots the machine in which a program of this package runs.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// What the lab writes about a boot.
#[derive(Debug, Deserialize)]
pub(crate) struct Booted<T> {
    pub(crate) accelerator: String,
    /// The program's result.
    pub(crate) result: T,
}

/// Has the lab run `program` in a machine and print its output.
///
/// The calling thread must live as long as the lab, because the lab ends with it.
pub(crate) fn run<T: DeserializeOwned>(program: &[String]) -> Result<Booted<T>> {
    let result = kept(&format!("result-{}.json", process::id()))?;
    let mut lab = Command::new("setpriv");
    lab.args(["--pdeathsig", "KILL", "--"]).arg(cargo());
    lab.args([
        "run",
        "--package",
        "vm-tests",
        "--bin",
        "lab",
        "--",
        "story",
    ]);
    lab.args(["--package", env!("CARGO_PKG_NAME"), "--result"]);
    lab.arg(&result).args(program);
    let status = lab.status().context("setpriv (util-linux)")?;
    if !status.success() {
        bail!("the lab ended with {status}");
    }
    let text = fs::read(&result).with_context(|| result.display().to_string())?;
    fs::remove_file(&result)?;
    serde_json::from_slice(&text).context("the figures of the guest")
}

/// The path of cargo, which cargo sets for the program that it runs.
pub(crate) fn cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// A file that stays until `cargo clean`.
pub(crate) fn kept(name: &str) -> Result<PathBuf> {
    let directory = target_directory()?.join("lunbd-vm");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    Ok(directory.join(name))
}

/// cargo puts a program into `TARGET/PROFILE/`.
pub(crate) fn target_directory() -> Result<PathBuf> {
    let program = env::current_exe().context("the path of this program")?;
    let target = program.ancestors().nth(2).map(Path::to_owned);
    target.context("this program is not in a target directory")
}
