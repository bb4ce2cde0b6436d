//! The few modules of a kernel that the guest may ask for, and what they need.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use object::{Object, ObjectSection};

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
    "crc32c_generic",
    "crc32c_intel",
    "crct10dif_generic",
    "crct10dif_pclmul",
    "libcrc32c",
    "md5",
    "nls_ascii",
    "nls_cp437",
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
    let mut found = BTreeMap::new();
    index(tree, &mut found)?;
    let chosen = closure(&found)?;
    let directory = work.join("lib/modules").join(release);
    for (path, content) in &chosen {
        let path = directory.join(path.strip_prefix(tree)?).with_extension("");
        // foo.ko.xz has lost .xz; foo.ko has lost .ko.
        let path = if path.extension().is_some() {
            path
        } else {
            path.with_extension("ko")
        };
        fs::create_dir_all(path.parent().context("a module's directory")?)?;
        fs::write(path, content)?;
    }
    // Absent in some kernels; depmod then only warns.
    for list in [
        "modules.builtin",
        "modules.builtin.modinfo",
        "modules.order",
    ] {
        copy_if_there(tree, &directory, list)?;
    }
    let depmod = Command::new("depmod")
        .arg("-b")
        .arg(work)
        .arg(release)
        .output();
    let depmod = depmod.context("depmod")?;
    if !depmod.status.success() {
        bail!("depmod: {}", String::from_utf8_lossy(&depmod.stderr));
    }
    // Where only the binary lists come with the kernel, depmod's are empty.
    if !tree.join("modules.builtin").exists() {
        for list in ["modules.builtin.bin", "modules.builtin.alias.bin"] {
            copy_if_there(tree, &directory, list)?;
        }
    }
    let mut archive = Newc::new(BufWriter::new(File::create(to)?));
    archive.directory("usr", 0o755)?;
    archive.directory("usr/lib", 0o755)?;
    add(&mut archive, &work.join("lib/modules"), "usr/lib/modules")?;
    archive.finish()?;
    Ok(())
}

/// Module names with `_` for `-`, as the kernel knows them.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (name, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

fn index(directory: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            index(&entry.path(), found)?;
        } else if let Some(name) = module_name(&entry.path()) {
            found.insert(name, entry.path());
        }
    }
    Ok(())
}

fn closure(found: &BTreeMap<String, PathBuf>) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    for name in REQUIRED {
        if !found.contains_key(*name) {
            bail!("the kernel has no module {name}");
        }
    }
    let mut open: Vec<String> = REQUIRED
        .iter()
        .chain(WANTED)
        .map(|name| name.replace('-', "_"))
        .collect();
    let mut known: BTreeSet<String> = open.iter().cloned().collect();
    let mut chosen = BTreeMap::new();
    while let Some(name) = open.pop() {
        let Some(path) = found.get(&name) else {
            continue;
        };
        let content = decompress::read(path)?;
        for needed in needs(&content).with_context(|| name.clone())? {
            if known.insert(needed.clone()) {
                open.push(needed);
            }
        }
        chosen.insert(path.clone(), content);
    }
    Ok(chosen)
}

/// What a module's own `.modinfo` says it needs, soft dependencies included.
fn needs(module: &[u8]) -> Result<Vec<String>> {
    let elf = object::File::parse(module)?;
    let section = elf
        .section_by_name(".modinfo")
        .context("no .modinfo")?
        .data()?;
    let mut needed = Vec::new();
    for field in section
        .split(|byte| *byte == 0)
        .map(String::from_utf8_lossy)
    {
        match field.split_once('=') {
            Some(("depends", names)) => {
                needed.extend(
                    names
                        .split(',')
                        .filter(|name| !name.is_empty())
                        .map(str::to_owned),
                );
            }
            Some(("softdep", names)) => {
                needed.extend(
                    names
                        .split_whitespace()
                        .filter(|name| !name.ends_with(':'))
                        .map(str::to_owned),
                );
            }
            _ => {}
        }
    }
    Ok(needed
        .into_iter()
        .map(|name| name.replace('-', "_"))
        .collect())
}

fn copy_if_there(from: &Path, to: &Path, name: &str) -> Result<()> {
    if from.join(name).exists() {
        fs::copy(from.join(name), to.join(name)).with_context(|| name.to_owned())?;
    }
    Ok(())
}

fn add<W: std::io::Write>(archive: &mut Newc<W>, directory: &Path, name: &str) -> Result<()> {
    archive.directory(name, 0o755)?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            add(archive, &entry.path(), &name)?;
        } else {
            archive.file(&name, 0o644, &fs::read(entry.path())?)?;
        }
    }
    Ok(())
}
