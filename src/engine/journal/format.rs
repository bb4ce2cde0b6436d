//! A record as bytes: one line with a magic word, the version and the checksum, then JSON
//! that a person can read.
//!
//! ```text
//! lunbd-journal 2 sha256:HEX
//! { "volume": "pvc-1", ... }
//! ```

use std::fmt::Write as _;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::engine::journal::record::Record;
use crate::error::{Error, ErrorKind, Result, Stage};

/// The beginning of a record. The version follows it.
const MAGIC: &str = "lunbd-journal ";

/// The latest version that this library reads. It reads all earlier ones too.
const VERSION: u32 = 3;

/// The version of a record without a proven detach, which earlier versions of this library
/// read too.
const WITHOUT_DETACHED: u32 = 2;

/// The longest file that is read, in bytes: longer than any record, and short enough that
/// another file does not fill the memory.
pub(super) const LONGEST: usize = 256 << 10;

/// Why bytes are not a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// In one word.
    pub kind: FaultKind,
    /// The details, for people.
    pub text: String,
}

/// Why a file in the journal's directory is not a record, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FaultKind {
    /// It begins as a record does, and its checksum does not match its content.
    Torn,
    /// It is whole, and a later version of this library wrote it. A journal with such a file
    /// is not opened.
    Newer,
    /// It is something else, or another volume's record.
    Foreign,
    /// It could not be read, and is left where it is.
    Unreadable,
    /// An earlier start set it aside.
    SetAsideEarlier,
}

impl Fault {
    pub(super) fn new(kind: FaultKind, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { kind, text }
    }
}

impl Record {
    /// The bytes of its file.
    ///
    /// # Errors
    /// `Io` if it cannot be serialised, which happens with no record.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let body = serde_json::to_vec_pretty(self).map_err(|error| {
            let message = format!("cannot serialize the record of {}: {error}", self.volume);
            Error::new(ErrorKind::Io, message).at(Stage::Journal)
        })?;
        let version = match self.detached {
            Some(_) => VERSION,
            None => WITHOUT_DETACHED,
        };
        Ok(sealed(version, &body))
    }

    /// Puts the first line before a body.
    #[doc(hidden)]
    #[must_use]
    pub fn seal(body: &[u8]) -> Vec<u8> {
        sealed(WITHOUT_DETACHED, body)
    }

    /// Reads what [`to_bytes`](Self::to_bytes) returned, and refuses anything else.
    pub fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        let Some(rest) = bytes.strip_prefix(MAGIC.as_bytes()) else {
            return Err(if MAGIC.as_bytes().starts_with(bytes) {
                Fault::new(FaultKind::Torn, "it ends within its first line")
            } else {
                Fault::new(
                    FaultKind::Foreign,
                    "it does not start with a record's header",
                )
            });
        };
        let end = rest.iter().position(|&byte| byte == b'\n');
        let torn = |text| Fault::new(FaultKind::Torn, text);
        let (line, body) = end
            .and_then(|end| Some((rest.get(..end)?, rest.get(end + 1..)?)))
            .ok_or_else(|| torn("it ends in its first line"))?;
        let version = line.split(|&byte| byte == b' ').next().unwrap_or(line);
        let version = std::str::from_utf8(version).ok();
        match version.and_then(|version| version.parse::<u32>().ok()) {
            // Only the header that this library would write is accepted, so that no flipped
            // bit gets through.
            Some(version) if bytes.strip_suffix(body) == Some(header(version, body).as_bytes()) => {
                if version > VERSION {
                    let text =
                        format!("it is of version {version}, and this library reads {VERSION}");
                    return Err(Fault::new(FaultKind::Newer, text));
                }
            }
            Some(version) if version > VERSION && !contains(line, b" sha256:") => {
                let text = format!("it is of version {version}, with another checksum");
                return Err(Fault::new(FaultKind::Newer, text));
            }
            _ => return Err(torn("its checksum does not match its content")),
        }
        let record: Self = serde_json::from_slice(body).map_err(|error| {
            let text = format!(
                "its checksum matches, but this version does not know its content: {error}"
            );
            Fault::new(FaultKind::Newer, text)
        })?;
        if record.spec.sources.is_empty() {
            return Err(Fault::new(FaultKind::Foreign, "its volume has no source"));
        }
        Ok(record)
    }
}

fn sealed(version: u32, body: &[u8]) -> Vec<u8> {
    let mut sealed = header(version, body).into_bytes();
    sealed.extend_from_slice(body);
    sealed
}

fn header(version: u32, body: &[u8]) -> String {
    let begin = format!("{MAGIC}{version}");
    let digest = match version {
        1 => digest(body),
        // The digest covers the version, so that a flipped bit does not make a later one.
        _ => digest(&[begin.as_bytes(), b"\n", body].concat()),
    };
    format!("{begin} sha256:{digest}\n")
}

fn contains(line: &[u8], what: &[u8]) -> bool {
    line.windows(what.len()).any(|part| part == what)
}

/// The SHA-256 of `bytes` in hex.
pub(super) fn digest(bytes: &[u8]) -> String {
    let mut hex = String::with_capacity(64);
    for byte in Sha256::digest(bytes) {
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

/// A file in the journal's directory that is not a record.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// Its present path.
    pub file: PathBuf,
    /// What is wrong with it.
    pub kind: FaultKind,
    /// The details, for people.
    pub text: String,
}
