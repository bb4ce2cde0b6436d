//! The library's traces, on standard error.

use std::io::{self, Write, stderr};

use lunbd::{Error, ErrorKind, Result};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{self, FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::envelope::{self, Type};
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
        let lines = lines.json();
        lines.map_event_format(InEnvelope).boxed()
    } else {
        lines.boxed()
    };
    let registry = tracing_subscriber::registry().with(lines.with_filter(shown));
    // Nothing else in this process sets a subscriber.
    let _the_only_one = registry.try_init();
    Ok(())
}

/// The format of an event as a JSON object, with the envelope of each JSON line.
struct InEnvelope<F>(F);

impl<S, N, F> FormatEvent<S, N> for InEnvelope<F>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> std::fmt::Result {
        let mut line = String::new();
        self.0
            .format_event(context, Writer::new(&mut line), event)?;
        writer.write_str(&envelope::around(Type::Log, &line))
    }
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
