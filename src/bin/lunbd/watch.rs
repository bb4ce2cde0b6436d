//! `lunbd watch`

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use lunbd::uevent::{Event, Mode, Notice, UnitAttention};
use lunbd::{Deadline, Engine, Error, ErrorKind, Result};
use serde::Serialize;

use crate::envelope::{self, Type};
use crate::exit;

#[derive(Serialize)]
#[serde(untagged)]
enum Line<'a> {
    Event {
        seconds: f64,
        origin: lunbd::uevent::Origin,
        action: &'a str,
        seqnum: u64,
        subsystem: &'a str,
        devtype: Option<&'a str>,
        devpath: &'a str,
        /// The unit attention that the target of a SCSI device reported.
        #[serde(skip_serializing_if = "Option::is_none")]
        sdev_ua: Option<&'a UnitAttention>,
        links: &'a [String],
    },
    Lost {
        seconds: f64,
        lost: bool,
    },
}

impl Line<'_> {
    fn of(&self) -> Type {
        match self {
            Self::Event { .. } => Type::Uevent,
            Self::Lost { .. } => Type::UeventsLost,
        }
    }
}

/// Runs until it is interrupted or its reader goes away.
pub(crate) fn run(engine: &Engine, json: bool) -> Result<ExitCode> {
    let mode = engine.hub().mode();
    if mode == Mode::SysfsPoll {
        return Err(Error::new(
            ErrorKind::NotSupported,
            "no uevents reach this process (a user namespace, or a sysfs that is not the kernel's)",
        ));
    }
    let start = Instant::now();
    let mut watch = engine.hub().watch_all();
    if !json {
        let told = match mode {
            Mode::Udev => "kernel and udev events",
            _ => "kernel events (no udev here)",
        };
        // This is only a note; the events go to standard output.
        let _ = writeln!(io::stderr(), "{told}, until interrupted");
    }
    loop {
        let Some(notice) = watch.next(Deadline::after(Duration::MAX)) else {
            continue;
        };
        let line = line(&notice, start);
        let mut out = io::stdout().lock();
        let written = if json {
            envelope::write(&mut out, line.of(), &line)
        } else {
            write(&mut out, &line)
        };
        if let Err(error) = written.and_then(|()| out.flush()) {
            return Ok(exit::print(|_| Err(error)));
        }
    }
}

fn line(notice: &Notice, start: Instant) -> Line<'_> {
    match notice {
        Notice::Event(event) => event_line(event, start),
        Notice::Resync => Line::Lost {
            seconds: start.elapsed().as_secs_f64(),
            lost: true,
        },
    }
}

fn event_line(event: &Event, start: Instant) -> Line<'_> {
    Line::Event {
        seconds: event.at.saturating_duration_since(start).as_secs_f64(),
        origin: event.origin,
        action: &event.action,
        seqnum: event.seqnum,
        subsystem: &event.subsystem,
        devtype: event.devtype.as_deref(),
        devpath: &event.devpath,
        sdev_ua: event.sdev_ua.as_ref(),
        links: &event.links,
    }
}

fn write(out: &mut impl Write, line: &Line<'_>) -> io::Result<()> {
    match line {
        Line::Event {
            seconds,
            origin,
            action,
            seqnum,
            subsystem,
            devtype,
            devpath,
            sdev_ua,
            ..
        } => {
            let origin = match origin {
                lunbd::uevent::Origin::Kernel => "kernel",
                lunbd::uevent::Origin::Udev => "udev",
            };
            let kind = devtype.map_or_else(
                || (*subsystem).to_owned(),
                |devtype| format!("{subsystem}/{devtype}"),
            );
            write!(
                out,
                "{seconds:10.6} {origin:6} {action:6} {seqnum:8} {kind:18} {devpath}"
            )?;
            match sdev_ua {
                Some(report) => writeln!(out, ": {report}"),
                None => writeln!(out),
            }
        }
        Line::Lost { seconds, .. } => writeln!(out, "{seconds:10.6} events were lost here"),
    }
}
