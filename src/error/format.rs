//! The text and the JSON of an error.

use std::error::Error as _;
use std::fmt;
#[cfg(feature = "serde")]
use std::path::Path;

use super::{Error, ErrorKind};
#[cfg(feature = "serde")]
use super::{Result, Stage};

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        if inner.kind.is_timeout_or_cancel() {
            let cancelled = inner.kind == ErrorKind::Cancelled;
            f.write_str(if cancelled { "cancelled" } else { "timed out" })?;
            if let Some(waited) = inner.waited {
                write!(f, " after {:.1} s", waited.as_secs_f64())?;
            }
            if let Some(stage) = inner.stage {
                write!(f, " at stage {stage}")?;
            }
            write!(f, ", {}", inner.message)?;
        } else {
            if let Some(stage) = inner.stage {
                write!(f, "{stage}: ")?;
            }
            f.write_str(&inner.message)?;
        }
        if let Some(path) = &inner.path {
            write!(f, " ({})", path.display())?;
        }
        if let Some(seen) = &inner.last_seen {
            write!(f, "; last seen: {seen}")?;
        }
        if f.alternate() {
            let mut cause = self.source();
            while let Some(error) = cause {
                let text = error.to_string();
                if !inner.message.contains(&text) {
                    write!(f, ": {text}")?;
                }
                cause = error.source();
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self:#}", self.kind().as_str())
    }
}

/// Serialises the object that `--json` prints for an error.
#[cfg(feature = "serde")]
impl serde::Serialize for Error {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut object = serializer.serialize_struct("Error", 10)?;
        object.serialize_field("kind", self.kind().as_str())?;
        object.serialize_field("stage", &self.stage().map(Stage::as_str))?;
        object.serialize_field("message", &format!("{self:#}"))?;
        object.serialize_field("last_seen", &self.last_seen())?;
        object.serialize_field("retry", self.retry().as_str())?;
        object.serialize_field("errno", &self.nearest(Self::errno))?;
        // JSON has no place for bytes that are no UTF-8.
        let path = self.nearest(Self::path).map(Path::to_string_lossy);
        object.serialize_field("path", &path)?;
        object.serialize_field("holders", self.holders())?;
        object.serialize_field("missing", self.missing())?;
        object.serialize_field("found", self.found())?;
        object.end()
    }
}
