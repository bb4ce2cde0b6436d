//! One boot for one program: it passes on the program's output and keeps its result.

use std::fs;
use std::io::{Write, stdout};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;
use vm_tests::job::{Job, Report};

use crate::accel::Accel;
use crate::boot::{self, Setup};
use crate::kernel::Series;
use crate::run_dir::RunDir;
use crate::{harmless, modules, programs, schedule};

#[derive(Debug, Args)]
pub(crate) struct StoryArguments {
    /// The package of this workspace that has the program.
    #[arg(long)]
    package: String,
    /// The file for the accelerator and the program's result, as JSON.
    #[arg(long)]
    result: PathBuf,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    program: Vec<String>,
}

/// Fails if the program fails or leaves no result.
pub(crate) fn run(arguments: &StoryArguments) -> Result<()> {
    // The first series that a test run would take.
    let series = &Series::wanted(&Series::OLD_AND_NEW)?[..1];
    let run_dir = RunDir::create()?;
    let program = &arguments.program[0];
    let programs = programs::build_for_story(&run_dir, &arguments.package, program)?;
    let (emulator, roots, kernels) = schedule::prepare(series, false)?;
    let kernel = kernels.first().context("no kernel")?;
    let with_kvm = emulator.command(Accel::Kvm);
    let accel = Accel::choose(Accel::Tcg, with_kvm, &kernel.vmlinux, &run_dir)?;
    let setup = Setup {
        kernel,
        root: roots.first().context("no userland")?,
        programs: &programs,
        emulator: &emulator,
        accel,
        run_dir: &run_dir,
        seat: 0,
    };
    let job = Job {
        modules: modules::LOADED_AT_BOOT
            .iter()
            .map(|name| (*name).to_owned())
            .collect(),
        tests: Vec::new(),
        story: Some(arguments.program.clone()),
        own_boot: true,
    };
    eprintln!("booting {} ({accel:?})\n", kernel.series);
    let mut ending = None;
    let ended = boot::boot(&setup, &job, |report, _| {
        match report {
            Report::Story { text } => {
                let mut out = stdout();
                out.write_all(text.as_bytes())?;
                out.flush()?;
            }
            Report::StoryEnded { result, status } => ending = Some((result, status)),
            Report::Booted { alarms, .. } | Report::Done { alarms } => {
                if let Some(defect) = harmless::defects(kernel.series, &alarms).first() {
                    bail!("{} logged: {defect}", kernel.series);
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    let Some((result, status)) = ending else {
        let log = run_dir.keep_log(program, &ended.console)?;
        bail!(
            "the guest ended before {program} did ({}); its console: {}",
            ended.why,
            log.display()
        );
    };
    if status != 0 {
        bail!("{program} ended with status {status}");
    }
    if !ended.done {
        bail!("the guest died after {program} had ended ({})", ended.why);
    }
    let result = result.with_context(|| format!("{program} left no result"))?;
    let accelerator = format!("{accel:?}").to_lowercase();
    let kept = json!({ "accelerator": accelerator, "result": result });
    let file = &arguments.result;
    fs::write(file, kept.to_string()).with_context(|| file.display().to_string())
}
