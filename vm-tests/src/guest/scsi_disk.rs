//! The disks of SCSI devices, whatever their transport.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

/// The disk's name below `/sys/block`, if the device has one.
pub(super) fn disk_of(device_dir: &Path) -> Option<String> {
    // The disk's directory exists a moment before its link.
    super::entries(device_dir.join("block"))
        .into_iter()
        .find(|disk| Path::new("/sys/block").join(disk).exists())
}

/// Waits until the device has a disk that can be opened.
pub(super) fn openable_disk_of(device_dir: &Path) -> String {
    let what = format!("the disk of {}", device_dir.display());
    super::wait_until(&what, Duration::from_secs(60), || {
        // The node exists a moment before the disk can be opened.
        let disk = disk_of(device_dir)?;
        File::open(format!("/dev/{disk}")).ok().map(|_| disk)
    })
}

/// Whether the states of a host's devices agree with their path: none runs if the path is lost,
/// and none is blocked if it is not.
pub(super) fn have_followed(host: u32, lost: bool) -> bool {
    let ours = format!("{host}:");
    let names = super::entries("/sys/bus/scsi/devices").into_iter();
    let mut states = names.filter(|name| name.starts_with(&ours)).map(|name| {
        let state = fs::read_to_string(format!("/sys/bus/scsi/devices/{name}/state"));
        state.unwrap_or_default().trim().to_owned()
    });
    states.all(|state| match state.as_str() {
        "running" => !lost,
        "blocked" | "transport-offline" => lost,
        _ => true,
    })
}
