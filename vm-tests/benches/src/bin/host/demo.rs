//! Runs the demo: one VM, one story, one picture.

use std::fs;

use anyhow::{Context, Result};
use vm_bench::story::Figures;

use crate::{lab, picture};

/// Runs the story and draws its picture.
pub(crate) fn run() -> Result<()> {
    let words = ["story", "scsi", "nbd"].map(str::to_owned);
    let figures: Figures = lab::run(&words)?.result;
    let path = lab::kept("story.svg")?;
    fs::write(&path, picture::draw(&figures)).with_context(|| path.display().to_string())?;
    println!("\npicture: {}", path.display());
    Ok(())
}
