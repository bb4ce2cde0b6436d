//! What fails, for whoever looks at a journal beside its holder. It is no part of
//! the journal: nothing is decided by it, it is not brought to the disk, and it
//! counts for nothing as soon as its writer is gone.
//!
//! Who wrote it has its file locked, so that a reader knows whether that still is:
//! its own lock, which only readers ask for, and for a moment.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::file::BEING_WRITTEN;
use crate::error::Result;
use crate::id::VolumeId;

/// Its file. No record's name ends so.
pub(super) const FAILING: &str = "journal.failing";

const VERSION: u32 = 1;

/// More than ten thousand of them.
const LONGEST: u64 = 16 << 20;

/// A volume whose last step failed, in the words of the process that tries it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Failing {
    /// The volume, which the journal need not know: an attach that left nothing has
    /// left no record.
    pub volume: VolumeId,
    /// What was tried, as `reconcile::StepKind` spells it.
    pub step: String,
    /// Why it failed.
    pub error: String,
    /// How often it has failed.
    pub tries: u32,
    /// When it is tried again, by the machine's clock; `None` where that is not
    /// before something changes. In UTC when serialised.
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

/// Puts it there, locked from the beginning. The lock goes with its file.
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

/// What its writer says, where that is there: nothing where it is not, or where the
/// file is of another version or none of its kind. **Blocks** as the file system
/// does.
pub(super) fn read(directory: &Path) -> Vec<Failing> {
    let path = directory.join(FAILING);
    let mut content = None;
    // Another takes its place, as long as its writer has something to say.
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
