//! Unpacks Debian's packages. It runs no maintainer script and needs no root.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Unpacks `packages` into `tree`, a new directory with a merged `/usr`.
pub(crate) fn unpack(packages: &[PathBuf], tree: &Path) -> Result<()> {
    for name in ["bin", "lib", "lib64", "sbin"] {
        let merged = Path::new("usr").join(name);
        fs::create_dir_all(tree.join(&merged))?;
        symlink(merged, tree.join(name))?;
    }
    for package in packages {
        unpack_one(package, tree).with_context(|| package.display().to_string())?;
    }
    Ok(())
}

fn unpack_one(package: &Path, tree: &Path) -> Result<()> {
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.arg("--fsys-tarfile").arg(package);
    let mut dpkg = dpkg.stdout(Stdio::piped()).spawn().context("dpkg-deb")?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--keep-directory-symlink", "--no-same-owner"]);
    tar.arg("--directory").arg(tree);
    tar.stdin(dpkg.stdout.take().context("dpkg-deb's output")?);
    let unpacked = tar.status().context("tar")?;
    if !dpkg.wait()?.success() || !unpacked.success() {
        bail!("it cannot be unpacked");
    }
    Ok(())
}
