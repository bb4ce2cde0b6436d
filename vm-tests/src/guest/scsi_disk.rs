//! The disk of a SCSI device, whatever its transport.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// As it is called below `/sys/block`, when the device has one.
pub(super) fn disk_of(device_dir: &Path) -> Option<String> {
    // The disk's directory is there a moment before its link.
    super::entries(device_dir.join("block"))
        .into_iter()
        .find(|disk| Path::new("/sys/block").join(disk).exists())
}

/// Waits until there is one that can be opened.
pub(super) fn openable_disk_of(device_dir: &Path) -> String {
    let what = format!("the disk of {}", device_dir.display());
    super::wait_until(&what, Duration::from_secs(60), || {
        // The node is there a moment before the disk takes openers.
        let disk = disk_of(device_dir)?;
        File::open(format!("/dev/{disk}")).ok().map(|_| disk)
    })
}
