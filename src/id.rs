//! Names of things, as types: each parses, prints and compares.
//!
//! A value is never guessed from the shape of a string: what a string may mean
//! is said by its prefix, or by the type it is parsed into.

mod backend;
mod device;
mod hctl;
mod lun;
mod nbd_index;
mod nbd_uri;
mod source;
mod wwid;

pub use backend::BackendId;
pub use device::{DevNo, DiskSeq};
pub use hctl::{Hctl, HostNo};
pub use lun::{Addressing, Lun};
pub use nbd_index::NbdIndex;
pub use nbd_uri::{NbdServer, NbdUri};
pub use source::Source;
pub use wwid::Wwid;

/// A string that is not what it was taken for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{input:?} is not {what}: expected {expected}")]
pub struct ParseIdError {
    what: &'static str,
    expected: &'static str,
    input: String,
}

impl ParseIdError {
    fn new(what: &'static str, expected: &'static str, input: &str) -> Self {
        Self {
            what,
            expected,
            input: input.to_owned(),
        }
    }
}

/// A plain decimal number: no sign, no space, no leading zero, so that nothing
/// that the kernel would read as octal gets through.
fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten()
}

/// Serialises a name as the text that it prints and parses.
#[cfg(feature = "serde")]
macro_rules! serde_as_text {
    ($($name:ty),+) => {$(
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}

#[cfg(feature = "serde")]
serde_as_text!(
    BackendId, DevNo, DiskSeq, Hctl, HostNo, Lun, NbdIndex, NbdUri, Source, Wwid
);
