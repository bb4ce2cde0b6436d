//! `lunbd completions` and `lunbd man`, generated from the definitions that the command
//! itself parses, and `lunbd schema`.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;
use lunbd::{Error, ErrorKind, Result};

use crate::arguments::Arguments;
use crate::exit;

const NAME: &str = "lunbd";

pub(crate) fn completions(shell: Shell) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), NAME, &mut script);
    exit::print(|out| out.write_all(&script))
}

/// Prints the schema that the tests compare each JSON output with.
pub(crate) fn schema() -> ExitCode {
    const SCHEMA: &str = include_str!("../../../docs/lunbd.schema.json");
    exit::print(|out| out.write_all(SCHEMA.as_bytes()))
}

/// # Errors
/// `InvalidInput` if there is no such command.
pub(crate) fn man(command: Option<&str>) -> Result<ExitCode> {
    let mut whole = Arguments::command();
    whole.build();
    let page = match command {
        None => Man::new(whole),
        Some(name) => {
            let Some(found) = whole.find_subcommand(name) else {
                let message = format!("there is no command {name}: see lunbd --help");
                return Err(Error::new(ErrorKind::InvalidInput, message));
            };
            Man::new(found.clone())
        }
    };
    Ok(exit::print(|out| render(&page, out)))
}

fn render(page: &Man, out: &mut dyn Write) -> io::Result<()> {
    let mut text = Vec::new();
    page.render(&mut text)?;
    out.write_all(&text)
}
