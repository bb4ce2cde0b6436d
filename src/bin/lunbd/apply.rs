//! `lunbd apply`

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, SystemTime};

use lunbd::id::VolumeId;
use lunbd::reconcile::{Actual, Desired, Options, Plan, Reconciler, StepKind, plan};
use lunbd::{Deadline, Engine, Error, ErrorKind, Result};
use serde::Serialize;

use crate::detach_limit::{self, DetachLimit};
use crate::envelope::{self, Type};
use crate::progress::BARS;
use crate::progress_display::ProgressDisplay;
use crate::watch_file::FileWatch;
use crate::{arguments, desired_file, exit, recover, table, threads};

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

/// The exit code of `--dry-run --exit-code`.
const SOMETHING_TO_DO: u8 = 2;

/// Exits with the code of the first failed volume; with 1 if steps are left without a
/// failure.
pub(crate) fn run(engine: Engine, what: &arguments::Apply, json: bool) -> Result<ExitCode> {
    // The watch starts before the first read, so that no change is missed.
    let changes = what.watch.then(|| FileWatch::of(&what.file)).transpose()?;
    let desired = desired_file::read(&what.file)?;
    let deadline = Deadline::after(what.timeout);
    if what.dry_run {
        let journal = recover::read(&engine, what.journal.as_deref(), deadline)?;
        let actual: Actual = engine.survey_read(&journal)?.into_iter().collect();
        let steps = plan(&desired, &actual);
        let shown = exit::print(|out| show_plan(out, &steps, json));
        detach_limit::check(&steps, &desired, actual.iter().count(), what.allow_detach)?;
        let acts = steps.steps.iter().any(|step| step.kind.acts());
        return Ok(if what.exit_code && acts {
            ExitCode::from(SOMETHING_TO_DO)
        } else {
            shown
        });
    }
    let journal = recover::open_and_tell(&engine, what.journal.as_deref(), json, deadline)?;
    let actual = Actual::read(&engine, &journal)?;
    let steps = plan(&desired, &actual);
    detach_limit::check(&steps, &desired, actual.iter().count(), what.allow_detach)?;
    let shown = exit::print(|out| show_plan(out, &steps, json));
    let options = Options::default()
        .threads(what.threads)
        .step_limit(what.timeout);
    let reconciler = Arc::new(Reconciler::new(Arc::new(engine), journal, options));
    let count = desired.len();
    reconciler.set(desired.clone());
    let display = ProgressDisplay::of(&reconciler, !what.watch, json)?;
    if let Some(changes) = changes {
        let watch_error = follow(&reconciler, what, changes, desired, json)?;
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

/// The pause before the file is read again after it could not be read or compared with
/// the attached volumes.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// The last reported error. A repeated error is reported once.
#[derive(Default)]
struct LastError(Option<String>);

impl LastError {
    fn is_new(&mut self, error: &Error) -> bool {
        let text = Some(format!("{error:#}"));
        let is_new = self.0 != text;
        self.0 = text;
        is_new
    }
}

/// The result of a change of the file.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum FileEvent<'a> {
    #[serde(rename = "file_taken_in")]
    TakenIn,
    #[serde(rename = "file_refused")]
    Refused { error: &'a Error },
}

#[derive(Serialize)]
struct Timed<'a> {
    time: String,
    #[serde(flatten)]
    event: FileEvent<'a>,
}

impl FileEvent<'_> {
    /// Writes it among the events on standard output for `--json`, and on standard error
    /// otherwise.
    fn print(self, json: bool) {
        // A failed write is ignored: the thread that prints the events notices that the
        // reader is gone.
        let _told = BARS.suspend(|| match self {
            event if json => {
                let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
                let mut out = io::stdout().lock();
                envelope::write(&mut out, Type::FileEvent, &Timed { time, event })
                    .and_then(|()| out.flush())
            }
            Self::TakenIn => writeln!(io::stderr(), "lunbd: the file has changed"),
            Self::Refused { error } => {
                writeln!(
                    io::stderr(),
                    "lunbd: the changed file is refused: {error:#}"
                )
            }
        });
    }
}

/// Takes in the file whenever it changes. A file that is broken, or that would detach too
/// many volumes, changes nothing. If the file can no longer be followed, it stops the
/// reconciler and sends the error.
fn follow(
    reconciler: &Arc<Reconciler>,
    what: &arguments::Apply,
    mut changes: FileWatch,
    mut wanted: Desired,
    json: bool,
) -> Result<Receiver<Error>> {
    let reconciler = Arc::downgrade(reconciler);
    let (file, limit) = (what.file.clone(), what.allow_detach);
    let (ended, watch_error) = mpsc::channel();
    threads::start("lunbd-follow", move || {
        let (mut again_after, mut last_error) = (None, LastError::default());
        loop {
            let followed = changes.wait(again_after.take());
            let Some(reconciler) = reconciler.upgrade() else {
                return;
            };
            if let Err(error) = followed {
                let _the_command_has_ended = ended.send(error);
                reconciler.stop();
                return;
            }
            match apply_change(&reconciler, &file, &wanted, limit) {
                Ok(None) => last_error = LastError::default(),
                Ok(Some(now)) => {
                    (wanted, last_error) = (now, LastError::default());
                    FileEvent::TakenIn.print(json);
                }
                Err(error) => {
                    if last_error.is_new(&error) {
                        FileEvent::Refused { error: &error }.print(json);
                    }
                    let is_the_files = [ErrorKind::InvalidInput, ErrorKind::NotFound];
                    if !is_the_files.contains(&error.kind()) {
                        again_after = Some(AGAIN_AFTER);
                    }
                }
            }
        }
    })?;
    Ok(watch_error)
}

/// Sets the volumes of the file, unless they are wanted already.
fn apply_change(
    reconciler: &Reconciler,
    file: &Path,
    wanted: &Desired,
    limit: Option<DetachLimit>,
) -> Result<Option<Desired>> {
    let now = desired_file::read(file)?;
    if now == *wanted && now.is_spelt_as(wanted) {
        return Ok(None);
    }
    let known = reconciler.journal().records().len();
    detach_limit::check(&reconciler.preview(&now)?, &now, known, limit)?;
    reconciler.set(now.clone());
    Ok(Some(now))
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
    fn an_error_that_stays_is_told_once() {
        let error = |text| Error::new(ErrorKind::Io, text);
        let mut told = LastError::default();
        let is_new = ["full", "full", "gone", "full"].map(|text| told.is_new(&error(text)));
        assert_eq!(is_new, [true, false, true, true]);
    }

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
