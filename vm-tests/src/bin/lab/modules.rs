//! The few modules of a kernel that the guest may ask for, and what they need.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::BufWriter;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::decompress;
use crate::newc::Newc;

/// Loaded before the first test: they belong to every machine with SCSI disks.
pub(crate) const LOADED_AT_BOOT: &[&str] = &["sd_mod", "sg"];

/// There in every kernel, or the kernel is of no use to the lab.
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

/// Taken where the kernel has them: some are built in or named otherwise in one
/// series or another.
const WANTED: &[&str] = &[
    // Transports, targets and what they carry.
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
    // Others that hold or imitate disks.
    "brd",
    "configfs",
    "fuse",
    "isofs",
    "md_mod",
    "overlay",
    "raid1",
    "ublk_drv",
    "vfat",
    // Networks between initiator and target.
    "8021q",
    "bridge",
    "dummy",
    "sch_netem",
    // For `ss` to cut connections.
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
    // Asked for by name at run time, so no dependency shows them.
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

/// For the cache to notice when the lists change.
pub(crate) fn recipe() -> String {
    format!("{REQUIRED:?} {WANTED:?}")
}

/// Writes the initramfs of `release`'s modules, found unpacked in `tree`, to
/// `to`; `work` is a directory to do it in.
pub(crate) fn pack(release: &str, tree: &Path, work: &Path, to: &Path) -> Result<()> {
    depmod(tree, release)?;
    let modules = Path::new("lib/modules").join(release);
    let (from, directory) = (tree.join(&modules), work.join("usr").join(&modules));
    for module in closure(tree, release)? {
        let path = directory.join(module.strip_prefix(&from)?);
        // foo.ko.xz loses .xz.
        let path = match path.extension() {
            Some(extension) if extension != "ko" => path.with_extension(""),
            _ => path,
        };
        fs::create_dir_all(path.parent().context("a module's directory")?)?;
        fs::write(path, decompress::read(&module)?)?;
    }
    // Absent in some kernels; depmod then only warns.
    for list in [
        "modules.builtin",
        "modules.builtin.modinfo",
        "modules.order",
    ] {
        copy_if_there(&from, &directory, list)?;
    }
    symlink("usr/lib", work.join("lib"))?;
    depmod(work, release)?;
    // Where only the binary lists come with the kernel, depmod's are empty.
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

/// The files of what is wanted and of what that needs, soft dependencies included.
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
        // In place of the configuration of this machine.
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
