//! The file of wanted volumes.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

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
    /// A read that has not returned. No other read begins before it returns, so that a file
    /// server that hangs holds one thread.
    pending: Option<Call<Desired>>,
}

impl FileReader {
    pub(crate) fn new(path: &Path, is_followed: bool) -> Self {
        Self {
            path: path.to_owned(),
            is_followed,
            pending: None,
        }
    }

    /// Reads the file as it is now.
    ///
    /// # Errors
    /// `InvalidInput`, naming the line but not its content; where a later read may succeed
    /// `NotFound` (the file, or the machine's iSCSI name), `NotPermitted`, `Io`, and
    /// `TimedOut`, and then the read stays under way.
    pub(crate) fn read(&mut self, deadline: Deadline) -> Result<Desired> {
        if let Some(pending) = self.pending.take()
            && pending.wait(deadline).is_none()
        {
            return Err(self.timed_out(pending));
        }
        let (path, is_followed) = (self.path.clone(), self.is_followed);
        let call = Call::start("lunbd-read", move || read(&path, is_followed))?;
        match call.wait(deadline) {
            Some(result) => result,
            None => Err(self.timed_out(call)),
        }
    }

    fn timed_out(&mut self, pending: Call<Desired>) -> Error {
        self.pending = Some(pending);
        let message = format!("reading {}: no answer", self.path.display());
        Error::new(ErrorKind::TimedOut, message)
    }
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
    Desired::try_from(file).map_err(|error| {
        let kind = match error.kind() {
            // Two volumes of the file exclude each other.
            ErrorKind::InUse => ErrorKind::InvalidInput,
            kind => kind,
        };
        refused(kind, &error.to_string())
    })
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
    use std::time::Duration;

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
        std::fs::remove_file(at("v.toml")).unwrap();
        std::fs::write(at("v.toml"), "volume = []\n").unwrap();
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
