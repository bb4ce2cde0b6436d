//! The file of wanted volumes.

mod whole;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lunbd::reconcile::{Desired, DesiredFile};
use lunbd::{Deadline, Error, ErrorKind, Result};

use crate::threads::Call;

/// The longest file in bytes: tens of thousands of volumes.
const LONGEST: u64 = 16 << 20;

/// Reads a file of wanted volumes within a deadline.
pub(crate) struct FileReader {
    path: PathBuf,
    /// Whether the file is read more than once. Only a regular file can be.
    is_followed: bool,
    /// Waits for a call that has not returned. No other call begins before that, so that a
    /// file server that hangs holds one thread.
    pending: Option<Box<dyn Fn(Deadline) -> bool + Send>>,
    /// The file at the last read.
    read: Option<Stamp>,
    /// The file at the last look, if it was not the one that was read last, and since when.
    seen: Option<(Option<Stamp>, Instant)>,
}

/// What changes with a file: its device, inode and size, and the seconds and nanoseconds of
/// its last changes of content and of attributes.
type Stamp = (u64, u64, u64, [i64; 4]);

impl FileReader {
    pub(crate) fn new(path: &Path, is_followed: bool) -> Self {
        Self {
            path: path.to_owned(),
            is_followed,
            pending: None,
            read: None,
            seen: None,
        }
    }

    /// Reads the file as it is now.
    ///
    /// # Errors
    /// `InvalidInput`, naming the line but not its content; where a later read may succeed
    /// `NotFound` (the file, or the machine's iSCSI name), `NotPermitted`, `Io`, and
    /// `TimedOut`, and then the read stays under way.
    pub(crate) fn read(&mut self, deadline: Deadline) -> Result<Desired> {
        let (path, is_followed) = (self.path.clone(), self.is_followed);
        let act = move || Ok((stamp_of(&path), read(&path, is_followed)));
        let (stamp, desired) = self.run(act, deadline)?;
        (self.read, self.seen) = (stamp, None);
        desired
    }

    /// Whether the file is another than the one that was read last, and has not changed for
    /// `quiet`, as far as the calls of this function saw it. No event announces some changes:
    /// `truncate(2)`, a name for a file that has its content already, a mount, and a change
    /// that another machine makes on a file server.
    ///
    /// # Errors
    /// `TimedOut`, and then the look stays under way; `Io` if no thread can be started.
    pub(crate) fn has_changed(&mut self, quiet: Duration, deadline: Deadline) -> Result<bool> {
        let path = self.path.clone();
        let now = self.run(move || Ok(stamp_of(&path)), deadline)?;
        if now == self.read {
            self.seen = None;
            return Ok(false);
        }
        match self.seen {
            Some((seen, since)) if seen == now => Ok(since.elapsed() >= quiet),
            _ => {
                self.seen = Some((now, Instant::now()));
                Ok(false)
            }
        }
    }

    /// Runs a call that the file system may hold.
    fn run<T: Send + 'static>(
        &mut self,
        act: impl FnOnce() -> Result<T> + Send + 'static,
        deadline: Deadline,
    ) -> Result<T> {
        if let Some(has_ended) = self.pending.take()
            && !has_ended(deadline)
        {
            self.pending = Some(has_ended);
            return Err(self.timed_out());
        }
        let call = Call::start("lunbd-read", act)?;
        call.wait(deadline).unwrap_or_else(|| {
            let has_ended = move |deadline| call.wait(deadline).is_some();
            self.pending = Some(Box::new(has_ended));
            Err(self.timed_out())
        })
    }

    fn timed_out(&self) -> Error {
        let message = format!("reading {}: no answer", self.path.display());
        Error::new(ErrorKind::TimedOut, message)
    }
}

fn stamp_of(path: &Path) -> Option<Stamp> {
    let file = fs::metadata(path).ok()?;
    let times = [
        file.mtime(),
        file.mtime_nsec(),
        file.ctime(),
        file.ctime_nsec(),
    ];
    Some((file.dev(), file.ino(), file.size(), times))
}

/// **Blocks** as long as the file system does, and for a pipe until its end.
fn read(path: &Path, is_followed: bool) -> Result<Desired> {
    let refused = |kind, what: &str| Error::new(kind, format!("{}: {what}", path.display()));
    let text = text_of(path, is_followed).map_err(|error| {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::NotPermitted,
            io::ErrorKind::InvalidData | io::ErrorKind::IsADirectory => ErrorKind::InvalidInput,
            _ => ErrorKind::Io,
        };
        Error::new(kind, format!("cannot read {}: {error}", path.display()))
    })?;
    let file: DesiredFile = toml::from_str(&text).map_err(|error| {
        // `Display` would quote the line, and a secret may be in it.
        let place = error.span().map(|span| place_in(&text, span.start));
        let message = format!(
            "{}{}",
            place.unwrap_or_default(),
            error.message().trim_end()
        );
        refused(ErrorKind::InvalidInput, &message)
    })?;
    let announces_end = file.announces_end();
    let desired = Desired::try_from(file).map_err(|error| {
        let kind = match error.kind() {
            // Two volumes of the file exclude each other.
            ErrorKind::InUse => ErrorKind::InvalidInput,
            kind => kind,
        };
        refused(kind, &error.to_string())
    })?;
    if announces_end {
        whole::require_end(&text).map_err(|what| refused(ErrorKind::InvalidInput, what))?;
    } else if !desired.is_empty() && !text.ends_with('\n') {
        let what = "its last line has no newline: it may be half a file";
        return Err(refused(ErrorKind::InvalidInput, what));
    }
    Ok(desired)
}

fn text_of(path: &Path, is_followed: bool) -> io::Result<String> {
    let invalid = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    let file = open(path, is_followed)?;
    if is_followed && !file.metadata()?.is_file() {
        return invalid("only a regular file can be followed");
    }
    let mut text = String::new();
    let length = file.take(LONGEST + 1).read_to_string(&mut text)?;
    if u64::try_from(length).unwrap_or(u64::MAX) > LONGEST {
        return invalid("it is longer than 16 MiB");
    }
    Ok(text)
}

fn open(path: &Path, is_followed: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    if is_followed {
        // Without this flag the open of a FIFO waits for a writer.
        options.custom_flags(nix::libc::O_NONBLOCK);
    }
    options.read(true).open(path)
}

/// The line and column of a byte, and the key of the line.
fn place_in(text: &str, at: usize) -> String {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|one| *one != '\n').count() + 1;
    let key = text.lines().nth(line - 1).and_then(key_of);
    let key = key.map_or_else(String::new, |key| format!(", {key}"));
    format!("line {line}, column {column}{key}: ")
}

/// A line may hold a secret in place of a key, so only what looks like a key of the format is
/// one.
fn key_of(line: &str) -> Option<&str> {
    let key = line.split_once('=')?.0.trim();
    let is_key = |key: &str| {
        key.bytes()
            .all(|one| one.is_ascii_lowercase() || one == b'_')
    };
    Some(key).filter(|key| !key.is_empty() && is_key(key))
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    #[track_caller]
    fn kind(path: &str) -> ErrorKind {
        let read = FileReader::new(Path::new(path), false).read(soon());
        read.unwrap_err().kind()
    }

    #[test]
    fn a_read_that_fails_is_no_fault_of_what_the_file_says() {
        // No process has memory mapped at address 0, so the kernel answers EIO.
        assert_eq!(kind("/proc/self/mem"), ErrorKind::Io);
        assert_eq!(kind("/"), ErrorKind::InvalidInput);
        assert_eq!(kind("/proc/self/exe"), ErrorKind::InvalidInput);
        assert_eq!(kind("/proc/self/nothing"), ErrorKind::NotFound);
    }

    #[test]
    fn a_read_that_hangs_is_the_only_one_until_it_returns() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("fifo", at("v.toml")).unwrap();
        let mut reader = FileReader::new(&at("v.toml"), false);
        let short = || Deadline::after(Duration::from_millis(50));
        assert_eq!(
            reader.read(short()).unwrap_err().kind(),
            ErrorKind::TimedOut
        );
        fs::remove_file(at("v.toml")).unwrap();
        fs::write(at("v.toml"), "volume = []\n").unwrap();
        assert_eq!(
            reader.read(short()).unwrap_err().kind(),
            ErrorKind::TimedOut
        );
        drop(OpenOptions::new().write(true).open(at("fifo")).unwrap());
        // The first read ends without a volume, and the file is read again.
        assert!(reader.read(soon()).unwrap().is_empty());
    }

    #[test]
    fn a_place_is_a_line_and_a_column_that_count_from_one() {
        for (at, line, column) in [(0, 1, 1), (2, 1, 3), (3, 2, 1), (5, 2, 2), (6, 3, 1)] {
            let expected = format!("line {line}, column {column}: ");
            assert_eq!(place_in("ab\nä\nc", at), expected);
        }
        assert_eq!(place_in("id = 7\n", 5), "line 1, column 6, id: ");
        assert_eq!(place_in("c2VjcmV0==\n", 9), "line 1, column 10: ");
    }
}
