//! `lunbd`: the engine at a command line.

#![forbid(unsafe_code)]

mod arguments;
mod attach;
mod detach;
mod doctor;
mod exit;
mod heal;
mod list;
mod progress;
mod resize;
mod watch;

use std::process::ExitCode;

use clap::Parser;
use lunbd::{Engine, Roots};

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return exit::usage(&error),
    };
    let json = arguments.json;
    let done = Engine::start(Roots::default()).and_then(|engine| match arguments.command {
        Command::Attach(what) => attach::run(&engine, what, json),
        Command::Detach(what) => Ok(detach::run(&engine, what, json)),
        Command::Heal(what) => heal::run(&engine, what, json),
        Command::Resize(what) => resize::run(&engine, what, json),
        Command::List => list::run(&engine, json),
        Command::Watch => watch::run(&engine, json),
        Command::Doctor => Ok(doctor::run(&engine, json)),
    });
    match done {
        Ok(code) => code,
        Err(error) => exit::failure(&error, json),
    }
}
