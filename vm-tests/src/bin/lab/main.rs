//! The host's side of the lab: prepares kernels and guest root, boots, reports.
//!
//! `vm-tests/test`, `vm-tests/demo` and `vm-tests/bench` call it.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "results go to standard output, progress and troubles to standard error"
)]

mod accel;
mod apt;
mod bench;
mod boot;
mod bzimage;
mod cache;
mod charts;
mod debian;
mod decompress;
mod demo;
mod expected_skips;
mod guest_root;
mod host_bench;
mod host_suite;
mod kernel;
mod modules;
mod newc;
mod picture;
mod programs;
mod qemu;
mod results;
mod run_dir;
mod schedule;
mod step;
mod summary;
mod svg;
mod units;

use std::io::{IsTerminal, stdout};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use crate::kernel::Series;
use crate::summary::Summary;

#[derive(Debug, Parser)]
#[command(
    name = "vm-tests",
    about = "lunbd on real kernels, with a real udevd, in QEMU"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the host's tests, then every VM test.
    #[command(name = "test", override_usage = "vm-tests/test [OPTIONS] [FILTER]")]
    Test(TestArguments),
    /// Tell the story of one attach in one VM and draw it.
    #[command(override_usage = "vm-tests/demo")]
    Demo,
    /// Time lunbd beside what is used today in one VM, and draw it.
    #[command(override_usage = "vm-tests/bench [OPTIONS] [PART]", after_help = ENVIRONMENT)]
    Bench(bench::BenchArguments),
}

#[derive(Debug, Args)]
#[command(after_help = ENVIRONMENT)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
struct TestArguments {
    /// Only VM tests whose `file::name` contains this.
    filter: Option<String>,
    /// Every kernel series the lab knows, not only 6.1 and the newest.
    #[arg(long)]
    all_kernels: bool,
    /// Leave the host's tests out.
    #[arg(long)]
    vm_only: bool,
    /// A line for each test that passes, also in a pipe; there each file has one.
    #[arg(long)]
    each_test: bool,
    /// Take the kernels and guest packages that Debian has now.
    #[arg(long)]
    refresh: bool,
}

const ENVIRONMENT: &str = "\
Environment:
  LUNBD_VM_KERNEL  one of 5.10, 6.1, 6.12, newest: only that kernel
  LUNBD_VM_ACCEL   kvm or tcg: no probe
  LUNBD_VM_SEED    the number that a run printed: chance goes by it again
  LUNBD_VM_SWEEPS  whole: kills, faults and resets at every step, for hours; without
                   it kills at every fifth or tenth, faults and resets at fewer
  LUNBD_VM_CACHE   where packages, kernels and images are kept
                   (default: lunbd-vm in the user's cache directory)";

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Test(arguments) => test(&arguments),
        Command::Demo => demo::run().map(|()| true),
        Command::Bench(arguments) => bench::run(&arguments).map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn test(arguments: &TestArguments) -> Result<bool> {
    let series = Series::wanted(arguments.all_kernels)?;
    let mut summary = Summary::new(arguments.each_test || stdout().is_terminal());
    if !arguments.vm_only {
        host_suite::run(&mut summary)?;
    }
    schedule::run(
        &series,
        arguments.filter.as_deref(),
        arguments.refresh,
        &mut summary,
    )?;
    summary.print();
    Ok(summary.succeeded())
}
