//! One VM, one story, one picture.

use std::fs;
use std::io::{Write, stdout};

use anyhow::{Context, Result, bail};
use vm_tests::job::{Job, Report};
use vm_tests::story::Figures;

use crate::accel::Accel;
use crate::boot::{self, Setup};
use crate::kernel::Series;
use crate::run_dir::RunDir;
use crate::{modules, picture, programs, schedule};

/// Boots the story's kernel, passes on what it tells as it tells it, and draws
/// the picture.
pub(crate) fn run() -> Result<()> {
    // The first of those that a test run would take.
    let series = &Series::wanted(false)?[..1];
    let run_dir = RunDir::create()?;
    let programs = programs::build(&run_dir)?;
    let (root, kernels) = schedule::prepare(series, false)?;
    let kernel = kernels.first().context("no kernel")?;
    let accel = Accel::choose(&kernel.vmlinux, &run_dir)?;
    let setup = Setup {
        kernel,
        root: &root,
        programs: &programs,
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
        story: Some(vec![
            "story".to_owned(),
            "scsi".to_owned(),
            "nbd".to_owned(),
        ]),
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
        let log = run_dir.keep_log("demo", &ended.console)?;
        bail!(
            "the guest ended before its story ({}); its console: {}",
            ended.why,
            log.display()
        );
    };
    if status != 0 {
        bail!("the story ended with status {status}");
    }
    let figures: Figures = serde_json::from_value(result.context("the story left no figures")?)
        .context("the story's figures")?;
    let path = run_dir.kept("story.svg");
    fs::write(&path, picture::draw(&figures)).with_context(|| path.display().to_string())?;
    println!("\npicture: {}", path.display());
    Ok(())
}
