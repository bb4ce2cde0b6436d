//! Reads and writes of sysfs, one attribute for each call.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::errno::Errno;

use super::{Devices, directory};
use crate::error::{Error, ErrorKind, Result};

/// A page, into which nearly every attribute fits. The kernel returns a longer binary attribute in
/// pages (`fs/kernfs/file.c`, `kernfs_file_read_iter`), so a full page may not be its end.
const SHORT: usize = 4096;

/// More than any attribute holds. It also limits the read of a file that is no
/// attribute.
const LONGEST: u64 = 64 * 1024;

/// Reads an attribute, without its final newline.
///
/// # Errors
/// `Vanished` if the attribute is missing; otherwise by the errno.
pub fn read(path: &Path) -> Result<String> {
    let bytes = read_bytes(path)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.trim_end_matches(['\n', '\0']).to_owned())
}

/// Reads a binary attribute as it is.
///
/// # Errors
/// As [`read`].
pub fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let read = || {
        let mut file = File::open(path)?;
        // The kernel returns a whole text attribute to one read with enough room
        // (`fs/kernfs/file.c`).
        let mut buffer = [0; SHORT];
        let length = file.read(&mut buffer)?;
        let mut bytes = buffer.get(..length).unwrap_or_default().to_vec();
        if length == SHORT {
            file.take(LONGEST).read_to_end(&mut bytes)?;
        }
        Ok(bytes)
    };
    read().map_err(|error: io::Error| Error::io("cannot read", path, &error))
}

/// Reads an attribute that may be missing: in another kernel version, or because
/// the device is going away.
pub fn read_if_there(path: &Path) -> Result<Option<String>> {
    match read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::Vanished => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads an attribute and parses it.
///
/// # Errors
/// `Io` if the text is no `T`.
pub fn parse<T: FromStr>(path: &Path) -> Result<T> {
    let text = read(path)?;
    text.trim().parse().map_err(|_| {
        let expected = std::any::type_name::<T>();
        Error::new(ErrorKind::Io, format!("{text:?} is no {expected}")).with_path(path)
    })
}

/// Writes `text` with one write(2), as an attribute needs it. **Blocks while the
/// kernel works on it**: call it on a worker.
///
/// # Errors
/// By the errno: `Refused` for `EINVAL`, `NotPermitted`, `Vanished`.
pub(crate) fn write(devices: &Devices, path: &Path, text: &str) -> Result<()> {
    write_if(devices, path, text, &|| true)
}

/// Like [`write()`], but only if `is_still_ours` returns true after the open. From
/// then on the kernel refuses a write after the object's end (`ENODEV`,
/// `fs/kernfs/file.c`), so the write never reaches a new object of the same name.
///
/// # Errors
/// Those of [`write()`]; `Vanished` if the object is not ours.
pub(crate) fn write_if(
    devices: &Devices,
    path: &Path,
    text: &str,
    is_still_ours: &dyn Fn() -> bool,
) -> Result<()> {
    let written = devices.write_attribute(path, text, is_still_ours);
    if written.map_err(|error| Error::io("cannot write", path, &error))? {
        return Ok(());
    }
    let message = "another has come under this name";
    Err(Error::new(ErrorKind::Vanished, message).with_path(path))
}

/// The names in a directory, sorted; none if the directory is missing.
pub fn names(path: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let read = directory::read_names(path, |name| names.extend(name.to_str().map(str::to_owned)));
    match read {
        // It may also go away between two reads of it.
        Err(error) if !gone(&error) => return Err(Error::io("cannot list", path, &error)),
        _ => {}
    }
    names.sort();
    Ok(names)
}

/// The target of a link of `/sys/class` or `/sys/bus`; `None` if the link is
/// missing.
pub fn resolve(link: &Path) -> Result<Option<PathBuf>> {
    match link.canonicalize() {
        Ok(path) => Ok(Some(path)),
        Err(error) if gone(&error) => Ok(None),
        Err(error) => Err(Error::io("cannot resolve", link, &error)),
    }
}

/// The target of a link of sysfs, with one system call; `None` if the link is
/// missing. The kernel writes the way up and then the way down, without further
/// links (`fs/kernfs/symlink.c`), so the result has no link if `link`'s own
/// directory has none.
pub(crate) fn follow(link: &Path) -> Result<Option<PathBuf>> {
    let target = match fs::read_link(link) {
        Ok(target) => target,
        Err(error) => {
            return match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EINVAL) => Ok(Some(link.to_owned())),
                _ if gone(&error) => Ok(None),
                _ => Err(Error::io("cannot resolve", link, &error)),
            };
        }
    };
    let mut path = link.to_owned();
    path.pop();
    let mut down = target.as_path();
    while let Ok(rest) = down.strip_prefix("..") {
        path.pop();
        down = rest;
    }
    path.push(down);
    Ok(Some(path))
}

fn gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::ENOENT | Errno::ENODEV | Errno::ENXIO)
    )
}
