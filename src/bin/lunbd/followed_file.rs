//! The file that `apply --watch` follows: by the kernel's events, and by looks at it for the
//! changes that no event announces.

use std::path::Path;
use std::time::{Duration, Instant};

use lunbd::reconcile::Desired;
use lunbd::{Deadline, Error, ErrorKind, Result};

use crate::desired_file::FileReader;
use crate::watch_file::FileWatch;

/// How long the looks wait.
#[derive(Debug, Clone, Copy)]
struct Pauses {
    /// The pause between two looks.
    look: Duration,
    /// How long a file stays the same before it counts as complete.
    quiet: Duration,
    /// The same for a file that its writer keeps open. A copy over a network may stall.
    quiet_while_open: Duration,
}

const PAUSES: Pauses = Pauses {
    look: Duration::from_secs(10),
    quiet: Duration::from_secs(5),
    quiet_while_open: Duration::from_secs(60),
};

/// A file, and how it is followed.
pub(crate) struct FollowedFile {
    watch: FileWatch,
    reader: FileReader,
    /// How long one read may take.
    timeout: Duration,
    pauses: Pauses,
}

impl FollowedFile {
    /// Follows the file from now on.
    ///
    /// # Errors
    /// As [`FileWatch::within`].
    pub(crate) fn within(path: &Path, timeout: Duration, deadline: Deadline) -> Result<Self> {
        Ok(Self {
            // The watch starts before the first read, so that no change is missed.
            watch: FileWatch::within(path, deadline)?,
            reader: FileReader::new(path, true),
            timeout,
            pauses: PAUSES,
        })
    }

    /// Reads the file before it is followed, once no process writes to it.
    ///
    /// # Errors
    /// Those of [`FileReader::read`] and [`FileWatch::wait`]; `TimedOut` if a process keeps
    /// the file open that has written to it.
    pub(crate) fn read_first(&mut self, deadline: Deadline) -> Result<Desired> {
        loop {
            let desired = self.reader.read(deadline);
            if !self.watch.has_changed()? {
                return desired;
            }
            if !self.watch.wait(deadline.remaining())? {
                let message = "waiting for the writer of the file to close it";
                return Err(Error::new(ErrorKind::TimedOut, message));
            }
        }
    }

    /// Waits until the file may have changed and is complete, or until `again_after` has
    /// passed.
    ///
    /// # Errors
    /// `Io` if the file can no longer be watched.
    pub(crate) fn wait(&mut self, again_after: Option<Duration>) -> Result<()> {
        let begun = Instant::now();
        loop {
            let left = again_after.map(|after| after.saturating_sub(begun.elapsed()));
            let left = left.filter(|left| !left.is_zero());
            let limit = left.map_or(self.pauses.look, |left| left.min(self.pauses.look));
            if self.watch.wait(limit)? {
                return Ok(());
            }
            let is_open = self.watch.is_open();
            if !is_open && again_after.is_some_and(|after| begun.elapsed() >= after) {
                return Ok(());
            }
            let quiet = if is_open {
                self.pauses.quiet_while_open
            } else {
                self.pauses.quiet
            };
            let deadline = Deadline::after(self.timeout);
            match self.reader.has_changed(quiet, deadline) {
                Ok(false) => {}
                Ok(true) => return self.watch.follow_anew(),
                // The read fails too, and that is reported.
                Err(_) => return Ok(()),
            }
        }
    }

    /// Reads the file after a change. `Ok(None)` if it has changed meanwhile, and may have
    /// been read in part: the next wait reports that change.
    ///
    /// # Errors
    /// `Io` if the file can no longer be watched; the inner errors are those of
    /// [`FileReader::read`].
    pub(crate) fn read(&mut self) -> Result<Result<Option<Desired>>> {
        let desired = self.reader.read(Deadline::after(self.timeout));
        Ok(if self.watch.has_changed()? {
            Ok(None)
        } else {
            desired.map(Some)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::PathBuf;
    use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
    use std::thread;

    use nix::fcntl::{AT_FDCWD, AtFlags};
    use nix::unistd::{linkat, truncate};
    use tempfile::TempDir;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);
    const SHORT: Pauses = Pauses {
        look: Duration::from_millis(100),
        quiet: Duration::from_millis(50),
        quiet_while_open: Duration::from_secs(2),
    };

    /// The number of volumes at each read, or the kind of its error.
    struct Reads(Receiver<std::result::Result<usize, ErrorKind>>);

    impl Reads {
        fn of(path: &Path) -> Self {
            let mut file = FollowedFile::within(path, LIMIT, Deadline::after(LIMIT)).unwrap();
            file.pauses = SHORT;
            let _first = file.read_first(Deadline::after(LIMIT));
            let (sender, receiver) = mpsc::channel();
            thread::spawn(move || {
                while file.wait(None).is_ok() {
                    let Ok(read) = file.read() else { return };
                    let Some(read) = read.transpose() else {
                        continue;
                    };
                    let read = read.map(|desired| desired.len());
                    if sender.send(read.map_err(|error| error.kind())).is_err() {
                        return;
                    }
                }
            });
            Self(receiver)
        }

        #[track_caller]
        fn becomes(&self, expected: std::result::Result<usize, ErrorKind>) {
            assert_eq!(self.0.recv_timeout(LIMIT).unwrap(), expected);
            self.stays();
        }

        #[track_caller]
        fn stays(&self) {
            let seen = self.0.recv_timeout(Duration::from_millis(600));
            assert_eq!(seen, Err(RecvTimeoutError::Timeout));
        }
    }

    fn text(volumes: usize) -> String {
        let volume = |lun| format!("[[volume]]\nid = \"v{lun}\"\nsource = \"scsi:1:0:0:{lun}\"\n");
        (0..volumes).map(volume).collect()
    }

    fn directory_with(volumes: usize) -> (TempDir, PathBuf) {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("v.toml");
        fs::write(&path, text(volumes)).unwrap();
        (directory, path)
    }

    #[test]
    fn a_file_that_is_complete_when_it_gets_its_name_is_read() {
        let (directory, path) = directory_with(1);
        fs::remove_file(&path).unwrap();
        let reads = Reads::of(&path);
        let mut nameless = OpenOptions::new()
            .write(true)
            .custom_flags(nix::libc::O_TMPFILE)
            .open(directory.path())
            .unwrap();
        nameless.write_all(text(2).as_bytes()).unwrap();
        let at = format!("/proc/self/fd/{}", nameless.as_raw_fd());
        linkat(AT_FDCWD, &*at, AT_FDCWD, &path, AtFlags::AT_SYMLINK_FOLLOW).unwrap();
        drop(nameless);
        reads.becomes(Ok(2));
        // The events of the new file arrive again.
        fs::write(&path, text(3)).unwrap();
        reads.becomes(Ok(3));
    }

    #[test]
    fn a_file_that_is_cut_by_its_path_is_read() {
        let (_directory, path) = directory_with(2);
        let reads = Reads::of(&path);
        truncate(&path, i64::try_from(text(1).len()).unwrap()).unwrap();
        reads.becomes(Ok(1));
    }

    #[test]
    fn a_file_that_its_writer_keeps_open_is_read_once_it_has_been_quiet_for_long() {
        let (_directory, path) = directory_with(1);
        let reads = Reads::of(&path);
        let mut file = File::create(&path).unwrap();
        file.write_all(text(2).as_bytes()).unwrap();
        reads.stays();
        file.write_all(b"\n").unwrap();
        reads.stays();
        reads.becomes(Ok(2));
        file.write_all(b"\n").unwrap();
        drop(file);
        reads.becomes(Ok(2));
    }

    #[test]
    fn a_file_that_is_gone_is_reported() {
        let (_directory, path) = directory_with(1);
        let reads = Reads::of(&path);
        fs::remove_file(&path).unwrap();
        reads.becomes(Err(ErrorKind::NotFound));
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_read_again() {
        let (_directory, path) = directory_with(1);
        let deadline = || Deadline::after(LIMIT);
        let mut file = FollowedFile::within(&path, LIMIT, deadline()).unwrap();
        assert_eq!(file.read_first(deadline()).unwrap().len(), 1);
        // A writer comes between the end of the wait and the read.
        let mut writer = File::create(&path).unwrap();
        writer.write_all(text(1).as_bytes()).unwrap();
        assert!(file.read().unwrap().unwrap().is_none());
        writer
            .write_all(&text(2).as_bytes()[text(1).len()..])
            .unwrap();
        drop(writer);
        file.wait(None).unwrap();
        assert_eq!(file.read().unwrap().unwrap().unwrap().len(), 2);
    }
}
