//! The modules of a kernel that the guest may load, and their dependencies.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::BufWriter;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::decompress;
use crate::newc::Newc;

/// Loaded before the first test: every machine with SCSI disks has them.
pub(crate) const LOADED_AT_BOOT: &[&str] = &["sd_mod", "sg"];

/// A kernel without one of these is of no use to the lab.
const REQUIRED: &[&str] = &[
    "dm_mod",
    "ext4",
    "loop",
    "nbd",
    "null_blk",
    "scsi_debug",
    "sd_mod",
    "sg",
    "xfs",
];

/// Taken if the kernel has them: some series build some of them in, or name them otherwise.
const WANTED: &[&str] = &[
    // Transports, targets and their protocols.
    "bnx2fc",
    "fcoe",
    "iscsi_target_mod",
    "iscsi_tcp",
    "libfc",
    "libfcoe",
    "nvmet",
    "scsi_transport_fc",
    "scsi_transport_iscsi",
    "target_core_file",
    "target_core_iblock",
    "target_core_mod",
    "target_core_pscsi",
    "target_core_user",
    "tcm_fc",
    "tcm_loop",
    // Device mapper.
    "dm_crypt",
    "dm_delay",
    "dm_flakey",
    "dm_multipath",
    "dm_queue_length",
    "dm_round_robin",
    "dm_service_time",
    "dm_snapshot",
    "scsi_dh_alua",
    // Other drivers that hold or imitate disks.
    "brd",
    "configfs",
    "fuse",
    "isofs",
    "md_mod",
    "ocfs2_nodemanager",
    "overlay",
    "raid1",
    "ublk_drv",
    "vfat",
    // Networks between initiator and target.
    "8021q",
    "bridge",
    "dummy",
    "sch_netem",
    // `ss` needs it to cut connections.
    "tcp_diag",
    "tls",
    "veth",
    "virtio_net",
    // virtio.
    "9p",
    "9pnet_virtio",
    "virtio_blk",
    "virtio_console",
    "virtio_pci",
    "virtio_rng",
    "virtio_scsi",
    // The kernel requests these by name at run time, so no dependency shows them.
    "chacha",
    "chacha20poly1305",
    "chacha_generic",
    "crc32c_generic",
    "crc32c_intel",
    "crct10dif_generic",
    "crct10dif_pclmul",
    "libcrc32c",
    "md5",
    "nls_ascii",
    "nls_cp437",
    "poly1305_generic",
    "sha1",
    "sha1_generic",
    "sha256",
    "sha256_generic",
    "sha3",
    "sha3_generic",
    "t10-pi",
];

/// Lets the cache notice when the lists change.
pub(crate) fn recipe() -> String {
    format!("{REQUIRED:?} {WANTED:?}")
}

/// Writes to `to` the initramfs of `release`'s modules, which are unpacked in `tree`. `work` is
/// a working directory.
pub(crate) fn pack(release: &str, tree: &Path, work: &Path, to: &Path) -> Result<()> {
    depmod(tree, release)?;
    let modules = Path::new("lib/modules").join(release);
    let (from, directory) = (tree.join(&modules), work.join("usr").join(&modules));
    for module in closure(tree, release)? {
        let path = directory.join(module.strip_prefix(&from)?);
        // foo.ko.xz becomes foo.ko.
        let path = match path.extension() {
            Some(extension) if extension != "ko" => path.with_extension(""),
            _ => path,
        };
        fs::create_dir_all(path.parent().context("a module's directory")?)?;
        fs::write(path, decompress::read(&module)?)?;
    }
    // Some kernels lack one of these; depmod then only warns.
    for list in [
        "modules.builtin",
        "modules.builtin.modinfo",
        "modules.order",
    ] {
        copy_if_there(&from, &directory, list)?;
    }
    symlink("usr/lib", work.join("lib"))?;
    depmod(work, release)?;
    // Some kernels have only the binary lists; depmod's are then empty.
    if !from.join("modules.builtin").exists() {
        for list in ["modules.builtin.bin", "modules.builtin.alias.bin"] {
            copy_if_there(&from, &directory, list)?;
        }
    }
    let mut archive = Newc::new(BufWriter::new(File::create(to)?));
    archive.directory("usr", 0o755)?;
    archive.tree(&work.join("usr"), "usr", |_| true)?;
    archive.finish()?;
    Ok(())
}

fn depmod(tree: &Path, release: &str) -> Result<()> {
    let mut depmod = Command::new("depmod");
    let depmod = depmod.arg("--basedir").arg(tree).arg(release).output();
    let depmod = depmod.context("depmod")?;
    if !depmod.status.success() {
        bail!("depmod: {}", String::from_utf8_lossy(&depmod.stderr));
    }
    Ok(())
}

/// The files of the wanted modules and of their dependencies, including soft dependencies.
fn closure(tree: &Path, release: &str) -> Result<BTreeSet<PathBuf>> {
    let softdep = tree
        .join("lib/modules")
        .join(release)
        .join("modules.softdep");
    let mut files = BTreeSet::new();
    for (names, required) in [(REQUIRED, true), (WANTED, false)] {
        let mut modprobe = Command::new("modprobe");
        modprobe.arg("--dirname").arg(tree);
        modprobe.args(["--set-version", release]);
        // Replaces this machine's configuration.
        modprobe.arg("--config").arg(&softdep);
        modprobe.args(["--all", "--show-depends"]).args(names);
        let shown = modprobe.output().context("modprobe")?;
        if required && !shown.status.success() {
            bail!("modprobe: {}", String::from_utf8_lossy(&shown.stderr));
        }
        // `insmod PATH OPTIONS`, or `builtin NAME`.
        let shown = String::from_utf8_lossy(&shown.stdout);
        let paths = shown
            .lines()
            .filter_map(|line| line.strip_prefix("insmod "));
        files.extend(
            paths
                .filter_map(|line| line.split(' ').next())
                .map(PathBuf::from),
        );
    }
    Ok(files)
}

fn copy_if_there(from: &Path, to: &Path, name: &str) -> Result<()> {
    if from.join(name).exists() {
        fs::copy(from.join(name), to.join(name)).with_context(|| name.to_owned())?;
    }
    Ok(())
}
