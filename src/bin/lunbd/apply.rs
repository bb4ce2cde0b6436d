//! `lunbd apply`

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use lunbd::engine::journal::Journal;
use lunbd::id::VolumeId;
use lunbd::reconcile::{Actual, Desired, Options, Plan, Reconciler, StepKind, plan};
use lunbd::{Deadline, Engine, Error, ErrorKind, Result};
use serde::Serialize;

use crate::desired_file::FileReader;
use crate::envelope::{self, Type};
use crate::follow::Follower;
use crate::followed_file::FollowedFile;
use crate::progress_display::ProgressDisplay;
use crate::{arguments, detach_limit, exit, recover, table};

#[derive(Serialize)]
struct Steps<'a> {
    steps: &'a Plan,
}

/// The steps and failures that are left.
#[derive(Serialize)]
struct Left<'a> {
    steps: &'a Plan,
    errors: Vec<Failed<'a>>,
}

/// A volume whose last step failed.
#[derive(Serialize)]
struct Failed<'a> {
    volume: &'a VolumeId,
    error: &'a Error,
}

/// The exit code of `--dry-run --exit-code` for a plan that has a step.
const SOMETHING_TO_DO: u8 = 2;

/// Exits with the code of the first failed volume; with 1 if steps are left without a
/// failure.
pub(crate) fn run(engine: Engine, what: &arguments::Apply, json: bool) -> Result<ExitCode> {
    let deadline = Deadline::after(what.timeout);
    if what.dry_run {
        return match dry_run(&engine, what, deadline, json) {
            // With this option 2 says that the plan has a step.
            Err(error) if what.exit_code && error.kind() == ErrorKind::InvalidInput => {
                let _its_own_code = exit::failure(&error, json);
                Ok(ExitCode::FAILURE)
            }
            ran => ran,
        };
    }
    let follow = || FollowedFile::within(&what.file, what.timeout, deadline);
    let mut watched = what.watch.then(follow).transpose()?;
    let desired = match &mut watched {
        Some(file) => file.read_first(deadline)?,
        None => FileReader::new(&what.file, false).read(deadline)?,
    };
    let journal = recover::open_and_tell(&engine, what.journal.as_deref(), json, deadline)?;
    let actual = Actual::read(&engine, &journal)?;
    let (desired, steps, refused) = plan_within_limit(desired, &actual, &journal, what)?;
    let shown = exit::print(|out| show_plan(out, &steps, json));
    let options = Options::default()
        .threads(what.threads)
        .step_limit(what.timeout);
    let reconciler = Arc::new(Reconciler::new(Arc::new(engine), journal, options));
    let count = desired.len();
    reconciler.set(desired.clone());
    let display = ProgressDisplay::of(&reconciler, !what.watch, json)?;
    if let Some(file) = watched {
        let follower = Follower::new(what, file, desired, json);
        let watch_error = follower.start(&reconciler, refused.as_ref())?;
        reconciler.run()?;
        let printed = display.end(reconciler);
        // The run ends by itself only if the file can no longer be followed, or if an event
        // cannot be printed.
        return watch_error.try_recv().map_or(Ok(printed), Err);
    }
    let applied = reconciler.apply(deadline).map(drop);
    let (left, errors) = (reconciler.plan(), reconciler.errors());
    let printed = display.end(reconciler);
    let told = exit::print(|out| show_left(out, &left, &errors, count, json));
    applied?;
    Ok(match errors.first() {
        Some((_, error)) => exit::of(error.kind()),
        None if left.is_empty() && shown == ExitCode::SUCCESS && printed == ExitCode::SUCCESS => {
            told
        }
        None => ExitCode::FAILURE,
    })
}

/// The plan, and what it is for. Where it would detach too many volumes while the file is
/// watched, it detaches none, and the error is returned as well: a restarted agent must keep
/// what is wanted, also beside many volumes whose detach it could not finish.
fn plan_within_limit(
    desired: Desired,
    actual: &Actual,
    journal: &Journal,
    what: &arguments::Apply,
) -> Result<(Desired, Plan, Option<Error>)> {
    let steps = plan(&desired, actual);
    let (nothing, known) = (Plan::default(), actual.iter().count());
    match detach_limit::check(&steps, &desired, &nothing, known, what.allow_detach) {
        Ok(()) => Ok((desired, steps, None)),
        Err(error) if what.watch => {
            let kept = detach_limit::without_detaches(&steps, &desired, &journal.records())?;
            let steps = plan(&kept, actual);
            Ok((kept, steps, Some(error)))
        }
        Err(error) => Err(error),
    }
}

fn dry_run(
    engine: &Engine,
    what: &arguments::Apply,
    deadline: Deadline,
    json: bool,
) -> Result<ExitCode> {
    let desired = FileReader::new(&what.file, false).read(deadline)?;
    let journal = recover::read(engine, what.journal.as_deref(), deadline)?;
    let actual: Actual = engine.survey_read(&journal)?.into_iter().collect();
    let steps = plan(&desired, &actual);
    let shown = exit::print(|out| show_plan(out, &steps, json));
    let (nothing, known) = (Plan::default(), actual.iter().count());
    detach_limit::check(&steps, &desired, &nothing, known, what.allow_detach)?;
    Ok(if what.exit_code && !steps.is_empty() {
        ExitCode::from(SOMETHING_TO_DO)
    } else {
        shown
    })
}

fn show_plan(mut out: &mut dyn Write, plan: &Plan, json: bool) -> io::Result<()> {
    if json {
        return envelope::write(&mut out, Type::Plan, &Steps { steps: plan });
    }
    if plan.is_empty() {
        return writeln!(out, "nothing to do");
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
        return envelope::write(
            &mut out,
            Type::Left,
            &Left {
                steps: left,
                errors,
            },
        );
    }
    if left.is_empty() && errors.is_empty() {
        let volumes = if count == 1 { "volume" } else { "volumes" };
        return writeln!(out, "as it is wanted: {count} {volumes}");
    }
    writeln!(out, "LEFT TO DO:")?;
    if !left.is_empty() {
        write_steps(out, left, errors)?;
    }
    let mut without_step = errors
        .iter()
        .filter(|(volume, _)| left.step(volume).is_none());
    without_step.try_for_each(|(volume, error)| writeln!(out, "{volume}: failed: {error:#}"))
}

/// Writes a table on a terminal, else one line for each step; a failed step comes with
/// its error.
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
    let mut text = Vec::new();
    table::write(&mut text, &rows)?;
    let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let text = String::from_utf8_lossy(&text);
    let kinds = std::iter::once(None).chain(plan.steps.iter().map(|step| Some(step.kind)));
    let mut lines = text.lines().zip(kinds);
    lines.try_for_each(|(line, kind)| writeln!(out, "{}", in_colour(line, kind, colours)))
}

/// Colours a detach red.
fn in_colour(line: &str, kind: Option<StepKind>, colours: bool) -> String {
    match kind {
        Some(StepKind::Detach) if colours => format!("\x1b[31m{line}\x1b[0m"),
        _ => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_detach_is_red_where_colours_are_wanted() {
        let detach = Some(StepKind::Detach);
        assert_eq!(in_colour("it", detach, true), "\x1b[31mit\x1b[0m");
        assert_eq!(in_colour("it", detach, false), "it");
        assert_eq!(in_colour("it", Some(StepKind::Attach), true), "it");
    }

    #[test]
    fn an_error_of_a_volume_that_needs_no_step_is_shown() {
        let error = Arc::new(Error::new(ErrorKind::InUse, "it is mounted"));
        let errors = [("pvc-1".parse().unwrap(), error)];
        let mut out = Vec::new();
        show_left(&mut out, &Plan::default(), &errors, 1, false).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text, "LEFT TO DO:\npvc-1: failed: it is mounted\n");
    }
}
