//! The directory with the initramfs images and the logs of one run.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A directory below the build's own, so that `cargo clean` removes it.
pub(crate) struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// Makes the directory of this run and removes those of ended runs: the logs of a run stay
    /// until the next one.
    pub(crate) fn create() -> Result<Self> {
        let all = target_directory()?.join("lunbd-vm");
        fs::create_dir_all(&all).with_context(|| all.display().to_string())?;
        for entry in fs::read_dir(&all)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let of_a_run = name.bytes().all(|byte| byte.is_ascii_digit());
            if of_a_run && !Path::new("/proc").join(&name).exists() {
                // Another run may be removing it too.
                let _gone = fs::remove_dir_all(entry.path());
            }
        }
        let path = all.join(std::process::id().to_string());
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(Self { path })
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a log that stays after the run, and returns its path.
    pub(crate) fn keep_log(&self, name: &str, content: &str) -> Result<PathBuf> {
        let file: String = name
            .chars()
            .map(|c| {
                if c.is_alphanumeric() || "._-".contains(c) {
                    c
                } else {
                    '_'
                }
            })
            .collect();
        let path = self.join(&format!("{file}.log"));
        fs::write(&path, content).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// cargo puts a program into `TARGET/PROFILE/`.
pub(crate) fn target_directory() -> Result<PathBuf> {
    let program = env::current_exe().context("the lab's own path")?;
    let target = program
        .ancestors()
        .nth(2)
        .context("the lab is not in a target directory")?;
    Ok(target.to_owned())
}
