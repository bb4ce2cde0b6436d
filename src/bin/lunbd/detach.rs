//! `lunbd detach`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::Flush;
use lunbd::{Deadline, Detachment, Engine, Result};

use crate::{arguments, attach, exit, progress::Progress};

pub(crate) fn run(engine: &Engine, what: &arguments::Detach, json: bool) -> Result<ExitCode> {
    let progress = Progress::of(&format!("detaching {}", what.target));
    let observer = progress.observer();
    let deadline = Deadline::after(what.timeout);
    let detachment = engine.detach_observed(&what.target, Some(&observer), deadline)?;
    drop(progress);
    Ok(exit::print(|mut out| {
        if json {
            exit::write_json(&mut out, &detachment)
        } else {
            write(out, &detachment)
        }
    }))
}

fn write(out: &mut dyn Write, detachment: &Detachment) -> io::Result<()> {
    let hctl = detachment.hctl;
    if !detachment.changed {
        return writeln!(out, "scsi:{hctl} was detached already");
    }
    match &detachment.node {
        Some(node) => writeln!(out, "scsi:{hctl} detached: {} is gone", node.display())?,
        None => writeln!(out, "scsi:{hctl} detached")?,
    }
    match &detachment.flush {
        Some(Flush::Done) => writeln!(out, "  flushed   pages and the device's cache")?,
        Some(Flush::Unreachable(why)) => writeln!(out, "  flushed   nothing: {why}")?,
        Some(Flush::NoDisk) => writeln!(out, "  flushed   nothing: it had no disk")?,
        _ => {}
    }
    attach::write_phases(out, &detachment.phases)
}
