//! Which files processes have written to.

use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

use crate::error::{Error, Result};

/// Hears of each write through any process of the file systems' instance: of one of
/// sysfs, all mounts in the same network namespace. The kernel's own changes of a file
/// are none.
#[derive(Debug)]
pub(crate) struct Written(Inotify);

/// A file that is listened to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Listened(WatchDescriptor);

impl Written {
    pub(crate) fn new() -> Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        inotify
            .map(Self)
            .map_err(|errno| Error::of_errno("cannot listen for writes", errno))
    }

    /// Listens to this file from now on.
    ///
    /// # Errors
    /// `Vanished` where it is not there; by the errno where the user may listen to no
    /// more files (`fs.inotify.max_user_watches`).
    pub(crate) fn listen(&self, file: &Path) -> Result<Listened> {
        // inotify reports a write when it returns, and a refused write at its close.
        let events = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CLOSE_WRITE;
        self.0
            .add_watch(file, events)
            .map(Listened)
            .map_err(|errno| Error::io("cannot listen for writes", file, &errno.into()))
    }

    /// Does not listen to it any more.
    pub(crate) fn drop(&self, listened: Listened) {
        let _gone_with_its_file = self.0.rm_watch(listened.0);
    }

    /// The files that were written to since the last call, before this one; `None`
    /// where that is not known, since the kernel kept no more of them.
    pub(crate) fn take(&self) -> Option<Vec<Listened>> {
        let mut written = Vec::new();
        loop {
            match self.0.read_events() {
                Ok(events) => {
                    for event in events {
                        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                            return None;
                        }
                        written.push(Listened(event.wd));
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
        let written = Written::new().unwrap();
        let listened = [&one, &other].map(|file| written.listen(file).unwrap());
        fs::read(&one).unwrap();
        assert_eq!(written.take(), Some(Vec::new()));
        fs::write(&other, "1").unwrap();
        let heard = written.take().unwrap();
        assert!(heard.iter().all(|heard| *heard == listened[1]) && !heard.is_empty());
        assert_eq!(written.take(), Some(Vec::new()));
        written.drop(listened[1]);
        fs::write(&other, "1").unwrap();
        let heard = written.take().unwrap();
        assert!(!heard.contains(&listened[0]));
        assert!(written.listen(&root.path().join("none")).is_err());
    }
}
