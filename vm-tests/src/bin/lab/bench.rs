//! One VM, and in it everything that is timed, side by side.

use std::fs;
use std::io::{Write, stdout};

use anyhow::{Context, Result, bail};
use vm_tests::job::{Job, Report};

use crate::accel::Accel;
use crate::boot::{self, Setup};
use crate::kernel::Series;
use crate::run_dir::RunDir;
use crate::{modules, programs, schedule};

/// The last word is what has the boot carry the NBD programs.
const COMPARE: [&str; 2] = ["compare", "nbd"];

/// Boots the bench's kernel, passes the tables on as they come, and keeps the
/// figures. No time fails it: only what does not work at all does.
pub(crate) fn run() -> Result<()> {
    // The first of those that a test run would take.
    let series = &Series::wanted(false)?[..1];
    let run_dir = RunDir::create()?;
    let programs = programs::build_for_bench(&run_dir)?;
    let (root, kernels) = schedule::prepare(series, false)?;
    let kernel = kernels.first().context("no kernel")?;
    let accel = Accel::choose(&kernel.vmlinux, &run_dir)?;
    let setup = Setup {
        kernel,
        root: &root,
        programs: &programs,
        accel,
        run_dir: &run_dir,
    };
    let job = Job {
        modules: modules::LOADED_AT_BOOT
            .iter()
            .map(|name| (*name).to_owned())
            .collect(),
        tests: Vec::new(),
        story: Some(COMPARE.map(str::to_owned).to_vec()),
        own_boot: true,
    };
    eprintln!("booting {} ({accel:?})\n", kernel.series);
    let mut ending = None;
    let ended = boot::boot(&setup, &job, |report| {
        match report {
            Report::Story { text } => {
                let mut out = stdout();
                out.write_all(text.as_bytes())?;
                out.flush()?;
            }
            Report::StoryEnded { result, status } => ending = Some((result, status)),
            _ => {}
        }
        Ok(())
    })?;
    let Some((result, status)) = ending else {
        let log = run_dir.keep_log("bench", &ended.console)?;
        bail!(
            "the guest ended before its bench ({}); its console: {}",
            ended.why,
            log.display()
        );
    };
    if status != 0 {
        bail!("the bench ended with status {status}");
    }
    let mut figures = result.context("the bench left no figures")?;
    // The guest does not know what runs it.
    figures["accelerator"] = format!("{accel:?}").to_lowercase().into();
    let path = run_dir.kept("bench.json");
    let json = serde_json::to_vec_pretty(&figures)?;
    fs::write(&path, json).with_context(|| path.display().to_string())?;
    println!(
        "\nQEMU's {accel:?} on this machine; every round: {}",
        path.display()
    );
    Ok(())
}
