//! The guest's userland, from packages of this machine's own release: what is
//! built here finds the libc and libudev there that it was linked with.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::apt::Archive;
use crate::cache::{Cache, Entry};
use crate::debian::Mirrors;
use crate::newc::Newc;
use crate::step::step;

/// What is in the guest besides what these depend on. No maintainer script
/// runs, so essential packages have to be named too.
const PACKAGES: &[&str] = &[
    "bash",
    "coreutils",
    "dash",
    // For `which`, by which rescan-scsi-bus.sh finds multipath.
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
    // The small one of the two that udev accepts.
    "systemd-standalone-sysusers",
    "udev",
    "util-linux",
    "xfsprogs",
];

/// What only some boots carry: unpacking it takes longer than most tests.
#[derive(Debug)]
struct Addition {
    name: &'static str,
    packages: &'static [&'static str],
    /// The boots that carry it have a test file, or a word of their story, with
    /// one of these in its name.
    marks: &'static [&'static str],
}

const ADDITIONS: &[Addition] = &[
    // NBD servers that are not ours, and the client to compare with; as large
    // as all the rest.
    Addition {
        name: "nbd",
        packages: &["nbd-client", "nbd-server", "nbdkit", "qemu-utils"],
        marks: &["nbd"],
    },
    // The daemons that a machine with a SAN has, and the tools to compare with.
    Addition {
        name: "san",
        packages: &["multipath-tools", "open-iscsi", "sg3-utils"],
        marks: &["mpath", "iscsi", "fc"],
    },
    // A target that is not the kernel's.
    Addition {
        name: "tgt",
        packages: &["tgt"],
        marks: &["iscsi"],
    },
];

/// Pulled in by dependencies and never called in the guest; the names of whole
/// families by their beginnings.
const LEFT_OUT_PACKAGES: &[&str] = &[
    "adduser",
    "cpio",
    "debconf",
    "dpkg",
    "initramfs-tools",
    "klibc-utils",
    // Wanted by plugins of nbdkit that no test loads.
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
    // Of the xfs tools only the scrubber wants it, and it is the largest file.
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
    // Its rules make each LUN three times slower.
    "sg3-utils-udev",
    "sysvinit-utils",
    "tar",
    "usrmerge",
];

/// Read by nobody in the guest, and slow to unpack under emulation.
const LEFT_OUT_PATHS: &[&str] = &[
    "usr/share/",
    "usr/lib/udev/hwdb.d/",
    "usr/lib/systemd/system/",
    "usr/lib/x86_64-linux-gnu/gconv/",
    "usr/lib/locale/",
    "usr/include/",
    "var/",
];

/// Maintainer scripts would have made these.
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

/// The groups that udev's stock rules name.
const GROUPS: &str = "root:x:0:\ntty:x:5:\ndisk:x:6:\nlp:x:7:\nkmem:x:15:\ndialout:x:20:\n\
    cdrom:x:24:\ntape:x:26:\naudio:x:29:\nvideo:x:44:\nplugdev:x:46:\nusers:x:100:\n\
    input:x:101:\nsgx:x:102:\nkvm:x:103:\nrender:x:104:\nnogroup:x:65534:\n";

const LINKS: &[(&str, &str)] = &[
    ("bin", "usr/bin"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
    ("sbin", "usr/sbin"),
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
    /// The images for a boot, by the names of its test files or the words of
    /// its story.
    pub(crate) fn images(&self, names: &[&str]) -> Vec<PathBuf> {
        let wanted = ADDITIONS
            .iter()
            .filter(|addition| addition.is_wanted(names));
        let files = std::iter::once(BASE.to_owned()).chain(wanted.map(Addition::file));
        files.map(|file| self.entry.join(&file)).collect()
    }
}

/// What every guest has.
const BASE: &str = "root.cpio";

impl Addition {
    fn file(&self) -> String {
        format!("{}.cpio", self.name)
    }

    fn is_wanted(&self, names: &[&str]) -> bool {
        let is_marked = |name: &&str| self.marks.iter().any(|mark| name.contains(mark));
        names.iter().any(is_marked)
    }
}

/// The images, built when they are not there yet.
pub(crate) fn prepare(cache: &Cache, mirrors: &Mirrors) -> Result<Root> {
    let recipe = format!(
        "3 {} {PACKAGES:?} {ADDITIONS:?} {LEFT_OUT_PACKAGES:?} {LEFT_OUT_PATHS:?} {FILES:?} {LINKS:?} {DIRECTORIES:?}",
        mirrors.codename
    );
    let entry = cache.entry(
        &format!("root-{}", mirrors.codename),
        &recipe,
        |directory| {
            let what = format!("downloading the guest's packages ({})", mirrors.codename);
            let (packages, additions) = step(&what, || {
                let archive = Archive::update(cache, mirrors, &mirrors.codename)?;
                let packages = archive.download_with_dependencies(PACKAGES)?;
                let mut additions = Vec::new();
                for addition in ADDITIONS {
                    let with_it = [PACKAGES, addition.packages].concat();
                    let mut more = archive.download_with_dependencies(&with_it)?;
                    more.retain(|package| !packages.contains(package));
                    additions.push((addition.file(), more));
                }
                Ok((packages, additions))
            })?;
            step("building the guest's root", || {
                build(&packages, &directory.join(BASE))?;
                for (file, packages) in &additions {
                    write(&unpack_all(packages)?, &directory.join(file))?;
                }
                Ok(())
            })
        },
    )?;
    Ok(Root { entry })
}

enum Node {
    Directory(u32),
    File(u32, Vec<u8>),
    Symlink(String),
}

type Tree = BTreeMap<String, Node>;

fn build(packages: &[PathBuf], to: &Path) -> Result<()> {
    let mut tree = unpack_all(packages)?;
    for path in DIRECTORIES {
        tree.entry((*path).to_owned())
            .or_insert(Node::Directory(0o755));
    }
    for (path, content) in FILES {
        tree.insert(
            (*path).to_owned(),
            Node::File(0o644, content.as_bytes().to_vec()),
        );
    }
    for (path, target) in LINKS {
        tree.insert((*path).to_owned(), Node::Symlink((*target).to_owned()));
    }
    write(&tree, to)
}

fn unpack_all(packages: &[PathBuf]) -> Result<Tree> {
    let mut tree = Tree::new();
    for package in packages {
        let file = package.file_name().unwrap_or_default().to_string_lossy();
        if !LEFT_OUT_PACKAGES.iter().any(|name| file.starts_with(name)) {
            unpack(package, &mut tree).with_context(|| package.display().to_string())?;
        }
    }
    Ok(tree)
}

fn write(tree: &Tree, to: &Path) -> Result<()> {
    let mut archive = Newc::new(BufWriter::new(File::create(to)?));
    // In the order of their names a directory comes before what is in it.
    for (path, node) in tree {
        match node {
            Node::Directory(permissions) => archive.directory(path, *permissions)?,
            Node::File(permissions, content) => archive.file(path, *permissions, content)?,
            Node::Symlink(target) => archive.symlink(path, target)?,
        }
    }
    archive.finish()?;
    Ok(())
}

fn unpack(package: &Path, tree: &mut Tree) -> Result<()> {
    let mut dpkg = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .context("dpkg-deb")?;
    let stream = dpkg.stdout.take().context("dpkg-deb's output")?;
    for entry in tar::Archive::new(stream).entries()? {
        let mut entry = entry?;
        let Some(path) = guest_path(&entry.path()?.to_string_lossy()) else {
            continue;
        };
        let permissions = entry.header().mode()? & 0o7777;
        let link = entry
            .link_name()?
            .map(|link| link.to_string_lossy().into_owned());
        let node = match (entry.header().entry_type(), link) {
            (tar::EntryType::Directory, _) => Node::Directory(permissions),
            (tar::EntryType::Regular, _) => {
                let mut content = Vec::new();
                entry.read_to_end(&mut content)?;
                Node::File(permissions, content)
            }
            (tar::EntryType::Symlink, Some(target)) => Node::Symlink(target),
            // A second name of a file: a link does as well.
            (tar::EntryType::Link, Some(target)) => match guest_path(&target) {
                Some(target) => Node::Symlink(format!("/{target}")),
                None => continue,
            },
            (other, _) => bail!("{path}: an entry of type {other:?}"),
        };
        tree.insert(path, node);
    }
    if !dpkg.wait()?.success() {
        bail!("dpkg-deb failed");
    }
    Ok(())
}

/// Where a package's path goes in a guest with a merged /usr, unless it is left
/// out.
fn guest_path(path: &str) -> Option<String> {
    let path = path.trim_start_matches("./").trim_end_matches('/');
    let in_usr = ["bin", "sbin", "lib", "lib64"].iter().any(|top| {
        path.strip_prefix(top)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    });
    let path = if in_usr {
        format!("usr/{path}")
    } else {
        path.to_owned()
    };
    let left_out = LEFT_OUT_PATHS
        .iter()
        .any(|prefix| format!("{path}/").starts_with(prefix));
    (!path.is_empty() && !left_out).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_a_split_usr_end_in_the_merged_one() {
        assert_eq!(guest_path("./bin/ls").as_deref(), Some("usr/bin/ls"));
        assert_eq!(guest_path("./lib/").as_deref(), Some("usr/lib"));
        assert_eq!(guest_path("./libexec/x").as_deref(), Some("libexec/x"));
        assert_eq!(guest_path("./usr/share/doc/x"), None);
        assert_eq!(guest_path("./"), None);
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
    }
}
