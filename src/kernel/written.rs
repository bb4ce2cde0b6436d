//! Reports the files that processes have written to.

use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

use crate::error::{Error, Result};

/// Reports each write by any process through the same instance of a file system. All
/// mounts of sysfs in one network namespace are one instance. It does not report the
/// kernel's own changes.
#[derive(Debug)]
pub(crate) struct WriteWatcher(Inotify);

/// A watched file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WatchedFile(WatchDescriptor);

impl WriteWatcher {
    pub(crate) fn new() -> Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        inotify
            .map(Self)
            .map_err(|errno| Error::of_errno("cannot listen for writes", errno))
    }

    /// Starts to watch this file.
    ///
    /// # Errors
    /// `Vanished` if the file is missing; by the errno if the user may watch no more
    /// files (`fs.inotify.max_user_watches`).
    pub(crate) fn watch(&self, file: &Path) -> Result<WatchedFile> {
        // inotify reports a write when the write returns, and a refused write at the
        // close.
        let events = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CLOSE_WRITE;
        self.0
            .add_watch(file, events)
            .map(WatchedFile)
            .map_err(|errno| Error::io("cannot listen for writes", file, &errno.into()))
    }

    /// Stops watching the file.
    pub(crate) fn unwatch(&self, file: WatchedFile) {
        let _gone_with_its_file = self.0.rm_watch(file.0);
    }

    /// The files that processes wrote to since the last call; `None` if that is
    /// unknown because the kernel's queue overflowed.
    pub(crate) fn take(&self) -> Option<Vec<WatchedFile>> {
        let mut written = Vec::new();
        loop {
            match self.0.read_events() {
                Ok(events) => {
                    for event in events {
                        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                            return None;
                        }
                        written.push(WatchedFile(event.wd));
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Some(written),
                Err(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_write_is_heard_of_once_and_no_read_is() {
        let root = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| root.path().join(name));
        for file in [&one, &other] {
            fs::write(file, "").unwrap();
        }
        let written = WriteWatcher::new().unwrap();
        let listened = [&one, &other].map(|file| written.watch(file).unwrap());
        fs::read(&one).unwrap();
        assert_eq!(written.take(), Some(Vec::new()));
        fs::write(&other, "1").unwrap();
        let heard = written.take().unwrap();
        assert!(heard.iter().all(|heard| *heard == listened[1]) && !heard.is_empty());
        assert_eq!(written.take(), Some(Vec::new()));
        written.unwatch(listened[1]);
        fs::write(&other, "1").unwrap();
        let heard = written.take().unwrap();
        assert!(!heard.contains(&listened[0]));
        assert!(written.watch(&root.path().join("none")).is_err());
    }
}
