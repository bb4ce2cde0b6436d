//! Puts the results of whole sweeps (standard input: a run's output) into
//! `vm-tests/results/sweeps.md`.

use std::fs;
use std::io::{ErrorKind, Read, stdin};

use anyhow::{Context, Result};

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/results/sweeps.md");

fn main() -> Result<()> {
    let mut output = String::new();
    stdin()
        .read_to_string(&mut output)
        .context("a run's output")?;
    let table = match fs::read_to_string(TABLE) {
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        read => read.context(TABLE)?,
    };
    fs::write(TABLE, vm_tests::sweep_row::updated(&table, &output)).context(TABLE)
}
