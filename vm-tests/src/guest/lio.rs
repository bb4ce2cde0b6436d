//! Volumes of the kernel's target LIO, for its fabrics to present.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::mount::{MsFlags, mount};

const CONFIGFS: &str = "/sys/kernel/config";
const CORE: &str = "/sys/kernel/config/target/core";
const LIMIT: Duration = Duration::from_secs(60);

/// A volume that a target can present. It is removed with its last clone; each target that
/// presents it holds a clone.
#[derive(Debug, Clone)]
pub struct Store(Arc<Backstore>);

#[derive(Debug)]
struct Backstore {
    directory: PathBuf,
    serial: String,
    /// The backing file in memory, if there is one.
    file: Option<PathBuf>,
    /// The loop device on the file.
    loop_device: Option<PathBuf>,
}

impl Store {
    /// A disk in the kernel's memory, which takes its whole size at once.
    ///
    /// LIO makes the NAA identity from the first 25 hex digits of `serial` alone.
    #[must_use]
    pub fn ramdisk(serial: &str, bytes: u64) -> Self {
        let control = format!("rd_pages={}", bytes.div_ceil(4096));
        Self::make("rd_mcp", serial, &control, None, None)
    }

    /// A disk in a file, whose data can be compared at [`Store::path`]. Its size does not
    /// change.
    #[must_use]
    pub fn file(serial: &str, bytes: u64) -> Self {
        let file = new_file(bytes);
        let control = format!("fd_dev_name={},fd_dev_size={bytes}", file.display());
        Self::make("fileio", serial, &control, Some(file), None)
    }

    /// A disk that can [`Store::grow`].
    #[must_use]
    pub fn growable(serial: &str, bytes: u64) -> Self {
        let file = new_file(bytes);
        super::modprobe("loop", &[]);
        let device = super::run(&["losetup", "--find", "--show", &file.display().to_string()]);
        let device = PathBuf::from(device.trim());
        // LIO claims the device exclusively, which fails while udevd looks for partitions.
        super::udevd::settle();
        let control = format!("udev_path={}", device.display());
        Self::make("iblock", serial, &control, Some(file), Some(device))
    }

    /// A volume on an existing block device, which LIO claims exclusively.
    #[must_use]
    pub fn iblock_on(serial: &str, device: &Path) -> Self {
        let control = format!("udev_path={}", device.display());
        Self::make("iblock", serial, &control, None, None)
    }

    /// The same with `fileio`, which opens the device as a file.
    #[must_use]
    pub fn fileio_on(serial: &str, device: &Path, bytes: u64) -> Self {
        let control = format!("fd_dev_name={},fd_dev_size={bytes}", device.display());
        Self::make("fileio", serial, &control, None, None)
    }

    fn make(
        kind: &str,
        serial: &str,
        control: &str,
        file: Option<PathBuf>,
        loop_device: Option<PathBuf>,
    ) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        mount_configfs();
        match kind {
            "fileio" => super::need_module("target_core_file"),
            "iblock" => super::need_module("target_core_iblock"),
            _ => super::need_module("target_core_mod"),
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = PathBuf::from(format!("{CORE}/{kind}_{number}/volume-{number}"));
        fs::create_dir_all(&directory)
            .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        let store = Backstore {
            directory,
            serial: serial.to_owned(),
            file,
            loop_device,
        };
        write(&store.directory.join("control"), control);
        if kind == "iblock" {
            write(
                &store.directory.join("udev_path"),
                control.trim_start_matches("udev_path="),
            );
        }
        write(&store.directory.join("wwn/vpd_unit_serial"), serial);
        write(&store.directory.join("enable"), "1");
        Self(Arc::new(store))
    }

    /// The identity as sysfs shows it: `naa.6001405` and 25 hex digits.
    #[must_use]
    pub fn wwid(&self) -> String {
        let hex = self.0.serial.chars().filter(char::is_ascii_hexdigit);
        let hex: String = hex.chain(std::iter::repeat('0')).take(25).collect();
        format!("naa.6001405{}", hex.to_ascii_lowercase())
    }

    /// The unit serial number (VPD page 0x80).
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.0.serial
    }

    /// The file that holds the data; a ramdisk has none.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.file.as_deref()
    }

    /// Enlarges a [`Store::growable`]. An initiator sees the new size when it asks.
    pub fn grow(&self, bytes: u64) {
        let device = self.0.loop_device.as_ref().expect("a growable store");
        let file = self.0.file.as_ref().expect("a growable store");
        let file = OpenOptions::new().write(true).open(file).expect("its file");
        file.set_len(bytes).expect("the store's new size");
        super::run(&["losetup", "--set-capacity", &device.display().to_string()]);
    }

    /// Sets whether the volume reports a write-back cache. Not for a growable volume: there
    /// the kernel asks the device below.
    pub fn set_write_cache(&self, on: bool) {
        self.set("emulate_write_cache", if on { "1" } else { "0" });
    }

    /// Sets an attribute of the volume in LIO.
    pub fn set(&self, attribute: &str, value: &str) {
        write(&self.0.directory.join("attrib").join(attribute), value);
    }

    /// Sets the product text of its INQUIRY data and of its T10 name. LIO refuses this while a
    /// target presents the volume.
    pub fn set_product(&self, product: &str) {
        write(&self.0.directory.join("wwn/product_id"), product);
    }

    /// A group of target ports with this number. Its ports share an ALUA access state:
    /// active/optimized at first.
    #[must_use]
    pub fn port_group(&self, number: u16) -> PortGroup {
        let directory = self.0.directory.join(format!("alua/group-{number}"));
        fs::create_dir(&directory)
            .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        write(&directory.join("tg_pt_gp_id"), &number.to_string());
        PortGroup {
            directory,
            _store: self.clone(),
        }
    }

    /// Makes `lun`, a directory of a fabric, present this volume.
    pub(super) fn present_at(&self, lun: &Path) {
        present(&self.0.directory, lun);
    }
}

/// A group of target ports; dropping it puts its ports into the volume's own group.
#[derive(Debug)]
pub struct PortGroup {
    directory: PathBuf,
    _store: Store,
}

impl PortGroup {
    /// Sets the ALUA access state, by its number in SPC-5: 0 is active/optimized, 1
    /// active/non-optimized, 2 standby, 3 unavailable and 15 in transition.
    pub fn set_access_state(&self, state: u8) {
        write(
            &self.directory.join("alua_access_state"),
            &state.to_string(),
        );
    }

    /// Adds the port of `lun`, a directory of a fabric.
    pub(super) fn take_in(&self, lun: &Path) {
        let name = self.directory.file_name().expect("a group's name");
        write(&lun.join("alua_tg_pt_gp"), &name.to_string_lossy());
    }
}

impl Drop for PortGroup {
    fn drop(&mut self) {
        remove_dir(&self.directory);
    }
}

/// Makes `lun`, a directory of a fabric, with a link to `what`.
pub(super) fn present(what: &Path, lun: &Path) {
    fs::create_dir(lun).unwrap_or_else(|error| panic!("{}: {error}", lun.display()));
    let link = lun.join("volume");
    std::os::unix::fs::symlink(what, &link)
        .unwrap_or_else(|error| panic!("{}: {error}", link.display()));
}

/// Undoes [`present`].
pub(super) fn present_no_more(lun: &Path) -> std::io::Result<()> {
    fs::remove_file(lun.join("volume"))?;
    fs::remove_dir(lun)
}

impl Drop for Backstore {
    fn drop(&mut self) {
        remove_dir(&self.directory);
        if let Some(adapter) = self.directory.parent() {
            remove_dir(adapter);
        }
        if let Some(device) = &self.loop_device {
            let device = device.display().to_string();
            let _told_below = std::process::Command::new("losetup")
                .args(["--detach", &device])
                .status();
        }
        if let Some(file) = &self.file {
            let _gone_already = fs::remove_file(file);
        }
    }
}

/// Makes a sparse file in memory.
fn new_file(bytes: u64) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    super::enter();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = PathBuf::from(format!("/tmp/volume-{}-{number}", std::process::id()));
    let file = File::create(&path).expect("a store's file");
    file.set_len(bytes).expect("the store's size");
    path
}

/// It stays mounted, because it belongs to the machine and not to the test.
pub(super) fn mount_configfs() {
    super::enter();
    let mounts = fs::read_to_string("/proc/self/mounts").expect("the mounts");
    if mounts.contains(CONFIGFS) {
        return;
    }
    super::modprobe("configfs", &[]);
    let kind = Some("configfs");
    mount(kind, CONFIGFS, kind, MsFlags::empty(), None::<&str>).expect("configfs");
}

/// Writes one attribute; panics if the kernel refuses.
pub(super) fn write(path: &Path, value: &str) {
    fs::write(path, value).unwrap_or_else(|error| panic!("{} = {value}: {error}", path.display()));
}

/// Removes a configfs directory, and waits while the kernel still uses it. If the directory
/// stays, it prints that; pid 1 then also sees the directory.
pub(super) fn remove_dir(path: &Path) {
    let start = std::time::Instant::now();
    while let Err(error) = fs::remove_dir(path) {
        if error.kind() == std::io::ErrorKind::NotFound {
            return;
        }
        if start.elapsed() > LIMIT {
            eprintln!("{} stays: {error}", path.display());
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
