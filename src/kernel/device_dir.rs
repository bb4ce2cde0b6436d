//! An open directory of sysfs. If it is a device's, every read below it is of the same device.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use crate::error::{Error, ErrorKind, Result};

/// Nearly every attribute fits into this many bytes.
const SHORT: usize = 1024;

/// A device's directory. If another device comes under the same name, this
/// still means the device that is gone, and reads nothing any more.
#[derive(Debug)]
pub(crate) struct DeviceDir<'a> {
    path: &'a Path,
    directory: File,
}

impl<'a> DeviceDir<'a> {
    /// `None` if there is no such directory.
    pub(crate) fn open(path: &'a Path) -> Result<Option<Self>> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits())
            .open(path);
        match opened {
            Ok(directory) => Ok(Some(Self { path, directory })),
            Err(error) => none_if_gone(Error::io("cannot open", path, &error)),
        }
    }

    /// An attribute as it is; `None` if the attribute is absent or the device
    /// gone. This takes three system calls: the kernel returns a whole
    /// attribute to one read with enough room (`fs/kernfs/file.c`), which files
    /// of `/proc` do not promise.
    ///
    /// # Errors
    /// By the errno.
    pub(crate) fn read(&self, attribute: &str) -> Result<Option<Vec<u8>>> {
        let failed =
            |error: &std::io::Error| Error::io("cannot read", &self.path.join(attribute), error);
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let mut file = match openat(&self.directory, attribute, flags, Mode::empty()) {
            Ok(descriptor) => File::from(descriptor),
            Err(errno) => return none_if_gone(failed(&errno.into())),
        };
        let mut buffer = [0; SHORT];
        let read = file.read(&mut buffer).and_then(|length| {
            let mut bytes = buffer.get(..length).unwrap_or_default().to_vec();
            if length == SHORT {
                file.read_to_end(&mut bytes)?;
            }
            Ok(bytes)
        });
        match read {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => none_if_gone(failed(&error)),
        }
    }

    /// An attribute that is text, without surrounding blanks.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn text(&self, attribute: &str) -> Result<Option<String>> {
        let bytes = self.read(attribute)?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()))
    }
}

fn none_if_gone<T>(error: Error) -> Result<Option<T>> {
    match error.kind() {
        ErrorKind::Vanished => Ok(None),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_attribute_is_read_whole_and_another_life_under_the_same_name_is_not_read() {
        let machine = tempfile::tempdir().unwrap();
        let path = machine.path().join("sda");
        fs::create_dir(&path).unwrap();
        let long = vec![7; 3 * SHORT + 5];
        for (file, bytes) in [("size", &b" 2048\n"[..]), ("long", &long), ("odd", b"")] {
            fs::write(path.join(file), bytes).unwrap();
        }
        let dir = DeviceDir::open(&path).unwrap().unwrap();
        assert_eq!(dir.text("size").unwrap().as_deref(), Some("2048"));
        assert_eq!(dir.read("long").unwrap(), Some(long));
        assert_eq!(dir.read("odd").unwrap(), Some(Vec::new()));
        assert_eq!(dir.read("absent").unwrap(), None);
        assert!(dir.read(".").is_err());

        fs::rename(&path, machine.path().join("old")).unwrap();
        fs::remove_file(machine.path().join("old/size")).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("size"), "4096\n").unwrap();
        assert_eq!(dir.text("size").unwrap(), None);
        assert!(DeviceDir::open(&path.join("none")).unwrap().is_none());
    }
}
