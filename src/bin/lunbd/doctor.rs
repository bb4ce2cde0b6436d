//! `lunbd doctor`

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use lunbd::engine::{Check, Finding};
use lunbd::{Deadline, Engine};
use serde::Serialize;

use crate::envelope::{self, Type};
use crate::exit;

#[derive(Serialize)]
struct Report<'a> {
    mode: lunbd::uevent::Mode,
    ready: bool,
    checks: &'a [Check],
}

/// Exits with 8 if something is missing that an attach or a detach needs.
pub(crate) fn run(engine: &Engine, json: bool) -> ExitCode {
    const LIMIT: Duration = Duration::from_secs(10);
    let checks = engine.preflight(Deadline::after(LIMIT));
    let ready = checks.iter().all(|check| check.finding < Finding::Missing);
    let printed = exit::print(|mut out| {
        if json {
            let mode = engine.hub().mode();
            let checks = &checks;
            envelope::write(
                &mut out,
                Type::Doctor,
                &Report {
                    mode,
                    ready,
                    checks,
                },
            )
        } else {
            write(out, &checks, ready)
        }
    });
    if ready { printed } else { ExitCode::from(8) }
}

fn write(out: &mut dyn Write, checks: &[Check], ready: bool) -> io::Result<()> {
    for check in checks {
        let mark = match check.finding {
            Finding::Good => "good",
            Finding::Limited => "limited",
            Finding::Missing => "MISSING",
        };
        writeln!(out, "{:15} {mark:8} {}", check.name, check.seen)?;
        if !check.remedy.is_empty() {
            writeln!(out, "{:15} {:8} to mend: {}", "", "", check.remedy)?;
        }
    }
    let verdict = if ready {
        "this machine is ready"
    } else {
        "attach and detach will fail here"
    };
    writeln!(out, "{verdict}")
}
