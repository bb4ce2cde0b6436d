//! The host's side of the lab: it prepares the kernels and the guest's root, boots, and
//! reports.
//!
//! `vm-tests/test` runs it. `vm-tests/demo` and `vm-tests/bench` run it through `vm-bench`.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "results go to standard output, progress and troubles to standard error"
)]

mod accel;
mod apt;
mod boot;
mod bzimage;
mod cache;
mod choice;
mod cost;
mod debian;
mod decompress;
mod emulator;
mod expected_skips;
mod guest_root;
mod harmless;
mod host_suite;
mod kernel;
mod modules;
mod newc;
mod own_patch;
mod package;
mod programs;
mod qemu;
mod remains;
mod run_dir;
mod schedule;
mod seed;
mod step;
mod story;
mod summary;
mod units;

use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use crate::choice::Breadth;
use crate::kernel::Series;
use crate::schedule::Plan;
use crate::seed::SEED;
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
    /// Run every VM test, and the host's tests beside them.
    #[command(name = "test", override_usage = "vm-tests/test [OPTIONS] [FILTER]")]
    Test(TestArguments),
    /// Run one program in one VM; `vm-tests/demo` and `vm-tests/bench` use it.
    Story(story::StoryArguments),
}

#[derive(Debug, Args)]
#[command(after_help = ENVIRONMENT)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
struct TestArguments {
    /// Only VM tests whose `file::name` contains this, or one of these: FILTER,FILTER.
    filter: Option<String>,
    /// Every test on 6.1 and on the newest kernel, not on one of them by the seed; and the
    /// tests of udev, multipathd and open-iscsi with those of Debian sid.
    #[arg(long)]
    all: bool,
    /// Every test on every kernel series that the lab knows; it also boots the tests
    /// that vm-tests/expected-skips lists, and fails where one of them does not skip.
    #[arg(long, conflicts_with = "all")]
    all_kernels: bool,
    /// Leave the host's tests out.
    #[arg(long)]
    vm_only: bool,
    /// A program that runs beside the machines, before the host's tests. The run fails if it
    /// does.
    #[arg(long, value_name = "PROGRAM")]
    beside: Option<PathBuf>,
    /// A line for each test that passes, also in a pipe; there each file has one.
    #[arg(long)]
    each_test: bool,
    /// Take the kernels and guest packages that Debian has now.
    #[arg(long)]
    refresh: bool,
}

impl TestArguments {
    /// A user who names tests wants to see them on each kernel.
    fn breadth(&self) -> Breadth {
        if self.all_kernels {
            Breadth::EachWithKnownSkips
        } else if self.all || self.filter.is_some() {
            Breadth::Each
        } else {
            Breadth::BySeed(*SEED)
        }
    }
}

const ENVIRONMENT: &str = "\
Environment:
  LUNBD_VM_KERNEL  one of 5.10, 6.1, 6.12, newest: only that kernel; sid: the newest
                   kernel with the userland of Debian sid
  LUNBD_VM_USERLAND  a Debian release such as sid: the guest's udev, multipath-tools
                   and open-iscsi are of that one and not of this machine's
  LUNBD_VM_ACCEL   kvm, tcg or tcg-on-one-thread: no probe
  LUNBD_VM_SEED    the number that a run printed: each test has that run's kernel
                   again, and chance goes by it again (default: the number of commits)
  LUNBD_VM_SWEEPS  whole: kills, faults and resets at every step, for hours; without
                   it at a part of the steps, and at another part with the next seed
  LUNBD_VM_CACHE   where packages, kernels and images are kept
                   (default: lunbd-vm in the user's cache directory)";

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Test(arguments) => test(&arguments),
        Command::Story(arguments) => story::run(&arguments).map(|()| true),
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
    let series = Series::wanted(if arguments.all_kernels {
        &Series::EACH_KERNEL
    } else if arguments.all {
        &Series::WITH_SIDS_USERLAND
    } else {
        &Series::OLD_AND_NEW
    })?;
    seed::given()?;
    qemu::sweeps_are_whole()?;
    let mut summary = Summary::new(arguments.each_test || stdout().is_terminal())?;
    eprintln!(
        "LUNBD_VM_SEED={} chooses each test's kernel, and the tests of chance go by it",
        *SEED
    );
    let plan = Plan::make(
        &series,
        arguments.breadth(),
        arguments.filter.as_deref(),
        arguments.refresh,
        &mut summary,
    )?;
    let shared = Mutex::new(&mut summary);
    let on_the_host = || {
        if let Some(program) = &arguments.beside {
            host_suite::run_program(program, &shared)?;
        }
        if arguments.vm_only {
            return Ok(());
        }
        host_suite::run(&shared)
    };
    match &plan {
        Some(plan) => plan.run(on_the_host, &shared)?,
        None => on_the_host()?,
    }
    summary.add_missing();
    // The checks build some of the dependencies otherwise than the tests.
    let has_built_all =
        arguments.filter.is_none() && !arguments.vm_only && arguments.beside.is_some();
    if has_built_all && summary.succeeded() {
        programs::keep_compiled_dependencies();
    }
    summary.print()?;
    Ok(summary.succeeded())
}
