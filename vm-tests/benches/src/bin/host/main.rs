//! The program on the host, which `vm-tests/bench` and `vm-tests/demo` call.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "results go to standard output, troubles to standard error"
)]

mod bench;
mod charts;
mod demo;
mod host_bench;
mod lab;
mod picture;
mod results;
mod svg;

use std::process::ExitCode;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(name = "vm-tests", after_help = ENVIRONMENT)]
enum Command {
    /// Tell the story of one attach in one VM and draw it.
    #[command(override_usage = "vm-tests/demo")]
    Demo,
    /// Time lunbd beside what is used today in one VM, and draw it.
    #[command(override_usage = "vm-tests/bench [OPTIONS] [PART]", after_help = ENVIRONMENT)]
    Bench(bench::BenchArguments),
}

const ENVIRONMENT: &str = "\
Environment:
  LUNBD_VM_KERNEL  one of 5.10, 6.1, 6.12, newest: in place of 6.1
  LUNBD_VM_ACCEL   kvm, tcg or tcg-on-one-thread: no probe
  LUNBD_VM_CACHE   where packages, kernels and images are kept
                   (default: lunbd-vm in the user's cache directory)";

fn main() -> ExitCode {
    let done = match Command::parse() {
        Command::Demo => demo::run(),
        Command::Bench(arguments) => bench::run(&arguments),
    };
    if let Err(error) = done {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
