//! Exit codes, and errors for people and for programs.

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::error::Stage;
use lunbd::{Error, ErrorKind};
use serde::Serialize;

/// The exit code of a kind of failure. README.md and `--help` list them.
fn code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::InvalidInput => 2,
        ErrorKind::NoSuchHost | ErrorKind::NotFound => 3,
        ErrorKind::IdentityMismatch => 4,
        ErrorKind::InUse => 5,
        ErrorKind::TimedOut => 6,
        ErrorKind::NotPermitted => 7,
        ErrorKind::NotSupported => 8,
        _ => 1,
    }
}

#[derive(Serialize)]
struct Failure<'a> {
    kind: &'a str,
    stage: Option<&'a str>,
    message: String,
    retry: &'a str,
}

/// Says what failed.
pub(crate) fn failure(error: &Error, json: bool) -> ExitCode {
    let message = format!("{error:#}");
    let mut stderr = io::stderr().lock();
    // Where standard error is closed there is nobody to tell.
    let _ = if json {
        let failure = Failure {
            kind: error.kind().as_str(),
            stage: error.stage().map(Stage::as_str),
            message,
            retry: error.retry().as_str(),
        };
        write_json(&mut stderr, &failure)
    } else {
        writeln!(stderr, "lunbd: {message}")
    };
    ExitCode::from(code(error.kind()))
}

/// Help and version are no failures; everything else says what was expected.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    let wants_json = std::env::args_os().any(|argument| argument == "--json");
    if wants_json && error.use_stderr() {
        let failure = Failure {
            kind: ErrorKind::InvalidInput.as_str(),
            stage: None,
            message: error.to_string().trim_end().to_owned(),
            retry: ErrorKind::InvalidInput.retry().as_str(),
        };
        let _ = write_json(&mut io::stderr().lock(), &failure);
    } else {
        let _ = error.print();
    }
    ExitCode::from(if error.use_stderr() { 2 } else { 0 })
}

/// One JSON object and a newline.
pub(crate) fn write_json(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)
}

/// Prints on standard output. A reader that went away is no failure of what
/// was done.
pub(crate) fn print(text: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> ExitCode {
    match text(&mut io::stdout().lock()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "lunbd: cannot print: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}
