//! `lunbd resize`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::{ResizeRequest, Resized};
use lunbd::{Deadline, Engine, Error, ErrorKind, Result};

use crate::envelope::{self, Type};
use crate::{arguments, attach, exit, progress::Progress, recover};

pub(crate) fn run(engine: &Engine, what: arguments::Resize, json: bool) -> Result<ExitCode> {
    let deadline = Deadline::after(what.timeout);
    let Some(target) = what.of.target else {
        let volume = what.of.volume.as_ref().ok_or_else(nothing)?;
        let progress = Progress::of(&format!("resizing {volume}"));
        let journal = recover::open_and_tell(engine, what.journal.as_deref(), json, deadline)?;
        let resized = engine.resize_volume(&journal, volume, what.at_least, deadline)?;
        drop(progress);
        return Ok(show(&resized, json));
    };
    let progress = Progress::of(&format!("resizing {target}"));
    let mut request = ResizeRequest::new(target).observe(progress.observer());
    if let Some(name) = what.of.expect {
        request = request.expect(name);
    }
    if let Some(id) = what.of.backend {
        request = request.backend(id);
    }
    if let Some(bytes) = what.at_least {
        request = request.at_least(bytes);
    }
    let resized = engine.resize(&request, deadline)?;
    drop(progress);
    Ok(show(&resized, json))
}

/// This cannot happen: clap refuses a command line without a target and a volume.
fn nothing() -> Error {
    Error::new(ErrorKind::InvalidInput, "nothing to resize")
}

fn show(resized: &Resized, json: bool) -> ExitCode {
    exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::Resize, resized)
        } else {
            write(out, resized)
        }
    })
}

fn write(out: &mut dyn Write, resized: &Resized) -> io::Result<()> {
    let (node, size) = (resized.node.display(), indicatif::HumanBytes(resized.size));
    if resized.changed {
        let before = indicatif::HumanBytes(resized.old_size);
        writeln!(
            out,
            "{node} resized from {before} to {size} ({} bytes)",
            resized.size
        )?;
    } else {
        writeln!(
            out,
            "{node} had its size already: {size} ({} bytes)",
            resized.size
        )?;
    }
    if let Some(map) = &resized.map {
        writeln!(out, "  map       {map}")?;
    }
    for path in &resized.paths {
        writeln!(out, "  path      {path}")?;
    }
    attach::write_phases(out, &resized.phases)
}
