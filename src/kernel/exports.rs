//! Block devices that parts of the kernel use and that no process has open: the volumes of its
//! targets (LIO and the `NVMe` target), as configfs shows them, and those of [`without_claim`].

mod attribute;
mod without_claim;

use std::path::{Path, PathBuf};

use self::attribute::read_if_there;
use super::{Roots, file_server_lookup, sysfs};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::id::DevNo;

#[derive(Debug, Default)]
pub(crate) struct Exports {
    /// The volumes that are on one of the devices, by name (`iblock_0/volume`).
    pub(crate) found: Vec<(String, DevNo)>,
    /// The [other uses](without_claim) of the devices, by name (`o2hb CLUSTER/REGION`).
    pub(crate) without_claim: Vec<(String, DevNo)>,
    /// Drivers that are loaded and whose configuration cannot be seen.
    pub(crate) unknown: Vec<&'static str>,
    /// Names of volumes whose device cannot be determined.
    pub(crate) unknown_volumes: Vec<String>,
}

/// The volumes of targets, and the other uses by the kernel, that are on one of `devices`. It passes over a volume whose
/// path is on a file server. A volume is unknown if its path leads through a server that
/// does not answer.
///
/// The configured path identifies a `fileio` volume, a `pscsi` volume and a namespace
/// of `nvmet`. If a link in that path leads elsewhere now, the device that the target
/// has open cannot be seen.
pub(crate) fn read_exports(
    roots: &Roots,
    devices: &[DevNo],
    is_on_file_server: &dyn Fn(&Path) -> bool,
    deadline: Deadline,
) -> Result<Exports> {
    let mut exports = Exports::default();
    let configfs = roots.sysfs.join("kernel/config");
    let lookup = |path: &str| {
        let path = PathBuf::from(path.trim());
        if !path.is_absolute() || is_on_file_server(&path) {
            return Device::NotHere;
        }
        let (name, devices) = (path.display().to_string(), roots.devices.clone());
        // A path below `/dev` is on no file server.
        let number = if path.starts_with(&roots.dev) {
            devices.number_at(&path)
        } else {
            let lookup_deadline = file_server_lookup::lookup_deadline(deadline);
            file_server_lookup::lookup(name, lookup_deadline, move || devices.number_at(&path))
        };
        match number {
            Ok(number) => number.map_or(Device::NotHere, Device::Is),
            Err(_) => Device::Unknown,
        }
    };
    for (module, directory) in [("target_core_mod", "target"), ("nvmet", "nvmet")] {
        let directory = configfs.join(directory);
        if !directory.exists() {
            if roots.sysfs.join("module").join(module).exists() {
                exports.unknown.push(module);
            }
            continue;
        }
        let volumes = match module {
            "nvmet" => nvmet_volumes(&directory, &lookup)?,
            _ => lio_volumes(&directory, &lookup)?,
        };
        for (volume, device) in volumes {
            match device {
                Device::Is(device) if devices.contains(&device) => {
                    exports.found.push((volume, device));
                }
                Device::Is(_) | Device::NotHere => {}
                Device::Unknown => exports.unknown_volumes.push(volume),
            }
        }
    }
    exports.without_claim = without_claim::read(roots)?;
    exports
        .without_claim
        .retain(|(_, device)| devices.contains(device));
    let is_loaded = roots.sysfs.join("module/ocfs2_nodemanager").exists();
    if is_loaded && !configfs.join("cluster").exists() {
        exports.unknown.push("ocfs2_nodemanager");
    }
    Ok(exports)
}

enum Device {
    Is(DevNo),
    /// No block device of this machine.
    NotHere,
    Unknown,
}

type Volumes = Vec<(String, Device)>;
type Lookup<'a> = &'a dyn Fn(&str) -> Device;

/// The volumes of LIO. `iblock` and `pscsi` use a block device, and `fileio` uses a
/// file that may be one (`drivers/target/`). The other kinds use none.
fn lio_volumes(target: &Path, lookup: Lookup<'_>) -> Result<Volumes> {
    let core = target.join("core");
    let mut volumes = Vec::new();
    for adapter in sysfs::names(&core)? {
        let kinds = ["iblock_", "fileio_", "pscsi_"];
        if !kinds.iter().any(|kind| adapter.starts_with(kind)) {
            continue;
        }
        let directory = core.join(&adapter);
        for volume in sysfs::names(&directory)? {
            let attribute = |name| read_if_there(&directory.join(&volume).join(name));
            let device = match attribute("info") {
                // This is a file of the adapter and no volume.
                Ok(None) => continue,
                Err(_) => Device::Unknown,
                Ok(Some(info)) => match (number_in(&info), file_in(&info)) {
                    (Some(number), _) => Device::Is(number),
                    (None, Some(file)) => lookup(file),
                    // A volume that is not enabled has no number.
                    (None, None) if adapter.starts_with("iblock_") => continue,
                    (None, None) => match attribute("udev_path") {
                        Ok(path) => path.map_or(Device::NotHere, |path| lookup(&path)),
                        Err(_) => Device::Unknown,
                    },
                },
            };
            volumes.push((format!("{adapter}/{volume}"), device));
        }
    }
    Ok(volumes)
}

/// Parses `Major: 8 Minor: 0  CLAIMED: IBLOCK` (`target_core_iblock.c`).
fn number_in(info: &str) -> Option<DevNo> {
    let after = |label: &str| {
        let (_, rest) = info.split_once(label)?;
        rest.split_ascii_whitespace().next()?.parse().ok()
    };
    let (major, minor) = (after("Major: ")?, after("Minor: ")?);
    (major != 0).then_some(DevNo { major, minor })
}

/// Parses `File: /dev/sda  Size: 8388608  Mode: O_DSYNC` (`target_core_file.c`).
fn file_in(info: &str) -> Option<&str> {
    let (_, rest) = info.split_once("File: ")?;
    rest.split_once("  Size: ").map(|(path, _)| path)
}

/// The enabled namespaces (`drivers/nvme/target/configfs.c`).
fn nvmet_volumes(nvmet: &Path, lookup: Lookup<'_>) -> Result<Volumes> {
    let subsystems = nvmet.join("subsystems");
    let mut volumes = Vec::new();
    for subsystem in sysfs::names(&subsystems)? {
        let namespaces: PathBuf = subsystems.join(&subsystem).join("namespaces");
        for number in sysfs::names(&namespaces)? {
            let attribute = |name| read_if_there(&namespaces.join(&number).join(name));
            let device = match (attribute("enable"), attribute("device_path")) {
                (Ok(enabled), _) if enabled.as_deref() != Some("1") => continue,
                (Ok(_), Ok(path)) => path.map_or(Device::NotHere, |path| lookup(&path)),
                _ => Device::Unknown,
            };
            volumes.push((format!("{subsystem}/{number}"), device));
        }
    }
    Ok(volumes)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::kernel::Devices;
    use crate::kernel::devices::tests::Named;

    fn put(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn machine() -> (tempfile::TempDir, Roots) {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named("/dev/sda", SDA))),
            ..Roots::below(root.path())
        };
        (root, roots)
    }

    const SDA: DevNo = DevNo { major: 8, minor: 0 };

    fn read(roots: &Roots) -> Result<Exports> {
        let soon = Deadline::after(std::time::Duration::from_secs(600));
        read_exports(roots, &[SDA], &|_| false, soon)
    }

    #[test]
    fn each_kind_of_target_is_known_by_its_device() {
        let (_root, roots) = machine();
        let config = roots.sysfs.join("kernel/config");
        let core = config.join("target/core");
        let iblock = "iBlock device: sda  UDEV PATH: /dev/x  readonly: 0\n        Major: 8 Minor: 0  CLAIMED: IBLOCK\n";
        put(core.join("iblock_0/a/info"), iblock);
        let file =
            "TCM FILEIO ID: 0        File: /dev/sda  Size: 8388608  Mode: O_DSYNC Async: 0\n";
        put(core.join("fileio_1/b/info"), file);
        put(core.join("pscsi_2/c/info"), "SCSI Device Bus Location\n");
        put(core.join("pscsi_2/c/udev_path"), "/dev/sda\n");
        put(core.join("rd_mcp_3/d/info"), iblock);
        put(core.join("iblock_0/other/info"), "Major: 8 Minor: 16\n");
        let nvmet = config.join("nvmet/subsystems/nqn/namespaces");
        for (number, enabled) in [("1", "1\n"), ("2", "0\n")] {
            put(nvmet.join(number).join("enable"), enabled);
            put(nvmet.join(number).join("device_path"), "/dev/sda\n");
        }
        let exports = read(&roots).unwrap();
        let names: Vec<_> = exports.found.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["fileio_1/b", "iblock_0/a", "pscsi_2/c", "nqn/1"]);
        assert!(exports.unknown.is_empty());
    }

    #[test]
    fn a_volume_whose_path_leads_nowhere_now_is_unseen_and_not_free() {
        let (_root, roots) = machine();
        let config = roots.sysfs.join("kernel/config");
        let core = config.join("target/core");
        let file = |path: &str| format!("File: {path}  Size: 8388608  Mode: O_DSYNC\n");
        put(core.join("fileio_0/gone/info"), &file("/none/there"));
        put(core.join("fileio_0/image/info"), &file("/proc/version"));
        put(core.join("fileio_0/unset/info"), &file(""));
        put(core.join("fileio_0/hba_info"), "");
        fs::create_dir_all(core.join("fileio_1/odd/info")).unwrap();
        let iblock = "Major: 0 Minor: 0\n";
        put(core.join("iblock_0/unset/info"), iblock);
        put(core.join("iblock_0/unset/udev_path"), "/none/there\n");
        put(core.join("pscsi_0/gone/info"), "SCSI Device Bus Location\n");
        put(core.join("pscsi_0/gone/udev_path"), "/none/there\n");
        let nvmet = config.join("nvmet/subsystems/nqn/namespaces");
        for (number, enabled) in [("1", "1\n"), ("2", "0\n")] {
            put(nvmet.join(number).join("enable"), enabled);
            put(nvmet.join(number).join("device_path"), "/none/there\n");
        }
        let exports = read(&roots).unwrap();
        assert!(exports.found.is_empty() && exports.unknown.is_empty());
        let unseen = ["fileio_0/gone", "fileio_1/odd", "pscsi_0/gone", "nqn/1"];
        assert_eq!(exports.unknown_volumes, unseen);
    }

    #[test]
    fn a_target_that_is_loaded_and_has_no_configuration_here_is_unseen() {
        let (_root, roots) = machine();
        let none = read(&roots).unwrap();
        assert!(none.found.is_empty() && none.unknown.is_empty());
        fs::create_dir_all(roots.sysfs.join("module/target_core_mod")).unwrap();
        let hidden = read(&roots).unwrap();
        assert_eq!(hidden.unknown, ["target_core_mod"]);
    }
}
