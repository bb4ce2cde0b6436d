//! The compression formats of kernels and modules, recognised by their magic.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// A program that decompresses standard input to standard output.
type Program = &'static [&'static str];

const FORMATS: &[(&[u8], Program)] = &[
    (b"\xfd7zXZ\0", &["xz", "-dc"]),
    (b"\x28\xb5\x2f\xfd", &["zstd", "-dcq"]),
    (b"\x1f\x8b", &["gzip", "-dc"]),
    (b"\x02\x21\x4c\x18", &["lz4", "-dc"]),
    (b"\x5d\0\0", &["xz", "-dc", "--format=lzma"]),
    (b"BZh", &["bzip2", "-dc"]),
];

/// The decompressor for data that starts with `head`, if it is compressed.
pub(crate) fn program_for(head: &[u8]) -> Option<Program> {
    FORMATS
        .iter()
        .find(|(magic, _)| head.starts_with(magic))
        .map(|(_, program)| *program)
}

/// The content of `path`, decompressed if necessary.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let content = fs::read(path).with_context(|| path.display().to_string())?;
    let Some(program) = program_for(&content) else {
        return Ok(content);
    };
    let output = Command::new(program[0])
        .args(&program[1..])
        .stdin(File::open(path)?)
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| program[0].to_owned())?;
    if !output.status.success() {
        bail!("{} {}: {}", program[0], path.display(), output.status);
    }
    Ok(output.stdout)
}
