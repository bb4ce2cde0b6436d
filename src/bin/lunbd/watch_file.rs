//! Waiting for a file to become another one.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use lunbd::{Error, ErrorKind, Result};
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

/// A file by its name in its directory: editors and orchestrators put another one
/// in its place.
pub(crate) struct FileWatch {
    inotify: Inotify,
    name: OsString,
}

impl FileWatch {
    /// From here on no change is missed.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let Some(name) = path.file_name() else {
            let message = format!("{} is no file", path.display());
            return Err(Error::new(ErrorKind::InvalidInput, message));
        };
        let directory = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        let failed = |errno: Errno| {
            let error = io::Error::from(errno);
            let message = format!("cannot follow {}: {error}", directory.display());
            let kind = match errno {
                Errno::ENOENT | Errno::ENOTDIR => ErrorKind::NotFound,
                Errno::EACCES => ErrorKind::NotPermitted,
                _ => ErrorKind::Io,
            };
            Error::new(kind, message)
        };
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC).map_err(failed)?;
        let events = AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_ONLYDIR;
        inotify.add_watch(directory, events).map_err(failed)?;
        Ok(Self {
            inotify,
            name: name.to_owned(),
        })
    }

    /// Waits until the file may be another one.
    ///
    /// # Errors
    /// `Io` where it cannot be followed any more.
    pub(crate) fn wait(&self) -> Result<()> {
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EINTR) => continue,
                Err(errno) => {
                    let error = io::Error::from(errno);
                    let message = format!("the file cannot be followed any more: {error}");
                    return Err(Error::new(ErrorKind::Io, message));
                }
            };
            // A volume of Kubernetes' changes by the link `..data` beside it. No
            // name: events were lost.
            let ours = |name: Option<OsString>| {
                name.is_none_or(|name| name == self.name || name == "..data")
            };
            if events.into_iter().any(|event| ours(event.name)) {
                return Ok(());
            }
        }
    }
}
