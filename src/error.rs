//! The crate's one error type. It says what went wrong, at which stage and on which path,
//! whether a retry can help, and what caused it.

mod format;
mod holder;
mod kind;
mod missing_path;
mod stage;
mod untrusted;

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;

use crate::deadline::Deadline;
use crate::id::ParseIdError;
pub use holder::Holder;
pub use kind::{ErrorKind, Retry};
pub use missing_path::MissingPath;
pub use stage::Stage;
pub(crate) use untrusted::escape_untrusted;

/// The result of every fallible function in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure, with everything that was known when it happened.
///
/// `{}` prints one line. `{:#}` adds the chain of causes, without what the line already
/// says.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    stage: Option<Stage>,
    path: Option<PathBuf>,
    errno: Option<Errno>,
    waited: Option<Duration>,
    last_seen: Option<String>,
    holders: Vec<Holder>,
    missing: Vec<MissingPath>,
    found: Vec<String>,
    cause: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `message` says what happened and what was expected.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            stage: None,
            path: None,
            errno: None,
            waited: None,
            last_seen: None,
            holders: Vec::new(),
            missing: Vec::new(),
            found: Vec::new(),
            cause: None,
        }))
    }

    /// The error of a failed system call on `path`; the errno decides the kind.
    pub(crate) fn io(action: &str, path: &Path, error: &io::Error) -> Self {
        let errno = error.raw_os_error().map(Errno::from_raw);
        let kind = errno.map_or(ErrorKind::Io, ErrorKind::of_errno);
        let mut new = match errno {
            Some(errno) => Self::new(kind, format!("{action}: {}", errno.desc())),
            None => Self::new(kind, format!("{action}: {error}")),
        };
        new.0.errno = errno;
        new.0.path = Some(path.to_owned());
        new
    }

    /// The error of a failed system call that has no path; the errno decides the kind.
    pub(crate) fn of_errno(action: &str, errno: Errno) -> Self {
        let message = format!("{action}: {}", errno.desc());
        let mut new = Self::new(ErrorKind::of_errno(errno), message);
        new.0.errno = Some(errno);
        new
    }

    /// The caller's deadline passed at `stage`, or the caller cancelled the call.
    pub(crate) fn timed_out(stage: Stage, deadline: Deadline, waiting_for: &str) -> Self {
        let new = Self::wait_expired(stage, deadline.elapsed(), waiting_for);
        if deadline.is_cancelled() {
            return new.with_kind(ErrorKind::Cancelled);
        }
        new
    }

    /// A wait of `waited` ended without success, whether the caller or the engine set its
    /// limit.
    pub(crate) fn wait_expired(stage: Stage, waited: Duration, waiting_for: &str) -> Self {
        let mut new = Self::new(ErrorKind::TimedOut, format!("waiting for {waiting_for}"));
        new.0.stage = Some(stage);
        new.0.waited = Some(waited);
        new
    }

    /// Sets the stage, unless a deeper call has set one.
    pub(crate) fn at(mut self, stage: Stage) -> Self {
        self.0.stage.get_or_insert(stage);
        self
    }

    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn with_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.0.path = Some(path.into());
        self
    }

    pub(crate) fn with_last_seen(mut self, seen: impl Into<String>) -> Self {
        self.0.last_seen = Some(seen.into());
        self
    }

    pub(crate) fn with_holders(mut self, holders: &[Holder]) -> Self {
        self.0.holders = holders.to_vec();
        self
    }

    pub(crate) fn with_missing(mut self, missing: &[MissingPath]) -> Self {
        self.0.missing = missing.to_vec();
        self
    }

    /// `found` are the names that the device or its content has.
    pub(crate) fn with_found<T: fmt::Display>(mut self, found: &[T]) -> Self {
        self.0.found = found.iter().map(ToString::to_string).collect();
        self
    }

    pub(crate) fn caused_by(mut self, cause: impl StdError + Send + Sync + 'static) -> Self {
        self.0.cause = Some(Box::new(cause));
        self
    }

    /// The kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether repeating the call can help. A failure at stage `tls` depends on files, on the
    /// server's settings and on modules of the kernel, which all change without the caller.
    #[must_use]
    pub fn retry(&self) -> Retry {
        match (self.0.kind.retry(), self.0.stage) {
            (Retry::Never, Some(Stage::Tls)) => Retry::AfterChange,
            (retry, _) => retry,
        }
    }

    /// The stage at which the failure happened.
    #[must_use]
    pub fn stage(&self) -> Option<Stage> {
        self.0.stage
    }

    /// The file that was read, written or opened.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// The kernel's error number.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.0.errno.map(|errno| errno as i32)
    }

    /// The device's state when the wait ended, or the state that the failure left behind.
    /// It comes from this error, else from the nearest cause that has it.
    #[must_use]
    pub fn last_seen(&self) -> Option<&str> {
        self.nearest(|error| error.0.last_seen.as_deref())
    }

    /// The users of the disk, if they are the reason of an `InUse`; empty if no user is
    /// known. They come from this error, else from the nearest cause that has some.
    #[must_use]
    pub fn holders(&self) -> &[Holder] {
        self.nearest_list(|error| &error.holders)
    }

    /// The missing paths of a `TooFewPaths`. They come from this error, else from the
    /// nearest cause that has some.
    #[must_use]
    pub fn missing(&self) -> &[MissingPath] {
        self.nearest_list(|error| &error.missing)
    }

    /// The names that were found in place of the expected one, of an `IdentityMismatch`:
    /// of a SCSI unit, or of the content of an NBD device. Empty if what was found has no
    /// name, or another thing than a name differs. They come from this error, else from the
    /// nearest cause that has some.
    #[must_use]
    pub fn found(&self) -> &[String] {
        self.nearest_list(|error| &error.found)
    }

    fn nearest_list<T>(&self, get: impl Fn(&Inner) -> &[T]) -> &[T] {
        let list = self.nearest(|error| Some(get(&error.0)).filter(|list| !list.is_empty()));
        list.unwrap_or_default()
    }

    /// What `get` says of this error, else of the nearest cause.
    fn nearest<'a, T>(&'a self, get: impl Fn(&'a Self) -> Option<T>) -> Option<T> {
        let mut error = self;
        loop {
            if let Some(found) = get(error) {
                return Some(found);
            }
            error = error.source()?.downcast_ref()?;
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0
            .cause
            .as_deref()
            .map(|cause| cause as &(dyn StdError + 'static))
    }
}

impl From<ParseIdError> for Error {
    fn from(error: ParseIdError) -> Self {
        Self::new(ErrorKind::InvalidInput, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline::Cancel;

    #[test]
    fn a_timeout_names_its_stage_its_length_and_what_was_last_seen() {
        let error = Error::wait_expired(Stage::Settle, Duration::from_millis(2500), "udev")
            .with_last_seen("state=running");
        assert_eq!(
            error.to_string(),
            "timed out after 2.5 s at stage settle, waiting for udev; last seen: state=running"
        );
        assert_eq!(error.retry(), Retry::Again);
    }

    #[test]
    fn a_wait_that_was_cancelled_says_so() {
        let cancel = Cancel::new();
        let deadline = Deadline::after(Duration::from_secs(600)).cancelled_by(&cancel);
        cancel.cancel();
        let mut error = Error::timed_out(Stage::Settle, deadline, "udev");
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        error.0.waited = None;
        let said = error.to_string();
        assert_eq!(said, "cancelled at stage settle, waiting for udev");
    }

    #[test]
    fn the_errno_decides_the_kind_and_the_deepest_stage_stays() {
        let denied = io::Error::from_raw_os_error(Errno::EACCES as i32);
        let error = Error::io("cannot write", Path::new("/x/scan"), &denied)
            .at(Stage::Scan)
            .at(Stage::Probe);
        assert_eq!(error.kind(), ErrorKind::NotPermitted);
        assert_eq!(error.stage(), Some(Stage::Scan));
        assert_eq!(
            error.to_string(),
            "scan: cannot write: Permission denied (/x/scan)"
        );
    }

    #[test]
    fn what_the_nearest_cause_has_last_seen_is_what_the_error_has() {
        let deepest = Error::new(ErrorKind::Io, "deepest").with_last_seen("deepest");
        let nearest = Error::new(ErrorKind::Io, "nearest")
            .with_last_seen("nearest")
            .caused_by(deepest);
        let error = Error::new(ErrorKind::TooFewPaths, "few").caused_by(nearest);
        assert_eq!(error.last_seen(), Some("nearest"));
        assert_eq!(error.to_string(), "few");
        assert_eq!(error.with_last_seen("own").last_seen(), Some("own"));
    }

    #[cfg(feature = "serde")]
    #[test]
    fn what_a_program_acts_on_is_in_fields_of_its_own_wherever_in_the_chain_it_is_known() {
        let busy = io::Error::from_raw_os_error(Errno::EBUSY as i32);
        let refused = Error::io("cannot open", Path::new("/dev/sdb"), &busy);
        let open = Holder::Open {
            pid: 7,
            command: "qemu".to_owned(),
            writes: true,
        };
        let mount = Holder::Mount {
            path: "/mnt".into(),
            pid: None,
        };
        let in_use = Error::new(ErrorKind::InUse, "sdb is in use")
            .with_holders(&[open, mount])
            .caused_by(refused);
        let hctl = "2:0:0:1".parse().unwrap();
        let missing = MissingPath::new(crate::id::RouteKind::Address { hctl }, &in_use);
        let few = Error::new(ErrorKind::TooFewPaths, "few")
            .with_missing(&[missing])
            .with_found(&["naa.5000c500a1b2c3d4"])
            .caused_by(in_use);
        let bytes: &std::ffi::OsStr =
            std::os::unix::ffi::OsStrExt::from_bytes(b"/run/caf\xe9".as_slice());
        let odd = Error::new(ErrorKind::Io, "no").with_path(Path::new(bytes));
        assert_eq!(
            serde_json::to_value(odd).unwrap()["path"],
            "/run/caf\u{fffd}"
        );
        let error = serde_json::to_value(few).unwrap();
        assert_eq!(error["errno"], 16);
        assert_eq!(error["path"], "/dev/sdb");
        let open = serde_json::json!(
            {"kind": "open", "pid": 7, "command": "qemu", "writes": true}
        );
        let mount = serde_json::json!({"kind": "mount", "path": "/mnt", "pid": null});
        assert_eq!(error["holders"], serde_json::json!([open, mount]));
        let via = serde_json::json!({"transport": "address", "hctl": "2:0:0:1"});
        assert_eq!(error["missing"][0]["via"], via);
        let found = serde_json::json!(["naa.5000c500a1b2c3d4"]);
        assert_eq!(error["found"], found);

        let plain = serde_json::to_value(Error::new(ErrorKind::Io, "plain")).unwrap();
        for field in ["holders", "missing", "found"] {
            assert_eq!(plain[field], serde_json::json!([]), "{field}");
        }
        assert_eq!(plain.get("errno"), Some(&serde_json::Value::Null));
    }

    #[test]
    fn the_alternate_form_prints_the_chain() {
        let inner = Error::new(ErrorKind::Io, "inner");
        let outer = Error::new(ErrorKind::IdentityMismatch, "outer").caused_by(inner);
        assert_eq!(format!("{outer:#}"), "outer: inner");
        assert_eq!(outer.to_string(), "outer");
    }
}
