//! The guest's userland, from packages of this machine's own release: programs that are built
//! here find there the libc and libudev that they were linked with. The libraries of a newer
//! release also work, so `LUNBD_VM_USERLAND` may name one.

use std::env;
use std::fs::{self, File};
use std::io::BufWriter;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::apt::Archive;
use crate::cache::{Cache, Entry};
use crate::debian::Mirrors;
use crate::kernel::Series;
use crate::newc::Newc;
use crate::package;
use crate::step::step;

/// The packages of the guest; their dependencies come with them. No maintainer script runs, so
/// essential packages must be listed too.
const PACKAGES: &[&str] = &[
    "bash",
    "coreutils",
    "dash",
    // For `which`, with which rescan-scsi-bus.sh finds multipath.
    "debianutils",
    "dmsetup",
    "e2fsprogs",
    "fdisk",
    "findutils",
    "grep",
    "iproute2",
    "kmod",
    "libgcc-s1",
    "libudev1",
    "mawk",
    "mount",
    "procps",
    "sed",
    SYSUSERS,
    "udev",
    "util-linux",
    "xfsprogs",
];

/// The smallest implementation that udev accepts: the others are systemd, or need it.
const SYSUSERS: &str = "systemd-standalone-sysusers";

/// Packages of some boots only: unpacking them takes longer than most tests.
#[derive(Debug)]
struct Addition {
    name: &'static str,
    packages: &'static [&'static str],
    /// A boot has the addition if a test file, or a word of its story, has one of these in its
    /// name.
    marks: &'static [&'static str],
}

const ADDITIONS: &[Addition] = &[
    // NBD servers of other projects, and the client to compare with. They are as large as all
    // the rest.
    Addition {
        name: "nbd",
        packages: &["nbd-client", "nbd-server", "nbdkit", "qemu-utils"],
        marks: &["nbd"],
    },
    // The daemons of a machine with a SAN, and the tools to compare with.
    Addition {
        name: "san",
        packages: &["multipath-tools", "open-iscsi", "sg3-utils"],
        marks: &["mpath", "iscsi", "fc"],
    },
    // A target outside the kernel.
    Addition {
        name: "tgt",
        packages: &["tgt"],
        marks: &["iscsi"],
    },
    // Its rules make each LUN three times slower, so other boots do not have it.
    Addition {
        name: "sg3-rules",
        packages: &["sg3-utils", "sg3-utils-udev"],
        marks: &["sg3_rules"],
    },
    // Its rules activate each volume group that appears.
    Addition {
        name: "lvm",
        packages: &["lvm2"],
        marks: &["lvm"],
    },
    // The tools that make LUKS and btrfs volumes.
    Addition {
        name: "content",
        packages: &["btrfs-progs", "cryptsetup-bin"],
        marks: &["content"],
    },
    // Where it is installed, it is pid 1. A newer one only recommends the library of its
    // sandboxes.
    Addition {
        name: "systemd",
        packages: &["libseccomp2", "systemd"],
        marks: &["systemd"],
    },
];

/// Dependencies that the guest never calls. A prefix stands for a whole family of packages.
const LEFT_OUT_PACKAGES: &[&str] = &[
    "adduser",
    "cpio",
    "debconf",
    "dpkg",
    "initramfs-tools",
    "klibc-utils",
    // Needed by plugins of nbdkit that no test loads.
    "libboost",
    "libcurl3",
    "libldap",
    "librtmp",
    "libsasl",
    "libssh",
    "libtorrent",
    "libdb5.3",
    "libfile-find-rule-perl",
    "libgssapi-krb5-2",
    // Of the xfs tools only the scrubber needs it, and it is the largest file.
    "libicu",
    "libk5crypto3",
    "libklibc",
    "libkrb5",
    "libpam-modules",
    "libperl",
    "libpython3",
    "libsqlite3-0",
    "libstdc++6",
    "libtirpc",
    "linux-base",
    "lsb-base",
    "media-types",
    "passwd",
    "perl",
    "python3",
    "sg3-utils-udev",
    // A newer multipath-tools depends on it. Where it is installed, it is pid 1.
    "systemd",
    "sysvinit-utils",
    "tar",
    "usrmerge",
];

/// No program of the guest reads these, and they are slow to unpack under emulation.
const LEFT_OUT_PATHS: &[&str] = &[
    "usr/share/",
    "usr/lib/udev/hwdb.d/",
    "usr/lib/x86_64-linux-gnu/gconv/",
    "usr/lib/locale/",
    "usr/include/",
    "var/",
];

/// Maintainer scripts would have created these.
const FILES: &[(&str, &str)] = &[
    (
        "etc/passwd",
        "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    ),
    ("etc/group", GROUPS),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files\n",
    ),
    ("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("etc/hostname", "lunbd-vm\n"),
    ("etc/machine-id", "6c756e62642d766d2d67756573742d30\n"),
    ("etc/fstab", ""),
];

/// The groups that udev's standard rules name.
const GROUPS: &str = "root:x:0:\ntty:x:5:\ndisk:x:6:\nlp:x:7:\nkmem:x:15:\ndialout:x:20:\n\
    cdrom:x:24:\ntape:x:26:\naudio:x:29:\nvideo:x:44:\nplugdev:x:46:\nusers:x:100:\n\
    input:x:101:\nsgx:x:102:\nkvm:x:103:\nrender:x:104:\nnogroup:x:65534:\n";

const LINKS: &[(&str, &str)] = &[
    ("etc/mtab", "/proc/self/mounts"),
    ("usr/bin/awk", "mawk"),
    ("usr/bin/sh", "dash"),
    ("usr/bin/which", "which.debianutils"),
];

const DIRECTORIES: &[&str] = &[
    "dev",
    "etc",
    "mnt",
    "proc",
    "root",
    "run",
    "sys",
    "tests",
    "tmp",
    "usr",
    "usr/local",
    "usr/local/bin",
    "var",
    "var/lib",
    "var/tmp",
];

/// The guest's userland, as initramfs images.
pub(crate) struct Root {
    /// Holds the images, each under its name.
    entry: Entry,
}

impl Root {
    /// The images for a boot, by the names of its test files or the words of its story.
    pub(crate) fn images(&self, names: &[&str]) -> Vec<PathBuf> {
        let wanted = ADDITIONS
            .iter()
            .filter(|addition| addition.is_wanted(names));
        let files = std::iter::once(BASE.to_owned()).chain(wanted.map(Addition::file));
        files.map(|file| self.entry.join(&file)).collect()
    }
}

/// The image that every guest has.
const BASE: &str = "root.cpio";

impl Addition {
    fn file(&self) -> String {
        format!("{}.cpio", self.name)
    }

    /// The packages to download for it, with those of the base.
    ///
    /// A package that needs systemd itself, such as a newer multipath-tools, conflicts with the
    /// small sysusers.
    fn download(&self, archive: &Archive) -> Result<Vec<PathBuf>> {
        let with_it = [PACKAGES, self.packages].concat();
        archive.download_with_dependencies(&with_it).or_else(|_| {
            let mut with_systemd = with_it;
            with_systemd.retain(|package| *package != SYSUSERS);
            archive.download_with_dependencies(&with_systemd)
        })
    }

    fn is_wanted(&self, names: &[&str]) -> bool {
        let is_marked = |name: &&str| self.marks.iter().any(|mark| name.contains(mark));
        names.iter().any(is_marked)
    }
}

/// The release whose packages the guest gets.
fn codename(mirrors: &Mirrors, series: Series) -> String {
    if series == Series::Sid {
        return "sid".to_owned();
    }
    let chosen = env::var("LUNBD_VM_USERLAND").ok();
    let chosen = chosen.filter(|codename| !codename.is_empty());
    chosen.unwrap_or_else(|| mirrors.codename.clone())
}

/// The images for the guests of a series; builds them if they do not exist yet.
pub(crate) fn prepare(cache: &Cache, mirrors: &Mirrors, series: Series) -> Result<Root> {
    let codename = codename(mirrors, series);
    if codename != mirrors.codename {
        eprintln!("the userland of {series} is that of {codename}");
    }
    let recipe = format!(
        "6 {codename} {PACKAGES:?} {ADDITIONS:?} {LEFT_OUT_PACKAGES:?} {LEFT_OUT_PATHS:?} {FILES:?} {LINKS:?} {DIRECTORIES:?}"
    );
    let entry = cache.entry(&format!("root-{codename}"), &recipe, |directory| {
        let what = format!("downloading the guest's packages ({codename})");
        let (packages, additions) = step(&what, || {
            let archive = Archive::update(cache, mirrors, &codename)?;
            let packages = archive.download_with_dependencies(PACKAGES)?;
            let mut additions = Vec::new();
            for addition in ADDITIONS {
                let mut more = addition.download(&archive)?;
                more.retain(|package| !packages.contains(package));
                additions.push((addition, more));
            }
            Ok((packages, additions))
        })?;
        step("building the guest's root", || {
            let tree = directory.join("unpacked");
            unpack(&packages, PACKAGES, &tree)?;
            furnish(&tree)?;
            pack(&tree, &directory.join(BASE))?;
            additions.iter().try_for_each(|(addition, packages)| {
                unpack(packages, addition.packages, &tree)?;
                pack(&tree, &directory.join(addition.file()))
            })
        })
    })?;
    Ok(Root { entry })
}

/// Unpacks the packages, without those of [`LEFT_OUT_PACKAGES`] that `asked_for` does not name.
fn unpack(packages: &[PathBuf], asked_for: &[&str], tree: &Path) -> Result<()> {
    let mut packages = packages.to_vec();
    packages.retain(|package| {
        let file = package.file_name().unwrap_or_default().to_string_lossy();
        let name = file.split('_').next().unwrap_or_default();
        let is_left_out = LEFT_OUT_PACKAGES.iter().any(|left| name.starts_with(left));
        asked_for.contains(&name) || !is_left_out
    });
    package::unpack(&packages, tree)
}

/// Creates in `tree` the files that no package has.
fn furnish(tree: &Path) -> Result<()> {
    for path in DIRECTORIES {
        fs::create_dir_all(tree.join(path))?;
    }
    for (path, content) in FILES {
        fs::write(tree.join(path), content).with_context(|| (*path).to_owned())?;
    }
    for (path, target) in LINKS {
        let _absent_mostly = fs::remove_file(tree.join(path));
        symlink(target, tree.join(path)).with_context(|| (*path).to_owned())?;
    }
    Ok(())
}

/// Moves `tree` into the image `to`.
fn pack(tree: &Path, to: &Path) -> Result<()> {
    let mut archive = Newc::new(BufWriter::new(File::create(to)?));
    archive.tree(tree, "", is_wanted)?;
    archive.finish()?;
    fs::remove_dir_all(tree)?;
    Ok(())
}

fn is_wanted(path: &str) -> bool {
    let left_out = || {
        let path = format!("{path}/");
        LEFT_OUT_PATHS.iter().any(|prefix| path.starts_with(prefix))
    };
    DIRECTORIES.contains(&path) || !left_out()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_left_out_but_for_the_directories_that_every_guest_has() {
        assert!(is_wanted("usr/bin/ls") && is_wanted("usr/shared") && is_wanted("var/lib"));
        assert!(!is_wanted("usr/share") && !is_wanted("var/lib/dpkg"));
    }

    #[test]
    fn a_boot_carries_what_the_names_of_its_tests_ask_for() {
        let wanted = |names: &[&str]| -> Vec<&str> {
            let wanted = ADDITIONS
                .iter()
                .filter(|addition| addition.is_wanted(names));
            wanted.map(|addition| addition.name).collect()
        };
        assert_eq!(wanted(&["attach", "detach"]), [] as [&str; 0]);
        assert_eq!(wanted(&["attach", "iscsi_lab"]), ["san", "tgt"]);
        assert_eq!(wanted(&["nbd_heal"]), ["nbd"]);
        assert_eq!(wanted(&["scsi_mpath_and_nbd"]), ["nbd", "san"]);
        assert_eq!(wanted(&["own_boot_systemd_lvm"]), ["lvm", "systemd"]);
        assert_eq!(wanted(&["nbd_content"]), ["nbd", "content"]);
    }
}
