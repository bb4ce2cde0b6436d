//! An agent that links `lunbd` with its crash points, performs one operation on one volume, and
//! ends where its environment says.
//!
//! `crash-agent points` lists the points; `crash-agent OPERATION JOURNAL SOURCE...` runs an
//! operation.

#![allow(clippy::print_stdout, reason = "the test listens")]

use std::env;
use std::fs;
use std::io::{BufRead, stdin};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use lunbd::engine::{DetachVolume, SessionRecoveryOptions};
use lunbd::{CrashPoint, Deadline, DetachTarget, Engine, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::crash::{ATTACHED, options, request, volume};

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let operation = arguments.next().context("an operation")?;
    if operation == "points" {
        for point in CrashPoint::ALL {
            println!("{}", point.as_str());
        }
        return Ok(());
    }
    guest::enter();
    let journal = PathBuf::from(arguments.next().context("a journal")?);
    let sources: Vec<String> = arguments.collect();
    act(&engine(), &operation, &journal, &sources)
}

fn act(engine: &Engine, operation: &str, journal: &Path, sources: &[String]) -> Result<()> {
    let journal = engine.open_journal_at(journal, soon())?;
    let attach = || engine.attach_volume(&journal, &volume(), &request(sources), soon());
    match operation {
        // `retake` attaches a volume that is attached and lacks a path.
        "attach" | "retake" => drop(attach()?),
        "detach" => {
            let how = DetachVolume::default();
            engine.detach_volume(&journal, &volume(), &how, soon())?;
        }
        "detach-source" => {
            for source in sources {
                engine.detach(source.parse::<Source>()?, soon())?;
            }
        }
        "detach-device" => {
            for node in sources {
                engine.detach(DetachTarget::Device(node.into()), soon())?;
            }
        }
        "abandon" => {
            let how = DetachVolume::default().abandon_unwritten();
            let deadline = Deadline::after(Duration::from_secs(10));
            engine.detach_volume(&journal, &volume(), &how, deadline)?;
        }
        "resize" => {
            engine.resize_volume(&journal, &volume(), None, soon())?;
        }
        "attach-and-heal" | "attach-and-resize" => {
            let attachment = attach()?;
            println!("{ATTACHED}");
            // The test sends a line when it has started the server again, or made its file longer.
            stdin().lock().read_line(&mut String::new())?;
            if operation == "attach-and-heal" {
                engine.heal_source(&attachment.source, &options(), soon())?;
            } else {
                engine.resize_volume(&journal, &volume(), None, soon())?;
            }
        }
        "recover-session" => {
            let mut keeper = engine.recover_sessions(SessionRecoveryOptions::new())?;
            let limit = soon();
            while !keeper.next(limit)?.iter().any(|kept| kept.outcome.serves()) {
                if limit.has_passed() {
                    bail!("no session came back");
                }
            }
        }
        // The session is up, and one of its devices does not run.
        "run-device" => {
            let log = env::var("LUNBD_CRASH_LOG")?;
            let mut keeper = engine.recover_sessions(SessionRecoveryOptions::new())?;
            let limit = soon();
            while !fs::read_to_string(&log)?.contains("iscsi.device-runs") {
                keeper.next(Deadline::after(Duration::from_millis(20)))?;
                if limit.has_passed() {
                    bail!("the device does not run");
                }
            }
        }
        _ => bail!("{operation}: no such operation"),
    }
    Ok(())
}
