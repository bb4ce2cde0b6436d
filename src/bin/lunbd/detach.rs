//! `lunbd detach`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::{Flush, Place};
use lunbd::{Deadline, DetachRequest, Detachment, Engine, Result};

use crate::{arguments, attach, exit, progress::Progress};

pub(crate) fn run(engine: &Engine, what: arguments::Detach, json: bool) -> Result<ExitCode> {
    let progress = Progress::of(&format!("detaching {}", what.target));
    let observer = progress.observer();
    let deadline = Deadline::after(what.timeout);
    let mut request = DetachRequest::new(what.target).observe(observer);
    if let Some(id) = what.backend {
        request = request.backend(id);
    }
    if what.abandon_unwritten {
        request = request.abandon_unwritten();
    }
    let detachment = engine.detach(request, deadline)?;
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
    let place = &detachment.place;
    if !detachment.changed {
        return writeln!(out, "{place} was detached already");
    }
    let left = match place {
        Place::Nbd { .. } => "free",
        _ => "gone",
    };
    match &detachment.node {
        Some(node) => writeln!(out, "{place} detached: {} is {left}", node.display())?,
        None => writeln!(out, "{place} detached")?,
    }
    match &detachment.flush {
        Some(Flush::Done) => writeln!(out, "  flushed   pages and the device's cache")?,
        Some(Flush::Unreachable(why)) => writeln!(out, "  flushed   nothing: {why}")?,
        Some(Flush::Abandoned(why)) => {
            writeln!(out, "  flushed   NOT: what was unwritten is lost: {why}")?;
        }
        Some(Flush::NoDisk) => writeln!(out, "  flushed   nothing: it had no disk")?,
        _ => {}
    }
    attach::write_phases(out, &detachment.phases)
}
