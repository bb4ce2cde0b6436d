//! Exit codes, and errors for people and for programs.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::{Error, ErrorKind};
use serde::Serialize;

use crate::envelope::{self, Type};
use crate::interrupt;

/// The exit code of a kind of failure. README.md and `--help` list them.
fn code(kind: ErrorKind) -> u8 {
    if let Some(code) = interrupt::exit_code() {
        return code;
    }
    match kind {
        ErrorKind::InvalidInput => 2,
        ErrorKind::NoSuchHost | ErrorKind::NotFound | ErrorKind::TooFewPaths => 3,
        ErrorKind::IdentityMismatch => 4,
        ErrorKind::InUse => 5,
        ErrorKind::TimedOut | ErrorKind::Cancelled | ErrorKind::Quarantined => 6,
        ErrorKind::NotPermitted => 7,
        ErrorKind::NotSupported => 8,
        _ => 1,
    }
}

/// The exit code for a failure that was reported on standard output.
pub(crate) fn of(kind: ErrorKind) -> ExitCode {
    ExitCode::from(code(kind))
}

/// Reports an error on standard error.
pub(crate) fn failure(error: &Error, json: bool) -> ExitCode {
    say(error.kind(), error, json)
}

/// Reports an error of any type, as [`failure`] does.
pub(crate) fn say(kind: ErrorKind, error: &(impl Serialize + Display), json: bool) -> ExitCode {
    let mut stderr = io::stderr().lock();
    // If standard error is closed, the report has no reader.
    let _ = if json {
        envelope::write(&mut stderr, Type::Error, error)
    } else {
        writeln!(stderr, "lunbd: {error:#}")
    };
    of(kind)
}

/// Prints clap's message. Help and version are no failures; any other message is.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    if wants_json() && error.use_stderr() {
        let message = error.to_string();
        let error = Error::new(ErrorKind::InvalidInput, message.trim_end());
        let _ = envelope::write(&mut io::stderr().lock(), Type::Error, &error);
    } else {
        let _ = error.print();
    }
    ExitCode::from(if error.use_stderr() { 2 } else { 0 })
}

/// Whether `--json` is given, for a place that has no parsed arguments.
fn wants_json() -> bool {
    std::env::args_os().any(|argument| argument == "--json")
}

/// Prints on standard output. A reader that went away is no failure of the command.
pub(crate) fn print(text: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> ExitCode {
    match text(&mut io::stdout().lock()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let error = Error::new(ErrorKind::Io, format!("cannot print: {error}"));
            failure(&error, wants_json())
        }
        _ => ExitCode::SUCCESS,
    }
}
