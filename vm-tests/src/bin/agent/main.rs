//! A complete node agent: it keeps this machine's volumes as a file wants them.
//!
//! ```text
//! agent DESIRED.json [JOURNAL]
//! ```
//!
//! The file has the shape of [`Desired`]: `{"volume": [{"id": .., "source": ..}]}`. The agent
//! reads it again whenever it is replaced or written; an unreadable file changes nothing. Each
//! event is a line of JSON on standard output. SIGTERM ends the agent and leaves the volumes as
//! they are. The agent may be killed at any instruction: the next one continues from the
//! journal.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "its output")]

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use lunbd::reconcile::{Desired, Events, Options, Reconciler};
use lunbd::{Deadline, Engine, Roots};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

fn main() -> Result<()> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (file, journal) = match arguments.as_slice() {
        [file] => (PathBuf::from(file), None),
        [file, journal] => (PathBuf::from(file), Some(PathBuf::from(journal))),
        _ => anyhow::bail!("usage: agent DESIRED.json [JOURNAL]"),
    };
    // The signals are blocked before any thread starts that could receive them.
    let signals = ended()?;
    let changes = watch(&file)?;

    let engine = Arc::new(Engine::start(Roots::default())?);
    let limit = Deadline::after(Duration::from_secs(30));
    let journal = match journal {
        Some(directory) => engine.open_journal_at(&directory, limit)?,
        None => engine.open_journal(limit)?,
    };
    for problem in journal.problems() {
        eprintln!("no record: {}: {}", problem.file.display(), problem.text);
    }
    let reconciler = Reconciler::new(engine, journal, Options::default());
    // Without the file, the reconciler would treat every volume of the journal as unwanted.
    reconciler.set(read(&file)?);

    let events = reconciler.subscribe();
    std::thread::scope(|scope| {
        scope.spawn(|| tell(events));
        let running = scope.spawn(|| {
            let result = reconciler.run();
            // Without its loop the agent is of no use, so it exits and its supervisor restarts
            // it.
            result.inspect_err(|error| {
                eprintln!("{error:#}");
                std::process::exit(1);
            })
        });
        let served = serve(&reconciler, &file, &signals, &changes);
        reconciler.stop();
        if running.join().is_err() || served.is_err() {
            eprintln!("it ends: {served:?}");
        }
        // The thread that prints events still waits for events; none will come.
        std::process::exit(i32::from(served.is_err()));
    })
}

/// Reads the file whenever it changes, until a signal ends the agent.
fn serve(
    reconciler: &Reconciler,
    file: &Path,
    signals: &SignalFd,
    changes: &Inotify,
) -> Result<()> {
    loop {
        let mut ready = [
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(changes.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut ready, PollTimeout::NONE).context("poll")?;
        if ready[0].any() == Some(true) {
            return Ok(());
        }
        let name = file.file_name();
        let events = changes.read_events().context("inotify")?;
        if events.iter().any(|event| event.name.as_deref() == name) {
            match read(file) {
                Ok(desired) => reconciler.set(desired),
                Err(error) => eprintln!("nothing is changed: {error:#}"),
            }
        }
    }
}

fn read(file: &Path) -> Result<Desired> {
    let text = fs::read(file).with_context(|| file.display().to_string())?;
    serde_json::from_slice(&text).with_context(|| file.display().to_string())
}

fn tell(mut events: Events) {
    let forever = Deadline::after(Duration::MAX);
    while let Some(event) = events.next(forever) {
        let mut out = std::io::stdout().lock();
        let told = serde_json::to_writer(&mut out, &event)
            .map_err(std::io::Error::from)
            .and_then(|()| writeln!(out))
            .and_then(|()| out.flush());
        if let Err(error) = told {
            eprintln!("nobody listens: {error}");
        }
    }
}

/// Readable when a signal asks the agent to end.
fn ended() -> Result<SignalFd> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("blocking signals")?;
    SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context("a signalfd")
}

/// Readable when something in the file's directory was written or replaced.
fn watch(file: &Path) -> Result<Inotify> {
    let watch = Inotify::init(InitFlags::IN_CLOEXEC)?;
    let directory = file.parent().filter(|parent| *parent != Path::new(""));
    let flags = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO;
    watch
        .add_watch(directory.unwrap_or(Path::new(".")), flags)
        .with_context(|| format!("watching the directory of {}", file.display()))?;
    Ok(watch)
}
