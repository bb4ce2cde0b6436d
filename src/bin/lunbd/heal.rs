//! `lunbd heal`

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use lunbd::engine::{HealOutcome, Healing};
use lunbd::{Deadline, Engine, Result};
use serde::Serialize;

use crate::{arguments, exit, progress::Progress};

#[derive(Serialize)]
struct Report<'a> {
    devices: &'a [Healing],
}

/// Exits with 1 where a device is left that serves no I/O.
pub(crate) fn run(engine: &Engine, what: arguments::Heal, json: bool) -> Result<ExitCode> {
    if what.watch {
        return watch(engine, json);
    }
    let progress = Progress::of("healing");
    let deadline = Deadline::after(what.timeout);
    let healings = match &what.source {
        Some(source) => vec![engine.heal_source(source, &what.nbd.options(), deadline)?],
        None => engine.heal(deadline)?,
    };
    drop(progress);
    let printed = exit::print(|mut out| {
        if json {
            let devices = &healings;
            return exit::write_json(&mut out, &Report { devices });
        }
        if healings.is_empty() {
            return writeln!(out, "no NBD device whose server is known");
        }
        healings.iter().try_for_each(|healing| write(out, healing))
    });
    let all_serve = healings.iter().all(|healing| healing.outcome.serves());
    Ok(if all_serve {
        printed
    } else {
        ExitCode::FAILURE
    })
}

/// Runs until it is interrupted or its reader goes away.
fn watch(engine: &Engine, json: bool) -> Result<ExitCode> {
    const TO_LISTEN: Duration = Duration::from_secs(30);
    let mut healer = engine.healer(Deadline::after(TO_LISTEN))?;
    loop {
        for healing in healer.next(Deadline::after(Duration::MAX))? {
            let mut out = io::stdout().lock();
            let written = if json {
                exit::write_json(&mut out, &healing)
            } else {
                write(&mut out, &healing)
            };
            if let Err(error) = written.and_then(|()| out.flush()) {
                return Ok(exit::print(|_| Err(error)));
            }
        }
    }
}

fn write(out: &mut dyn Write, healing: &Healing) -> io::Result<()> {
    let (index, source) = (healing.index, &healing.source);
    let list = |differences: &[lunbd::nbd::Difference]| {
        let words: Vec<String> = differences.iter().map(ToString::to_string).collect();
        words.join(", ")
    };
    let words = match &healing.outcome {
        HealOutcome::Healthy => "healthy".to_owned(),
        HealOutcome::Adopted(differences) if differences.is_empty() => "healed".to_owned(),
        HealOutcome::Adopted(differences) => {
            format!("healed; the export has {}", list(differences))
        }
        HealOutcome::DiscardedByKernel => "healthy: its old link lives".to_owned(),
        HealOutcome::GeometryChanged(differences) => {
            format!(
                "NOT healed, another export is served: {}",
                list(differences)
            )
        }
        HealOutcome::BudgetSpent => "NOT healed in time: I/O fails until a later heal".to_owned(),
        HealOutcome::Failed(error) => format!("NOT healed: {error:#}"),
        _ => "unknown".to_owned(),
    };
    write!(out, "nbd{index} {source}: {words}")?;
    if let Some(left) = healing.budget_left {
        write!(out, " (I/O waits for {} s more)", left.as_secs())?;
    }
    writeln!(out)
}
