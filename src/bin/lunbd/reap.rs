//! `lunbd reap`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::{Fate, Phantom, ReapRequest, Reaping};
use lunbd::{Deadline, Engine, Result};

use crate::{arguments, attach, exit, progress::Progress, recover};

/// Exits as the first phantom that stands says, where one was to go.
pub(crate) fn run(engine: &Engine, what: &arguments::Reap, json: bool) -> Result<ExitCode> {
    let progress = Progress::of("looking for phantoms");
    let request = ReapRequest::default().observe(progress.observer());
    let deadline = Deadline::after(what.timeout);
    let directory = what.journal.as_deref();
    let reaping = if what.dry_run {
        // Beside whoever holds the journal, and with nothing changed there.
        let journal = recover::read(engine, directory, deadline)?;
        engine.reapable_beside(&journal, &request, deadline)?
    } else {
        match recover::open_if_there(engine, directory, json, deadline)? {
            Some(journal) => engine.reap_beside(&journal, &request, deadline)?,
            None => engine.reap(&request, deadline)?,
        }
    };
    drop(progress);
    let printed = exit::print(|mut out| {
        if json {
            exit::write_json(&mut out, &reaping)
        } else {
            write(out, &reaping)
        }
    });
    match reaping.first_kept().filter(|_| !what.dry_run) {
        Some(error) => Ok(exit::of(error.kind())),
        None => Ok(printed),
    }
}

fn write(out: &mut dyn Write, reaping: &Reaping) -> io::Result<()> {
    if reaping.phantoms.is_empty() {
        writeln!(out, "no phantoms")?;
    }
    for phantom in &reaping.phantoms {
        write_phantom(out, phantom)?;
    }
    for device in &reaping.unproven {
        let (hctl, why) = (device.hctl, &device.why);
        let node = device.node.as_ref().map(|node| node.display());
        let node = node.map_or_else(String::new, |node| format!(" {node}"));
        writeln!(out, "scsi:{hctl}{node}: no proof, left alone: {why}")?;
    }
    attach::write_phases(out, &reaping.phases)
}

fn write_phantom(out: &mut dyn Write, phantom: &Phantom) -> io::Result<()> {
    let (hctl, node) = (phantom.hctl, phantom.node.display());
    let fate = match &phantom.fate {
        Fate::Reaped => "reaped".to_owned(),
        Fate::Reapable => "would be reaped".to_owned(),
        Fate::Kept(error) => format!("KEPT: {error:#}"),
        _ => "unknown".to_owned(),
    };
    writeln!(out, "scsi:{hctl} {node} {fate}")?;
    writeln!(out, "  was       {}", phantom.identity)?;
    if let Some(volume) = &phantom.volume {
        writeln!(out, "  volume    {volume}")?;
    }
    writeln!(out, "  proof     {}", phantom.proof)
}
