//! `lunbd heal`

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use lunbd::engine::NbdOptions;
use lunbd::engine::journal::Record;
use lunbd::engine::{
    HealOutcome, HealReport, SessionRecovery, SessionRecoveryOptions, SessionRecoveryReport,
};
use lunbd::id::VolumeId;
use lunbd::{Deadline, Engine, Error, ErrorKind, Result, Source};
use serde::Serialize;

use crate::envelope::{self, Type};
use crate::{arguments, exit, progress::Progress, recover, threads};

#[derive(Serialize)]
struct Report<'a> {
    devices: &'a [HealReport],
}

#[derive(Serialize)]
struct Sessions<'a> {
    sessions: &'a [SessionRecoveryReport],
}

/// Exits with 1 if a device or session is left that serves no I/O.
pub(crate) fn run(engine: Engine, what: &arguments::Heal, json: bool) -> Result<ExitCode> {
    if what.watch {
        return watch(engine, what.recovery_options(), json);
    }
    let progress = Progress::of("healing");
    let deadline = Deadline::after(what.timeout);
    let mut options = NbdOptions::default();
    let sources: Vec<Source> = match &what.volume {
        Some(volume) => {
            let record = record_of(&engine, what, volume, deadline)?;
            options = record.nbd_options();
            record.spec.sources
        }
        None => what.source.iter().cloned().collect(),
    };
    if matches!(sources.first(), Some(Source::Iscsi(_))) {
        let mut sessions = Vec::new();
        for source in &sources {
            if let Source::Iscsi(uri) = source {
                sessions.extend(engine.heal_sessions(uri, &what.recovery_options(), deadline)?);
            }
        }
        drop(progress);
        return Ok(print_sessions(&sessions, json));
    }
    what.refuse_without_sessions()?;
    let options = what.nbd_options(options);
    let healings = match sources.first() {
        Some(source) => vec![engine.heal_source(source, &options, deadline)?],
        None => engine.heal(deadline)?,
    };
    drop(progress);
    let printed = exit::print(|mut out| {
        if json {
            let devices = &healings;
            return envelope::write(&mut out, Type::Heal, &Report { devices });
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

/// The journal's record of a volume, readable also while an agent holds the journal.
fn record_of(
    engine: &Engine,
    what: &arguments::Heal,
    volume: &VolumeId,
    deadline: Deadline,
) -> Result<Record> {
    let journal = recover::read(engine, what.journal.as_deref(), deadline)?;
    let mut records = journal.records.into_iter();
    let record = records.find(|record| record.volume == *volume);
    record.ok_or_else(|| {
        let message = format!("the journal has no volume {volume}");
        Error::new(ErrorKind::NotFound, message)
    })
}

fn print_sessions(sessions: &[SessionRecoveryReport], json: bool) -> ExitCode {
    let printed = exit::print(|mut out| {
        if json {
            return envelope::write(&mut out, Type::SessionHeal, &Sessions { sessions });
        }
        sessions.iter().try_for_each(|kept| writeln!(out, "{kept}"))
    });
    if sessions.iter().all(|kept| kept.outcome.serves()) {
        printed
    } else {
        ExitCode::FAILURE
    }
}

/// Runs until it is interrupted or its reader goes away.
fn watch(engine: Engine, options: SessionRecoveryOptions, json: bool) -> Result<ExitCode> {
    let (ended, first) = mpsc::channel();
    match engine.recover_sessions(options) {
        Ok(keeper) => {
            let ended = ended.clone();
            threads::start("lunbd-keep", move || ended.send(keep(keeper, json)))?;
        }
        // In a network namespace of its own, only NBD devices are healed.
        Err(error) if error.kind() == ErrorKind::NotSupported => {
            exit::failure(&error, json);
        }
        Err(error) => return Err(error),
    }
    threads::start("lunbd-heal", move || ended.send(heal(&engine, json)))?;
    // Neither thread ends without an error or a closed reader; the command ends with the
    // first one.
    let died = || Error::new(ErrorKind::Io, "a thread died");
    first.recv().unwrap_or_else(|_| Err(died()))
}

fn heal(engine: &Engine, json: bool) -> Result<ExitCode> {
    const TO_LISTEN: Duration = Duration::from_secs(30);
    let mut healer = engine.healer(Deadline::after(TO_LISTEN))?;
    tell_all(Type::HealedDevice, write, json, |until| healer.next(until))
}

fn keep(mut keeper: SessionRecovery, json: bool) -> Result<ExitCode> {
    let in_words = |out: &mut dyn Write, kept: &_| writeln!(out, "{kept}");
    tell_all(Type::HealedSession, in_words, json, |until| {
        keeper.next(until)
    })
}

/// Prints one line for each item of news until its reader goes away.
fn tell_all<T: Serialize>(
    of: Type,
    in_words: impl Fn(&mut dyn Write, &T) -> io::Result<()>,
    json: bool,
    mut next: impl FnMut(Deadline) -> Result<Vec<T>>,
) -> Result<ExitCode> {
    loop {
        for news in next(Deadline::after(Duration::MAX))? {
            let mut out = io::stdout().lock();
            let told = if json {
                envelope::write(&mut out, of, &news)
            } else {
                in_words(&mut out, &news)
            };
            if let Err(error) = told.and_then(|()| out.flush()) {
                return Ok(exit::print(|_| Err(error)));
            }
        }
    }
}

fn write(out: &mut dyn Write, healing: &HealReport) -> io::Result<()> {
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
        HealOutcome::Degraded(error) => {
            format!("serves, but is not known to have all of its connections: {error:#}")
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
