//! `lunbd reap`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::{ReapOutcome, ReapReport, ReapRequest, StaleLun};
use lunbd::{Deadline, Engine, Result};

use crate::envelope::{self, Type};
use crate::{arguments, attach, exit, progress::Progress, recover};

/// Unless it is a dry run, the exit code is that of the first stale LUN that was skipped.
pub(crate) fn run(engine: &Engine, what: &arguments::Reap, json: bool) -> Result<ExitCode> {
    let progress = Progress::of("looking for stale LUNs");
    let request = ReapRequest::default().observe(progress.observer());
    let deadline = Deadline::after(what.timeout);
    // Other processes may hold these journals and change them, so the engine reads each
    // one again before it removes a device.
    let mut journals = vec![recover::place(engine)];
    journals.extend(what.journal.clone());
    if !json {
        for journal in &journals {
            let view = recover::read(engine, Some(journal), deadline)?;
            // The command goes on if stderr is closed.
            let _ = recover::write_problems(&mut io::stderr(), &view.problems);
        }
    }
    let request = if what.dry_run {
        request.dry_run()
    } else {
        request
    };
    let report = engine.reap_except_volumes_in(&journals, &request, deadline)?;
    drop(progress);
    let printed = exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::Reap, &report)
        } else {
            write(out, &report)
        }
    });
    match report.first_skipped().filter(|_| !what.dry_run) {
        Some(error) => Ok(exit::of(error.kind())),
        None => Ok(printed),
    }
}

fn write(out: &mut dyn Write, report: &ReapReport) -> io::Result<()> {
    if report.stale_luns.is_empty() {
        writeln!(out, "no stale LUNs")?;
    }
    for stale_lun in &report.stale_luns {
        write_stale_lun(out, stale_lun)?;
    }
    for device in &report.unproven {
        let (hctl, why) = (device.hctl, &device.why);
        let node = device.node.as_ref().map(|node| node.display());
        let node = node.map_or_else(String::new, |node| format!(" {node}"));
        writeln!(out, "scsi:{hctl}{node}: no proof, left alone: {why}")?;
    }
    attach::write_phases(out, &report.phases)
}

fn write_stale_lun(out: &mut dyn Write, stale_lun: &StaleLun) -> io::Result<()> {
    let (hctl, node) = (stale_lun.hctl, stale_lun.node.display());
    let outcome = match &stale_lun.outcome {
        ReapOutcome::Reaped => "reaped".to_owned(),
        ReapOutcome::Reapable => "would be reaped".to_owned(),
        ReapOutcome::Skipped(error) => format!("SKIPPED: {error:#}"),
        _ => "unknown".to_owned(),
    };
    writeln!(out, "scsi:{hctl} {node} {outcome}")?;
    writeln!(out, "  was       {}", stale_lun.identity)?;
    if let Some(volume) = &stale_lun.volume {
        writeln!(out, "  volume    {volume}")?;
    }
    writeln!(out, "  proof     {}", stale_lun.proof)
}
