//! `lunbd resize`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::{ResizeRequest, Resized};
use lunbd::{Deadline, Engine, Result};

use crate::{arguments, attach, exit, progress::Progress};

pub(crate) fn run(engine: &Engine, what: arguments::Resize, json: bool) -> Result<ExitCode> {
    let progress = Progress::of(&format!("resizing {}", what.target));
    let mut request = ResizeRequest::new(what.target).observe(progress.observer());
    if let Some(name) = what.expect {
        request = request.expect(name);
    }
    if let Some(id) = what.backend {
        request = request.backend(id);
    }
    if let Some(bytes) = what.at_least {
        request = request.at_least(bytes);
    }
    let resized = engine.resize(&request, Deadline::after(what.timeout))?;
    drop(progress);
    Ok(exit::print(|mut out| {
        if json {
            exit::write_json(&mut out, &resized)
        } else {
            write(out, &resized)
        }
    }))
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
