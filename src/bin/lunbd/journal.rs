//! `lunbd journal`

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use lunbd::engine::journal::{Operation, Problem, Record};
use lunbd::id::VolumeId;
use lunbd::{Deadline, Engine, Error, ErrorKind, Result};
use serde::Serialize;

use crate::arguments::{self, JournalPlace};
use crate::envelope::{self, Type};
use crate::in_seconds::InSeconds;
use crate::{exit, recover};

/// How long a command waits for the journal.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(Serialize)]
struct Shown {
    journal: PathBuf,
    records: Vec<Record>,
    /// The records of volumes whose detach is proven.
    detached: Vec<Record>,
    /// Files in the journal's directory that are not records.
    problems: Vec<Problem>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Done {
    Forgotten(Box<Record>),
    Removed(PathBuf),
    Restored(Box<Record>),
}

pub(crate) fn run(engine: &Engine, what: arguments::Journal, json: bool) -> Result<ExitCode> {
    let deadline = Deadline::after(LIMIT);
    let open = |place: &JournalPlace| recover::open(engine, place.journal.as_deref(), deadline);
    let done = match what {
        arguments::Journal::Show { volume, place } => {
            return show(engine, place, volume.as_ref(), json);
        }
        arguments::Journal::Restore { file, place } => {
            let journal = open(&place)?;
            let record = journal.restore(name_in(&file, journal.directory())?, deadline)?;
            Done::Restored(Box::new(record))
        }
        arguments::Journal::Forget { what, place } => {
            let journal = open(&place)?;
            let volume = what.parse::<VolumeId>().ok();
            let is_known = |volume: &VolumeId| {
                journal.record(volume).is_some() || journal.detached_as(volume).is_some()
            };
            let known = volume.filter(is_known);
            if let Some(volume) = known {
                Done::Forgotten(Box::new(journal.forget(&volume, deadline)?))
            } else {
                let file = PathBuf::from(&what);
                let name = name_in(&file, journal.directory())?;
                let path = journal.directory().join(name);
                if path.symlink_metadata().is_err() {
                    let message = format!(
                        "{} has no volume and no set-aside file {what}",
                        journal.directory().display()
                    );
                    return Err(Error::new(ErrorKind::NotFound, message));
                }
                journal.forget_set_aside(name, deadline)?;
                Done::Removed(path)
            }
        }
    };
    Ok(exit::print(|mut out| {
        if json {
            return envelope::write(&mut out, Type::JournalChange, &InSeconds(&done));
        }
        match &done {
            Done::Forgotten(record) => {
                writeln!(out, "forgotten: {}", record.volume)?;
                write_record(out, record)
            }
            Done::Removed(file) => writeln!(out, "removed: {}", file.display()),
            Done::Restored(record) => {
                writeln!(out, "restored: {}", record.volume)?;
                write_record(out, record)
            }
        }
    }))
}

/// A file is given by its name, or by its path in the journal's directory.
fn name_in<'a>(file: &'a Path, directory: &Path) -> Result<&'a OsStr> {
    let parent = file
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    match file.file_name() {
        Some(name) if parent.is_none_or(|parent| parent == directory) => Ok(name),
        _ => {
            let (file, directory) = (file.display(), directory.display());
            let message = format!("{file}: it is no file in the journal {directory}");
            Err(Error::new(ErrorKind::InvalidInput, message))
        }
    }
}

fn show(
    engine: &Engine,
    place: JournalPlace,
    volume: Option<&VolumeId>,
    json: bool,
) -> Result<ExitCode> {
    let journal = place.journal.unwrap_or_else(|| recover::place(engine));
    let view = recover::read(engine, Some(&journal), Deadline::after(LIMIT))?;
    let mut shown = Shown {
        journal,
        records: view.records,
        detached: view.detached,
        problems: view.problems,
    };
    if let Some(volume) = volume {
        shown.records.retain(|record| record.volume == *volume);
        shown.detached.retain(|record| record.volume == *volume);
        if shown.records.is_empty() && shown.detached.is_empty() {
            let message = format!("{} has no volume {volume}", shown.journal.display());
            return Err(Error::new(ErrorKind::NotFound, message));
        }
    }
    Ok(exit::print(|mut out| {
        if json {
            return envelope::write(&mut out, Type::Journal, &InSeconds(&shown));
        }
        if shown.records.is_empty() {
            writeln!(out, "the journal has no volume")?;
        }
        for record in shown.records.iter().chain(&shown.detached) {
            writeln!(out, "{}", record.volume)?;
            write_record(out, record)?;
        }
        recover::write_problems(out, &shown.problems)
    }))
}

fn write_record(out: &mut dyn Write, record: &Record) -> io::Result<()> {
    for source in &record.spec.sources {
        writeln!(out, "  source    {source}")?;
    }
    if let Some(intent) = &record.intent {
        let operation = match intent.operation {
            Operation::Attach => "attach",
            Operation::Detach { .. } => "detach",
            Operation::Resize { .. } => "resize",
            _ => "operation",
        };
        writeln!(out, "  begun     {operation}, at {}", intent.begun_at)?;
    }
    if let Some(outcome) = &record.outcome {
        let (node, size) = (outcome.node.display(), outcome.size);
        writeln!(out, "  attached  {node}, {size} bytes, at {}", outcome.at)?;
        for name in &outcome.names {
            writeln!(out, "  name      {name}")?;
        }
        if let Some(map) = &outcome.map {
            writeln!(out, "  map       {map}")?;
        }
    }
    if let Some(detached) = &record.detached {
        let safe = if detached.safe_to_unmap {
            "safe to unmap"
        } else {
            "NOT PROVEN to be safe to unmap"
        };
        writeln!(out, "  detached  at {}, {safe}", detached.at)?;
        for place in &detached.not_looked_at {
            writeln!(out, "  unseen    users that may be among {place}")?;
        }
    }
    if let Some(boot) = &record.boot {
        writeln!(out, "  boot      {boot}")?;
    }
    Ok(())
}
