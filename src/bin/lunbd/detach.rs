//! `lunbd detach`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::journal::JournalView;
use lunbd::engine::{DetachFailure, DetachVolume, Flush, NotLookedAt, Place, Receipt};
use lunbd::id::{VolumeId, Wwid};
use lunbd::{
    Cancel, Deadline, DetachRequest, DetachTarget, Detachment, Engine, Error, ErrorKind, Result,
};

use crate::envelope::{self, Type};
use crate::progress::{BARS, Progress};
use crate::{arguments, attach, exit, recover};

pub(crate) fn run(
    engine: &Engine,
    what: &arguments::Detach,
    cancel: &Cancel,
    json: bool,
) -> Result<ExitCode> {
    let deadline = Deadline::after(what.timeout).cancelled_by(cancel);
    let named = what.of.volume.as_ref().map(ToString::to_string);
    let target = what.of.target.as_ref().map(ToString::to_string);
    // clap requires one of the two.
    let progress = Progress::of(&format!(
        "detaching {}",
        named.or(target).unwrap_or_default()
    ));
    let detached = match (&what.of.target, &what.of.volume) {
        (Some(target), _) => by_target(engine, what, target, &progress, (deadline, json))?,
        (None, Some(volume)) => by_volume(engine, what, volume, &progress, (deadline, json))?,
        (None, None) => return Err(Error::new(ErrorKind::InvalidInput, "nothing to detach")),
    };
    let detachment = match detached {
        Ok(detachment) => detachment,
        Err(failure) => {
            drop(progress);
            return Ok(self::failure(&failure, json));
        }
    };
    drop(progress);
    Ok(exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::Detachment, &detachment)
        } else {
            write(out, &detachment)
        }
    }))
}

/// Detaches the target's volume if the journal has one: if the record stayed, an agent or
/// a later recovery would attach the volume again.
fn by_target(
    engine: &Engine,
    what: &arguments::Detach,
    target: &DetachTarget,
    progress: &Progress,
    (deadline, json): (Deadline, bool),
) -> Result<Result<Detachment, DetachFailure>> {
    let request = request(what, target, progress);
    let journal = recover::read(engine, what.journal.as_deref(), deadline)?;
    if let Some(volume) = engine.volume_of(&journal, &request, deadline)? {
        if let Some(expected) = &what.of.expect {
            require(&journal, &volume, expected)?;
        }
        if !json {
            let note = format!("{target} is volume {volume} of the journal: that is detached");
            let _only_a_note = BARS.suspend(|| writeln!(io::stderr(), "lunbd: {note}"));
        }
        return by_volume(engine, what, &volume, progress, (deadline, json)).map_err(|error| {
            if error.kind() != ErrorKind::InUse {
                return error;
            }
            let message = format!(
                "{target} is volume {volume}, and the process that has the journal is the one to \
                 detach it: {error:#}"
            );
            Error::new(ErrorKind::InUse, message)
        });
    }
    Ok(match engine.detach(request.clone(), deadline) {
        Ok(done) if !done.changed => {
            let before = engine.detachment_before(&journal, &request, deadline)?;
            let phases = done.phases.clone();
            Ok(before.map_or(done, |mut before| {
                before.phases = phases;
                before
            }))
        }
        done => done,
    })
}

fn request(what: &arguments::Detach, target: &DetachTarget, progress: &Progress) -> DetachRequest {
    let mut request = DetachRequest::new(target.clone()).observe(progress.observer());
    if let Some(id) = &what.of.backend {
        request = request.backend(id.clone());
    }
    if what.abandon_unwritten {
        request = request.abandon_unwritten();
    }
    if what.keep_sessions {
        request = request.keep_sessions();
    }
    if let Some(name) = &what.of.expect {
        request = request.expect(name.clone());
    }
    request
}

fn require(journal: &JournalView, volume: &VolumeId, expected: &Wwid) -> Result<()> {
    let record = journal
        .records
        .iter()
        .find(|record| record.volume == *volume);
    let outcome = record.and_then(|record| record.outcome.as_ref());
    let names = outcome.map_or(&[][..], |outcome| &outcome.names);
    if names.is_empty() || names.contains(expected) {
        return Ok(());
    }
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let message = format!(
        "volume {volume} of the journal is {}, and {expected} was expected",
        names.join(", ")
    );
    Err(Error::new(ErrorKind::IdentityMismatch, message))
}

fn by_volume(
    engine: &Engine,
    what: &arguments::Detach,
    volume: &VolumeId,
    progress: &Progress,
    (deadline, json): (Deadline, bool),
) -> Result<Result<Detachment, DetachFailure>> {
    let journal = recover::open_and_tell(engine, what.journal.as_deref(), json, deadline)?;
    let mut how = DetachVolume::default().observe(progress.observer());
    if what.abandon_unwritten {
        how = how.abandon_unwritten();
    }
    if what.keep_sessions {
        how = how.keep_sessions();
    }
    Ok(engine.detach_volume(&journal, volume, &how, deadline))
}

fn write(out: &mut dyn Write, detachment: &Detachment) -> io::Result<()> {
    let place = &detachment.place;
    let left = match place {
        Place::Nbd { .. } => "free",
        _ => "gone",
    };
    match &detachment.node {
        _ if !detachment.changed => {
            let at = detachment.detached_at.as_ref();
            let at = at.map_or_else(String::new, |at| format!(", at {at}"));
            writeln!(out, "{place} was detached already{at}")?;
        }
        Some(node) => writeln!(out, "{place} detached: {} is {left}", node.display())?,
        None => writeln!(out, "{place} detached")?,
    }
    match &detachment.receipt {
        Some(receipt) => write_receipt(out, receipt)?,
        None => write_flush(out, "flushed", detachment.flush.as_ref())?,
    }
    let safe = if detachment.safe_to_unmap {
        "yes"
    } else {
        "NOT PROVEN"
    };
    if detachment.changed || detachment.receipt.is_some() {
        writeln!(out, "  safe      to unmap: {safe}")?;
    }
    if detachment.receipt.is_none() {
        write_not_looked_at(out, &detachment.not_looked_at)?;
    }
    for session in &detachment.logged_out {
        writeln!(out, "  logout    session {session}")?;
    }
    attach::write_phases(out, &detachment.phases)
}

/// Reports what failed and how far the detach came.
fn failure(failure: &DetachFailure, json: bool) -> ExitCode {
    let code = exit::say(failure.kind(), failure, json);
    if !json {
        let mut stderr = io::stderr().lock();
        let _ = write_receipt(&mut stderr, &failure.receipt);
    }
    code
}

/// Writes what the detach did with each device.
pub(crate) fn write_receipt(out: &mut dyn Write, receipt: &Receipt) -> io::Result<()> {
    if let Some(map) = &receipt.map {
        let state = if map.gone { "gone" } else { "STANDS" };
        writeln!(out, "  map       {} {state}", map.name)?;
        write_flush(out, "  flushed", map.flush.as_ref())?;
    }
    for path in &receipt.paths {
        let state = if path.gone { "gone" } else { "STANDS" };
        let known = match path.forgotten {
            Some(true) => ", forgotten by multipathd",
            Some(false) => ", KNOWN to multipathd",
            None => "",
        };
        writeln!(out, "  path      {} {state}{known}", path.hctl)?;
        write_flush(out, "  flushed", path.flush.as_ref())?;
    }
    write_not_looked_at(out, &receipt.not_looked_at)?;
    for note in &receipt.notes {
        writeln!(out, "  note      {note}")?;
    }
    Ok(())
}

fn write_not_looked_at(out: &mut dyn Write, places: &[NotLookedAt]) -> io::Result<()> {
    for place in places {
        writeln!(out, "  unseen    users that may be among {place}")?;
    }
    Ok(())
}

fn write_flush(out: &mut dyn Write, label: &str, flush: Option<&Flush>) -> io::Result<()> {
    let what = match flush {
        Some(Flush::Done) => "pages and the device's cache".to_owned(),
        Some(Flush::Unreachable(why) | Flush::Replaced(why)) => format!("nothing: {why}"),
        Some(Flush::ThroughMap(why)) => format!("only through its map, before; the path: {why}"),
        Some(Flush::PagesWritten(why)) => format!("pages; not the unit's cache: {why}"),
        Some(Flush::Unproven(why)) => format!("pages and cache, without proof: {why}"),
        Some(Flush::Abandoned(why)) => format!("NOT: what was unwritten is lost: {why}"),
        Some(Flush::NoDisk) => "nothing: it had no disk".to_owned(),
        _ => return Ok(()),
    };
    writeln!(out, "  {label:<9} {what}")
}
