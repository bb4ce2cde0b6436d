//! The library's traces, on standard error.

use std::io::{self, Write, stderr};

use lunbd::{Error, ErrorKind, Result};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::progress::BARS;

/// The variable that selects the shown events, as `-v` does.
const VARIABLE: &str = "LUNBD_LOG";

/// Shows the library's events from now on. `verbose` counts `-v`. `stays` means that the
/// command runs until it is interrupted, so it shows warnings by default. `LUNBD_LOG`
/// takes precedence over `-v`: a level (`info`), or levels of modules
/// (`warn,lunbd::nbd=debug`).
pub(crate) fn show(verbose: u8, stays: bool, json: bool) -> Result<()> {
    let wanted = std::env::var(VARIABLE).unwrap_or_default();
    let shown = if wanted.is_empty() {
        let level = match verbose {
            0 if stays => LevelFilter::WARN,
            0 => return Ok(()),
            1 => LevelFilter::INFO,
            2 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        };
        Targets::new().with_target("lunbd", level)
    } else {
        wanted.parse::<Targets>().map_err(|error| {
            let message = format!(
                "{VARIABLE}={wanted}: {error}: give a level such as info, or modules with \
                 levels such as warn,lunbd::nbd=debug"
            );
            Error::new(ErrorKind::InvalidInput, message)
        })?
    };
    let lines = fmt::layer().with_writer(|| BesideBars).with_ansi(false);
    let lines = if json {
        lines.json().boxed()
    } else {
        lines.boxed()
    };
    let registry = tracing_subscriber::registry().with(lines.with_filter(shown));
    // Nothing else in this process sets a subscriber.
    let _the_only_one = registry.try_init();
    Ok(())
}

/// Standard error, with the progress lines hidden during a write.
struct BesideBars;

impl Write for BesideBars {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| stderr().write_all(line))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
