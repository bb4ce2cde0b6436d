//! `lunbd`: the engine at a command line.

#![forbid(unsafe_code)]

mod apply;
mod arguments;
mod attach;
mod desired_file;
mod detach;
mod detach_limit;
mod discover;
mod doctor;
mod envelope;
mod exit;
mod follow;
mod followed_file;
mod generate;
mod heal;
mod in_seconds;
mod initiator_name;
mod interrupt;
mod journal;
mod list;
mod log;
mod progress;
mod progress_display;
mod reap;
mod recover;
mod resize;
mod sessions;
mod status;
mod table;
mod threads;
mod watch;
mod watch_file;

use std::process::ExitCode;

use clap::Parser;
use lunbd::{Engine, Result, Roots};

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return exit::usage(&error),
    };
    let json = arguments.json;
    let shown = log::show(
        arguments.verbose,
        arguments.command.runs_until_interrupted(),
        json,
    );
    match shown.and_then(|()| run(arguments.command, json)) {
        Ok(code) => code,
        Err(error) => exit::failure(&error, json),
    }
}

fn run(command: Command, json: bool) -> Result<ExitCode> {
    let start = || Engine::start(Roots::default());
    match command {
        // These need no engine.
        Command::Completions { shell } => Ok(generate::completions(shell)),
        Command::Man { command } => generate::man(command.as_deref()),
        Command::Schema => Ok(generate::schema()),
        Command::Discover(what) => discover::run(&what, json),
        Command::Sessions => sessions::run(json),
        Command::InitiatorName(what) => initiator_name::run(&what, json),
        Command::Attach(what) => {
            let cancel = interrupt::cancels()?;
            attach::run(&start()?, what, &cancel, json)
        }
        Command::Detach(what) => {
            let cancel = interrupt::cancels()?;
            detach::run(&start()?, &what, &cancel, json)
        }
        Command::Apply(what) => apply::run(start()?, &what, json),
        Command::Status(what) => status::run(&start()?, &what, json),
        Command::Heal(what) => heal::run(start()?, &what, json),
        Command::Recover(what) => recover::run(&start()?, &what, json),
        Command::Journal(what) => journal::run(&start()?, what, json),
        Command::Reap(what) => reap::run(&start()?, &what, json),
        Command::Resize(what) => resize::run(&start()?, what, json),
        Command::List => list::run(&start()?, json),
        Command::Watch => watch::run(&start()?, json),
        Command::Doctor => Ok(doctor::run(&start()?, json)),
    }
}
