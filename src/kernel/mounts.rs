//! Mounts and swap areas, as `/proc` lists them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Roots, blockdev, process, sysfs};
use crate::error::{ErrorKind, Result};
use crate::id::DevNo;

/// One mount of a block device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Mount {
    /// What is mounted.
    pub device: DevNo,
    /// Where, as the process `pid` sees it.
    pub path: PathBuf,
    /// A process in the mount namespace where the mount is; `None` for our own.
    pub pid: Option<u32>,
}

/// The mounts of all block devices, in our own mount namespace and in those of
/// all processes that may be read.
pub fn read_mounts(roots: &Roots) -> Result<Vec<Mount>> {
    let mut namespaces = BTreeSet::new();
    let namespace = |process: &Path| fs::metadata(process.join("ns/mnt")).map(|meta| meta.ino());
    let mut mounts = Vec::new();

    let own = roots.proc.join("self");
    namespaces.extend(namespace(&own).ok());
    let text = read_whole(&own.join("mountinfo"))?;
    mounts.extend(parse_mountinfo(&text, None));

    for pid in process::pids(roots)? {
        let process = roots.proc.join(pid.to_string());
        // A process that ends, or that may not be read, has no say.
        let Ok(inode) = namespace(&process) else {
            continue;
        };
        if namespaces.insert(inode) {
            let text = read_whole(&process.join("mountinfo")).unwrap_or_default();
            mounts.extend(parse_mountinfo(&text, Some(pid)));
        }
    }
    Ok(mounts)
}

/// `/proc` files grow past any attribute, so they are read whole.
fn read_whole(path: &Path) -> Result<String> {
    let bytes =
        fs::read(path).map_err(|error| crate::error::Error::io("cannot read", path, &error))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The block devices among the lines of a `mountinfo` (proc(5)): by device
/// number and, for file systems that mount under a number of their own
/// (btrfs), by the source's node.
fn parse_mountinfo(text: &str, pid: Option<u32>) -> Vec<Mount> {
    let parse = |line: &str| {
        let mut fields = line.split(' ');
        let device: DevNo = fields.nth(2)?.parse().ok()?;
        let path = PathBuf::from(unescape(fields.nth(1)?));
        // Optional fields end with a dash; type and source follow.
        let mut rest = fields.skip_while(|&field| field != "-");
        let source = unescape(rest.nth(2)?);
        let device = if device.major == 0 {
            blockdev::devno_at(Path::new(&source)).ok()?
        } else {
            device
        };
        Some(Mount { device, path, pid })
    };
    text.lines().filter_map(parse).collect()
}

/// Undoes the kernel's `\ooo` for blanks and backslashes.
fn unescape(field: &str) -> String {
    let mut out = String::with_capacity(field.len());
    let mut rest = field;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let code = after
            .get(..3)
            .and_then(|octal| u8::from_str_radix(octal, 8).ok());
        if let Some(code) = code {
            out.push(char::from(code));
            rest = after.get(3..).unwrap_or_default();
        } else {
            out.push('\\');
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

/// The block devices that are swapped on.
pub fn read_swaps(roots: &Roots) -> Result<Vec<DevNo>> {
    let text = match sysfs::read(&roots.proc.join("swaps")) {
        Ok(text) => text,
        // A kernel without swap.
        Err(error) if error.kind() == ErrorKind::Vanished => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    Ok(text
        .lines()
        .skip(1)
        .filter_map(|line| line.split_ascii_whitespace().next())
        .filter_map(|path| blockdev::devno_at(Path::new(&unescape(path))).ok())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_device_number_and_its_path_is_unescaped() {
        let text = "36 35 8:16 / /mnt/a\\040b rw,noatime shared:1 - ext4 /dev/sdb rw\n\
                    37 35 0:22 / /proc rw - proc proc rw\n\
                    garbage\n";
        assert_eq!(
            parse_mountinfo(text, Some(7)),
            [Mount {
                device: DevNo {
                    major: 8,
                    minor: 16
                },
                path: PathBuf::from("/mnt/a b"),
                pid: Some(7),
            }]
        );
    }

    #[test]
    fn a_backslash_that_begins_no_code_stays() {
        assert_eq!(unescape("a\\b\\0"), "a\\b\\0");
        assert_eq!(unescape("\\134"), "\\");
    }
}
