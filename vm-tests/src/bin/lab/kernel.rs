//! Debian's kernels, by series. The lab unpacks their packages and never installs them.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::apt::Archive;
use crate::cache::{Cache, Entry};
use crate::debian::Mirrors;
use crate::step::step;
use crate::{bzimage, modules, package};

/// A kernel series that one Debian release follows, and the userland above it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Series {
    /// bullseye's.
    V5_10,
    /// bookworm's.
    V6_1,
    /// trixie's.
    V6_12,
    /// sid's current one.
    Newest,
    /// The same kernel below sid's own userland. The others have that of this machine's release,
    /// or that of `LUNBD_VM_USERLAND`.
    Sid,
}

impl Series {
    /// Those of a default run.
    pub(crate) const OLD_AND_NEW: [Self; 2] = [Self::V6_1, Self::Newest];
    /// Those of `--all`.
    pub(crate) const WITH_SIDS_USERLAND: [Self; 3] = [Self::V6_1, Self::Newest, Self::Sid];
    /// Those of `--all-kernels`.
    pub(crate) const EACH_KERNEL: [Self; 4] = [Self::V6_1, Self::Newest, Self::V5_10, Self::V6_12];

    /// The series that `LUNBD_VM_KERNEL` selects, or else these.
    pub(crate) fn wanted(otherwise: &[Self]) -> Result<Vec<Self>> {
        match env::var("LUNBD_VM_KERNEL") {
            Ok(name) if !name.is_empty() => {
                eprintln!("LUNBD_VM_KERNEL={name}: the only kernel of this run");
                Ok(vec![Self::parse(&name)?])
            }
            _ => Ok(otherwise.to_vec()),
        }
    }

    fn parse(name: &str) -> Result<Self> {
        let mut all = Self::EACH_KERNEL.into_iter().chain([Self::Sid]);
        match all.find(|series| series.to_string() == name) {
            Some(series) => Ok(series),
            None => bail!("LUNBD_VM_KERNEL={name}: expected 5.10, 6.1, 6.12, newest or sid"),
        }
    }

    /// The series of its kernel.
    pub(crate) fn kernel(self) -> Self {
        match self {
            Self::Sid => Self::Newest,
            own => own,
        }
    }

    /// Whether a line of a list is about this series.
    pub(crate) fn is_named(self, name: &str) -> bool {
        name == "*" || name == self.to_string() || name == self.kernel().to_string()
    }

    /// The release of its kernel.
    fn codename(self) -> &'static str {
        match self {
            Self::V5_10 => "bullseye",
            Self::V6_1 => "bookworm",
            Self::V6_12 => "trixie",
            Self::Newest | Self::Sid => "sid",
        }
    }
}

impl fmt::Display for Series {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::V5_10 => "5.10",
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::Newest => "newest",
            Self::Sid => "sid",
        })
    }
}

/// A kernel that is ready to boot.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) series: Series,
    /// The ELF kernel, which QEMU enters by PVH.
    pub(crate) vmlinux: PathBuf,
    /// The initramfs of its modules.
    pub(crate) modules: PathBuf,
    _entry: Entry,
}

/// Downloads and unpacks the kernel if it is not in the cache yet.
pub(crate) fn prepare(cache: &Cache, mirrors: &Mirrors, series: Series) -> Result<Kernel> {
    let recipe = format!("2 {} {}", series.codename(), modules::recipe());
    let name = format!("kernel-{}", series.kernel());
    let entry = cache.entry(&name, &recipe, |directory| {
        let what = format!("downloading the kernel of {} ({series})", series.codename());
        let packages = step(&what, || {
            let archive = Archive::update(cache, mirrors, series.codename())?;
            let prefixes = ["linux-image-", "linux-binary-", "linux-modules-"];
            archive.download(&archive.family("linux-image-amd64", &prefixes)?)
        })?;
        step(&format!("unpacking the kernel ({series})"), || {
            unpack(&packages, directory)
        })
    })?;
    Ok(Kernel {
        series,
        vmlinux: entry.join("vmlinux"),
        modules: entry.join("modules.cpio"),
        _entry: entry,
    })
}

fn unpack(packages: &[PathBuf], directory: &Path) -> Result<()> {
    let tree = directory.join("unpacked");
    package::unpack(packages, &tree)?;
    let modules = single_entry(&tree.join("lib/modules"))?;
    let release = modules
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let images = [
        modules.join("vmlinuz"),
        tree.join("boot").join(format!("vmlinuz-{release}")),
    ];
    let image = images
        .iter()
        .find(|image| image.exists())
        .context("no vmlinuz in the packages")?;
    bzimage::extract(image, &directory.join("vmlinux"))?;
    let work = directory.join("chosen");
    modules::pack(&release, &tree, &work, &directory.join("modules.cpio"))?;
    for done_with in [&tree, &work] {
        fs::remove_dir_all(done_with)?;
    }
    fs::write(directory.join("release"), release)?;
    Ok(())
}

fn single_entry(directory: &Path) -> Result<PathBuf> {
    let entries: Vec<_> = fs::read_dir(directory)?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    match entries.as_slice() {
        [one] => Ok(one.clone()),
        more => bail!(
            "{}: {} kernels instead of one",
            directory.display(),
            more.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_is_found_by_the_name_that_it_shows() {
        for series in Series::EACH_KERNEL.into_iter().chain([Series::Sid]) {
            assert_eq!(Series::parse(&series.to_string()).unwrap(), series);
        }
        assert!(Series::parse("6").is_err());
    }

    #[test]
    fn a_line_about_the_newest_kernel_is_also_about_that_kernel_below_sids_userland() {
        assert!(Series::Sid.is_named("newest") && Series::Sid.is_named("sid"));
        assert!(Series::Newest.is_named("newest") && !Series::Newest.is_named("sid"));
        assert!(Series::V5_10.is_named("*") && !Series::V5_10.is_named("6.1"));
    }
}
