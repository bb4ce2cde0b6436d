//! `lunbd attach`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::{MissingPath, Phase, Unit, UnitPath};
use lunbd::id::{ContentName, Expected};
use lunbd::nbd::TlsInfo;
use lunbd::scsi::Identity;
use lunbd::{AttachRequest, Attachment, Cancel, Deadline, Engine, Error, ErrorKind, Result};

use crate::envelope::{self, Type};
use crate::{arguments, exit, progress::Progress, recover};

pub(crate) fn run(
    engine: &Engine,
    what: arguments::Attach,
    cancel: &Cancel,
    json: bool,
) -> Result<ExitCode> {
    let mut sources = what.sources.into_iter();
    // clap guarantees at least one source.
    let Some(source) = sources.next() else {
        return Err(Error::new(ErrorKind::InvalidInput, "no source"));
    };
    let progress = Progress::of(&format!("attaching {source}"));
    let mut nbd = what.nbd.options();
    if let Some(Expected::Content(name)) = &what.expect {
        nbd = nbd.expect(name.clone());
    }
    let request = AttachRequest::new(source)
        .nbd(nbd)
        .min_paths(what.min_paths)
        .multipath(what.multipath)
        .observe(progress.observer());
    let mut request = sources.fold(request, AttachRequest::path);
    if let Some(Expected::Unit(wwid)) = what.expect {
        request = request.expect(wwid);
    }
    if let Some(options) = what.iscsi.options()? {
        request = request.log_in(options);
    }
    let deadline = Deadline::after(what.timeout).cancelled_by(cancel);
    let attachment = match &what.volume {
        Some(volume) => {
            let journal = recover::open_and_tell(engine, what.journal.as_deref(), json, deadline)?;
            engine.attach_volume(&journal, volume, &request, deadline)?
        }
        None => engine.attach(&request, deadline)?,
    };
    drop(progress);
    Ok(exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::Attachment, &attachment)
        } else {
            write(out, &attachment)
        }
    }))
}

fn write(out: &mut dyn Write, attachment: &Attachment) -> io::Result<()> {
    let verb = if attachment.changed {
        "attached"
    } else {
        "was attached already"
    };
    let (source, node) = (&attachment.source, attachment.node.display());
    writeln!(out, "{source} {verb}: {node}")?;
    let size = indicatif::HumanBytes(attachment.size);
    let access = if attachment.read_only {
        ", read-only"
    } else {
        ""
    };
    writeln!(
        out,
        "  size      {size} ({} bytes{access})",
        attachment.size
    )?;
    let sequence = attachment.diskseq.map(|seq| format!(", diskseq {seq}"));
    let sequence = sequence.unwrap_or_default();
    writeln!(out, "  device    {}{sequence}", attachment.devno)?;
    write_unit(out, &attachment.unit)?;
    for link in &attachment.links {
        writeln!(out, "  link      {}", link.display())?;
    }
    writeln!(out, "  settled   by {}", attachment.settled.as_str())?;
    write_phases(out, &attachment.phases)
}

fn write_unit(out: &mut dyn Write, unit: &Unit) -> io::Result<()> {
    match unit {
        Unit::Scsi {
            identity,
            paths,
            missing,
            map,
            no_map,
            ..
        } => {
            if let Some(map) = map {
                writeln!(out, "  map       {map}")?;
            }
            if let Some(why) = no_map {
                writeln!(out, "  map       none: {why}")?;
            }
            write_paths(out, paths, missing)?;
            write_identity(out, identity)
        }
        Unit::Nbd {
            backend,
            connections,
            content,
            tls,
            ..
        } => {
            if let Some(id) = backend {
                writeln!(out, "  backend   {id}")?;
            }
            writeln!(out, "  links     {connections}")?;
            if let Some(tls) = tls {
                writeln!(out, "  tls       {}", tls_in_words(tls))?;
            }
            write_content(out, content.as_deref())
        }
        _ => Ok(()),
    }
}

fn write_paths(out: &mut dyn Write, paths: &[UnitPath], missing: &[MissingPath]) -> io::Result<()> {
    if paths.len() + missing.len() > 1 {
        for path in paths {
            let (via, hctl, node) = (&path.via, path.hctl, path.node.display());
            let state = path.access_state.map(|state| format!(", {state}"));
            let state = state.unwrap_or_default();
            writeln!(out, "  path      {node} {hctl}, {via}{state}")?;
        }
        for path in missing {
            writeln!(out, "  missing   {path}")?;
        }
    }
    for path in paths {
        for setting in &path.unmet_settings {
            writeln!(out, "  setting   {}: {setting}", path.via)?;
        }
    }
    Ok(())
}

fn write_identity(out: &mut dyn Write, identity: &Identity) -> io::Result<()> {
    for name in &identity.names {
        writeln!(out, "  name      {name}")?;
    }
    if identity.is_weak() {
        writeln!(
            out,
            "  identity  weak: another unit may have each of these names"
        )?;
    }
    if let Some(serial) = &identity.serial {
        writeln!(out, "  serial    {serial}")?;
    }
    Ok(())
}

fn write_content(out: &mut dyn Write, names: Option<&[ContentName]>) -> io::Result<()> {
    match names {
        Some([]) => writeln!(out, "  content   blank, or without a name that is known"),
        Some(names) => {
            let mut names = names.iter();
            names.try_for_each(|name| writeln!(out, "  content   {name}"))
        }
        None => writeln!(
            out,
            "  content   not read: the server answers with an error"
        ),
    }
}

/// The version, the cipher, and the server's certificate.
pub(crate) fn tls_in_words(tls: &TlsInfo) -> String {
    let certificate = &tls.certificate;
    let end = humantime::format_rfc3339_seconds(certificate.valid_until);
    let subject = &certificate.subject;
    format!("{tls}, the server's certificate ({subject}) is valid until {end}")
}

pub(crate) fn write_phases(out: &mut dyn Write, phases: &[Phase]) -> io::Result<()> {
    let spent: Vec<String> = phases
        .iter()
        .map(|phase| format!("{} {:.1} ms", phase.stage, phase.took.as_secs_f64() * 1e3))
        .collect();
    writeln!(out, "  time      {}", spent.join(", "))
}
