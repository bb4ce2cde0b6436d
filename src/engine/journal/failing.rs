//! The failing volumes, published for processes that read a journal while another one
//! holds it. The file is no part of the journal: no decision depends on it, it is not
//! synced to the disk, and it no longer counts when its writer is gone.
//!
//! The writer locks the file, so that a reader knows whether the writer still runs. Only
//! readers ask for this lock, and only briefly.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::engine::journal::file::BEING_WRITTEN;
use crate::error::Result;
use crate::id::VolumeId;

/// The file's name. No record has this ending.
pub(super) const FAILING: &str = "journal.failing";

const VERSION: u32 = 1;

/// Enough for more than ten thousand entries, in bytes.
const LONGEST: u64 = 16 << 20;

/// A volume whose last step failed, as the process that works on it reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Failing {
    /// The volume. The journal may have no record of it, since an attach that left
    /// nothing has left no record.
    pub volume: VolumeId,
    /// The step, as `reconcile::StepKind` spells it.
    pub step: String,
    /// Why it failed.
    pub error: String,
    /// How often it has failed.
    pub tries: u32,
    /// When the next attempt is due, by the machine's clock; `None` where it waits for a
    /// change. In UTC when serialised.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub next_try: Option<SystemTime>,
}

#[expect(clippy::ref_option, reason = "serde's signature")]
fn as_text<S: Serializer>(time: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
    let text = time.map(|time| humantime::format_rfc3339_millis(time).to_string());
    text.serialize(serializer)
}

fn from_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SystemTime>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let parsed = text.map(|text| humantime::parse_rfc3339(&text));
    parsed.transpose().map_err(serde::de::Error::custom)
}

impl Failing {
    pub(crate) fn new(volume: VolumeId, step: &str, error: String, tries: u32) -> Self {
        Self {
            volume,
            step: step.to_owned(),
            error,
            tries,
            next_try: None,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    failing: Vec<Failing>,
}

/// Writes the file, locked from the beginning. Dropping the returned file releases the
/// lock.
pub(super) fn write(path: &Path, failing: Vec<Failing>) -> io::Result<Flock<File>> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(BEING_WRITTEN);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(&beside)?;
    let mut file =
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)?;
    let content = Content {
        version: VERSION,
        failing,
    };
    file.write_all(&serde_json::to_vec(&content)?)?;
    fs::rename(&beside, path)?;
    Ok(file)
}

/// The failures that the writer reports, while it runs; empty where it does not run, and
/// where the file has another version or another format. **Blocks** as long as the file
/// system does.
pub(super) fn read(directory: &Path) -> Vec<Failing> {
    let path = directory.join(FAILING);
    let mut content = None;
    // The writer replaces the file whenever its report changes, so the call retries.
    for _ in 0..16 {
        let Ok(file) = File::open(&path) else {
            break;
        };
        let same = |file: &File| {
            let now = fs::metadata(&path).ok()?;
            Some(now.ino() == file.metadata().ok()?.ino())
        };
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(file) if same(&file) == Some(true) => break,
            Ok(_) => {}
            Err((file, Errno::EWOULDBLOCK)) => {
                let mut bytes = Vec::new();
                let read = file.take(LONGEST).read_to_end(&mut bytes);
                content = read.ok().map(|_| bytes);
                break;
            }
            Err(_) => break,
        }
    }
    let parsed = content.and_then(|bytes| serde_json::from_slice::<Content>(&bytes).ok());
    let known = parsed.filter(|content| content.version == VERSION);
    known.map(|content| content.failing).unwrap_or_default()
}
