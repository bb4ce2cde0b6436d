//! Reads files of `/proc`. The kernel does not tell their lengths. It returns a file of many records
//! in parts of about a page (`fs/seq_file.c`), so a short read does not show the end.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use crate::error::{Error, Result};

/// In so much room, in bytes, each read takes all that the kernel returns at once.
const ROOM: usize = 16 << 10;

/// The most that is read, in bytes: a million mappings take about half as much.
const LONGEST: u64 = 256 << 20;

/// Reads a file that is one record, which the kernel returns whole to a read with enough room
/// (`fs/seq_file.c`, `single_open`). What does not fit into [`ROOM`] is cut off.
///
/// # Errors
/// Those of the kernel.
pub(super) fn read_record(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; ROOM];
    let length = File::open(path)?.read(&mut bytes)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// Reads a whole file as text.
///
/// # Errors
/// By the errno.
pub(super) fn read_text(path: &Path) -> Result<String> {
    let bytes = read(path).map_err(|error| Error::io("cannot read", path, &error))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// # Errors
/// Those of [`read_into`].
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    read_into(path, &mut bytes)?;
    Ok(bytes)
}

/// Reads a file in place of what is in `bytes`.
///
/// # Errors
/// Those of the kernel; `FileTooLarge` for a file that is longer than any that the kernel makes.
pub(super) fn read_into(path: &Path, bytes: &mut Vec<u8>) -> io::Result<()> {
    bytes.clear();
    bytes.reserve(ROOM);
    let length = File::open(path)?.take(LONGEST).read_to_end(bytes)?;
    if u64::try_from(length).is_ok_and(|length| length >= LONGEST) {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(())
}
