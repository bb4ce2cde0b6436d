//! `lunbd status`

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use indicatif::HumanBytes;
use lunbd::engine::journal::{Failing, Operation, Problem};
use lunbd::engine::{Condition, InventoryUnit, VolumeStatus};
use lunbd::{Deadline, Engine, Error, ErrorKind, Result};
use serde::Serialize;

use crate::envelope::{self, Type};
use crate::in_seconds::InSeconds;
use crate::list::{self, Listed};
use crate::{arguments, attach, exit, recover, table};

const HEADING: [&str; 7] = [
    "VOLUME", "STATE", "DEVICE", "SIZE", "USED", "HELD BY", "SOURCE",
];

/// How long reading the journal may take.
const TO_READ: Duration = Duration::from_secs(30);
/// How long the mounted file systems may take to report their usage.
const LIMIT: Duration = Duration::from_secs(3);

#[derive(Serialize)]
struct Status {
    journal: PathBuf,
    volumes: Vec<Volume>,
    /// The failed steps of the running agent.
    failing: Vec<Waiting>,
    /// Files of the journal that are no records.
    problems: Vec<Problem>,
}

#[derive(Serialize)]
struct Waiting {
    #[serde(flatten)]
    what: Failing,
    /// `None` if the step waits for a change.
    next_try_seconds: Option<f64>,
}

impl Waiting {
    fn of(what: Failing) -> Self {
        let wait = |next: SystemTime| next.duration_since(SystemTime::now()).unwrap_or_default();
        let next_try_seconds = what.next_try.map(|next| wait(next).as_secs_f64());
        Self {
            what,
            next_try_seconds,
        }
    }
}

#[derive(Serialize)]
struct Volume {
    #[serde(flatten)]
    found: VolumeStatus,
    /// The unit of the attached device, if the device is there.
    device: Option<Listed>,
}

impl Volume {
    fn is_whole(&self) -> bool {
        self.found.condition == Condition::Complete && self.found.under_way.is_none()
    }
}

/// The exit code if a volume is not attached, does not serve I/O or fails, or the
/// journal has a file that is no record. README.md and `--help` list it.
const NOT_WHOLE: u8 = 9;

/// Prints the state of the volumes of a journal; exits with [`NOT_WHOLE`] if one is not
/// as wanted.
pub(crate) fn run(engine: &Engine, what: &arguments::Status, json: bool) -> Result<ExitCode> {
    let place = what.journal.clone();
    let place = place.unwrap_or_else(|| recover::place(engine));
    let journal = recover::read(engine, Some(&place), Deadline::after(TO_READ))?;
    let mut units: Vec<Option<InventoryUnit>> =
        engine.inventory()?.units.into_iter().map(Some).collect();
    let deadline = Deadline::after(LIMIT);
    let mut surveyed = engine.survey_read(&journal)?;
    let (mut failing, mut problems) = (journal.failing, journal.problems);
    if let Some(volume) = &what.volume {
        surveyed.retain(|found| found.volume == *volume);
        failing.retain(|failing| failing.volume == *volume);
        problems.retain(|problem| problem.may_be_of(volume));
        if surveyed.is_empty() && failing.is_empty() && problems.is_empty() {
            let message = format!("{} has no volume {volume}", place.display());
            return Err(Error::new(ErrorKind::NotFound, message));
        }
    }
    let volumes = surveyed.into_iter().map(|found| {
        let unit = found.node.as_ref().and_then(|node| {
            let mut units = units.iter_mut();
            units
                .find(|unit| unit.as_ref().is_some_and(|unit| unit.has_node(node)))?
                .take()
        });
        let device = unit.map(|unit| Listed::of(engine, unit, deadline));
        Volume { found, device }
    });
    let status = Status {
        volumes: volumes.collect(),
        journal: place,
        failing: failing.into_iter().map(Waiting::of).collect(),
        problems,
    };
    let printed = exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::Status, &InSeconds(&status))
        } else {
            write(out, &status)
        }
    });
    let all_stand = status.volumes.iter().all(Volume::is_whole);
    Ok(
        if all_stand && status.failing.is_empty() && status.problems.is_empty() {
            printed
        } else {
            ExitCode::from(NOT_WHOLE)
        },
    )
}

fn write(out: &mut dyn Write, status: &Status) -> io::Result<()> {
    if status.volumes.is_empty() {
        writeln!(out, "the journal has no volume")?;
    } else {
        let mut rows = vec![HEADING.map(str::to_owned)];
        rows.extend(status.volumes.iter().map(row));
        table::write(out, &rows)?;
    }
    for volume in status.volumes.iter().filter(|volume| !volume.is_whole()) {
        writeln!(out, "{}: {}", volume.found.volume, volume.found.seen)?;
    }
    for volume in &status.volumes {
        if let Some(tls) = &volume.found.tls {
            let words = attach::tls_in_words(tls);
            writeln!(out, "{}: TLS {words}", volume.found.volume)?;
        }
    }
    for waiting in &status.failing {
        let Failing {
            volume,
            step,
            error,
            tries,
            ..
        } = &waiting.what;
        let next = match waiting.next_try_seconds {
            Some(wait) => format!("again in {wait:.0} s"),
            None => "again after a change or at the next refresh of all volumes".to_owned(),
        };
        let times = if *tries == 1 { "time" } else { "times" };
        writeln!(
            out,
            "{volume}: {step} failed {tries} {times}, {next}: {error}"
        )?;
    }
    recover::write_problems(out, &status.problems)
}

fn row(volume: &Volume) -> [String; HEADING.len()] {
    let found = &volume.found;
    let device = volume.device.as_ref();
    let sources: Vec<String> = found.spec.sources.iter().map(ToString::to_string).collect();
    [
        found.volume.to_string(),
        state(found),
        list::or_dash(found.node.as_ref().map(|node| node.display())),
        list::or_dash(found.size.map(HumanBytes)),
        device.map_or_else(|| "-".to_owned(), Listed::used),
        device.map_or_else(|| "-".to_owned(), |listed| list::held_by(&listed.unit)),
        sources.join(","),
    ]
}

fn state(found: &VolumeStatus) -> String {
    let state = recover::condition(found.condition);
    let under_way = match found.under_way {
        None => return state.to_owned(),
        Some(Operation::Attach) => "attach",
        Some(Operation::Detach { .. }) => "detach",
        Some(Operation::Resize { .. }) => "resize",
        Some(_) => "change",
    };
    format!("{state}, {under_way} under way")
}
