//! `lunbd recover`

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lunbd::engine::journal::{JournalView, Problem};
use lunbd::engine::{Action, Condition, Foreign, Journal, Recovered, Recovery};
use lunbd::{Deadline, Engine, Result};

use crate::envelope::{self, Type};
use crate::{arguments, exit, progress::Progress};

/// Opens the journal in `directory`, or else the machine's journal.
pub(crate) fn open(
    engine: &Engine,
    directory: Option<&Path>,
    deadline: Deadline,
) -> Result<Journal> {
    match directory {
        Some(directory) => engine.open_journal_at(directory, deadline),
        None => engine.open_journal(deadline),
    }
}

/// As [`open`], for a command whose result does not list the files that were set aside.
/// They are written to stderr, but not with `json`: a program would take the lines for an
/// error.
pub(crate) fn open_and_tell(
    engine: &Engine,
    directory: Option<&Path>,
    json: bool,
    deadline: Deadline,
) -> Result<Journal> {
    let journal = open(engine, directory, deadline)?;
    if !json {
        // The command goes on if stderr is closed.
        let _ = write_problems(&mut io::stderr(), journal.problems());
    }
    Ok(journal)
}

/// Reads the journal without holding it.
pub(crate) fn read(
    engine: &Engine,
    directory: Option<&Path>,
    deadline: Deadline,
) -> Result<JournalView> {
    match directory {
        Some(directory) => engine.read_journal_at(directory, deadline),
        None => engine.read_journal_at(&place(engine), deadline),
    }
}

/// The directory of the machine's journal.
pub(crate) fn place(engine: &Engine) -> PathBuf {
    engine.roots().run.join("lunbd/journal")
}

/// The exit code is 1 if a volume is still neither attached nor detached, or if a file is
/// not a record, since a volume may be behind it.
pub(crate) fn run(engine: &Engine, what: &arguments::Recover, json: bool) -> Result<ExitCode> {
    let progress = Progress::of("recovering");
    let deadline = Deadline::after(what.timeout);
    let journal = open(engine, what.journal.as_deref(), deadline)?;
    let recovery = engine.recover(&journal, deadline)?;
    drop(progress);
    let printed = exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::Recovery, &recovery)
        } else {
            write(out, &recovery)
        }
    });
    Ok(if recovery.is_whole() && recovery.problems.is_empty() {
        printed
    } else {
        ExitCode::FAILURE
    })
}

fn write(out: &mut dyn Write, recovery: &Recovery) -> io::Result<()> {
    if recovery.volumes.is_empty() {
        writeln!(out, "the journal has no volume")?;
    }
    for volume in &recovery.volumes {
        write_volume(out, volume)?;
    }
    for foreign in &recovery.foreign {
        write_foreign(out, foreign)?;
    }
    write_problems(out, &recovery.problems)
}

pub(crate) fn write_problems(out: &mut dyn Write, problems: &[Problem]) -> io::Result<()> {
    for problem in problems {
        let file = problem.file.display();
        writeln!(out, "NO RECORD {file}: {}", problem.text)?;
    }
    Ok(())
}

fn write_volume(out: &mut dyn Write, volume: &Recovered) -> io::Result<()> {
    let condition = condition(volume.condition);
    let action = match &volume.action {
        Action::Nothing => String::new(),
        Action::Finished => "; finished".to_owned(),
        Action::Undone => "; undone".to_owned(),
        Action::Healed => "; healed".to_owned(),
        Action::Failed(error) => format!("; NOT mended: {error:#}"),
        _ => "; unknown".to_owned(),
    };
    write!(out, "{}: {condition}{action}", volume.volume)?;
    if let Some(node) = &volume.node {
        write!(out, ": {}", node.display())?;
    }
    writeln!(out, "\n  seen      {}", volume.seen)
}

pub(crate) fn condition(condition: Condition) -> &'static str {
    match condition {
        Condition::Complete => "attached",
        Condition::HalfAttached => "its attach or resize was begun",
        Condition::HalfDetached => "its detach was begun",
        Condition::Gone => "gone",
        Condition::Changed => "CHANGED",
        Condition::LinkDead => "does not answer",
        _ => "unknown",
    }
}

fn write_foreign(out: &mut dyn Write, foreign: &Foreign) -> io::Result<()> {
    write!(out, "foreign   {}", foreign.device)?;
    if let Some(node) = &foreign.node {
        write!(out, " {}", node.display())?;
    }
    let names = foreign.names.first().map(ToString::to_string);
    match names.or_else(|| foreign.backend.clone()) {
        Some(name) => writeln!(out, " {name}"),
        None => writeln!(out),
    }
}
