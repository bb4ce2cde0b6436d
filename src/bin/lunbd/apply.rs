//! `lunbd apply`

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use lunbd::id::VolumeId;
use lunbd::reconcile::{Actual, Desired, Options, Plan, Reconciler, plan};
use lunbd::{Deadline, Engine, Error, ErrorKind, Result};
use serde::Serialize;

use crate::board::Board;
use crate::watch_file::FileWatch;
use crate::{arguments, exit, recover, table, wanted};

/// A plan: of what is to be done, or of what is left, and why.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Report<'a> {
    Plan(&'a Plan),
    Left {
        steps: &'a Plan,
        errors: Vec<Failed<'a>>,
    },
}

/// A volume whose last step failed.
#[derive(Serialize)]
struct Failed<'a> {
    volume: &'a VolumeId,
    error: &'a Error,
}

/// Exits as the first volume says that is not as it is wanted.
pub(crate) fn run(engine: Engine, what: &arguments::Apply, json: bool) -> Result<ExitCode> {
    // Before the first read, so that no change is missed.
    let changes = what.watch.then(|| FileWatch::of(&what.file)).transpose()?;
    let desired = wanted::read(&what.file)?;
    let deadline = Deadline::after(what.timeout);
    if what.dry_run {
        let journal = recover::read(&engine, what.journal.as_deref(), deadline)?;
        let actual: Actual = engine.survey_read(&journal)?.into_iter().collect();
        let steps = plan(&desired, &actual);
        return Ok(exit::print(|out| show_plan(out, &steps, json)));
    }
    let journal = recover::open_and_tell(&engine, what.journal.as_deref(), json, deadline)?;
    let steps = plan(&desired, &Actual::read(&engine, &journal)?);
    let shown = exit::print(|out| show_plan(out, &steps, json));
    let options = Options::default()
        .threads(what.threads)
        .step_limit(what.timeout);
    let reconciler = Arc::new(Reconciler::new(Arc::new(engine), journal, options));
    let count = desired.len();
    reconciler.set(desired.clone());
    let board = Board::of(&reconciler, !what.watch, json);
    if let Some(changes) = changes {
        follow(&reconciler, what.file.clone(), changes, desired);
        reconciler.run()?;
        board.end(reconciler);
        return Ok(ExitCode::SUCCESS);
    }
    let applied = reconciler.apply(deadline).map(drop);
    let (left, errors) = (reconciler.plan(), reconciler.errors());
    board.end(reconciler);
    let told = exit::print(|out| show_left(out, &left, &errors, count, json));
    applied?;
    Ok(match errors.first() {
        Some((_, error)) => exit::of(error.kind()),
        None if left.is_empty() && shown == ExitCode::SUCCESS => told,
        None => ExitCode::FAILURE,
    })
}

/// Has what the file says be wanted, whenever it changes. A file that is broken
/// changes nothing.
fn follow(reconciler: &Arc<Reconciler>, file: PathBuf, changes: FileWatch, mut wanted: Desired) {
    let reconciler = Arc::downgrade(reconciler);
    thread::spawn(move || {
        loop {
            let read = changes.wait().and_then(|()| wanted::read(&file));
            let Some(reconciler) = reconciler.upgrade() else {
                return;
            };
            match read {
                Ok(now) if now == wanted => {}
                Ok(now) => {
                    wanted = now.clone();
                    reconciler.set(now);
                    let _told = writeln!(io::stderr(), "lunbd: the file has changed");
                }
                Err(error) => {
                    let _told = writeln!(io::stderr(), "lunbd: not taken in: {error:#}");
                    if error.kind() == ErrorKind::Io {
                        reconciler.stop();
                        return;
                    }
                }
            }
        }
    });
}

fn show_plan(mut out: &mut dyn Write, plan: &Plan, json: bool) -> io::Result<()> {
    if json {
        return exit::write_json(&mut out, &Report::Plan(plan));
    }
    if plan.is_empty() {
        return writeln!(out, "nothing is to be done");
    }
    write_steps(out, plan, &[])
}

fn show_left(
    mut out: &mut dyn Write,
    left: &Plan,
    errors: &[(VolumeId, Arc<Error>)],
    count: usize,
    json: bool,
) -> io::Result<()> {
    if json {
        let failed = errors
            .iter()
            .map(|(volume, error)| Failed { volume, error });
        let errors = failed.collect();
        return exit::write_json(
            &mut out,
            &Report::Left {
                steps: left,
                errors,
            },
        );
    }
    if left.is_empty() {
        let volumes = if count == 1 { "volume" } else { "volumes" };
        return writeln!(out, "as it is wanted: {count} {volumes}");
    }
    writeln!(out, "LEFT TO DO:")?;
    write_steps(out, left, errors)
}

/// A table for people, a line a step for programs; what failed with its error.
fn write_steps(
    out: &mut dyn Write,
    plan: &Plan,
    errors: &[(VolumeId, Arc<Error>)],
) -> io::Result<()> {
    let error = |volume: &VolumeId| {
        let failed = errors.iter().find(|(failed, _)| failed == volume);
        failed.map(|(_, error)| format!("{error:#}"))
    };
    if !io::stdout().is_terminal() {
        return plan.steps.iter().try_for_each(|step| {
            let failed = error(&step.volume).map(|error| format!("; failed: {error}"));
            writeln!(out, "{step}{}", failed.unwrap_or_default())
        });
    }
    let heading = ["STEP", "VOLUME", "AFTER", "WHY"].map(str::to_owned);
    let steps = plan.steps.iter().map(|step| {
        let after: Vec<&str> = step.after.iter().map(VolumeId::as_str).collect();
        let after = if after.is_empty() {
            "-".to_owned()
        } else {
            after.join(",")
        };
        let why = error(&step.volume);
        let why = why.map_or_else(
            || step.reason.to_string(),
            |error| format!("FAILED: {error}"),
        );
        [step.kind.to_string(), step.volume.to_string(), after, why]
    });
    let rows: Vec<_> = std::iter::once(heading).chain(steps).collect();
    table::write(out, &rows)
}
