//! One VM, and in it everything that is timed, side by side.

use std::fs;
use std::io::{Write, stdout};
use std::path::Path;
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use vm_tests::bench::Figures;
use vm_tests::job::{Job, Report};

use crate::accel::Accel;
use crate::boot::{self, Setup};
use crate::kernel::Series;
use crate::results::{self, Results};
use crate::run_dir::RunDir;
use crate::{charts, host_bench, modules, programs, schedule};

const ROUNDS: u16 = 20;

#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    /// Only this comparison.
    part: Option<Part>,
    /// How often each way is timed.
    #[arg(long, default_value_t = ROUNDS)]
    rounds: u16,
    /// Put figures and charts into vm-tests/results, where the README links
    /// them.
    #[arg(long)]
    keep: bool,
}

/// One part of the bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Criterion's, on this machine and without a VM.
    Host,
    /// One NBD export, and many at once.
    Nbd,
    /// Two hundred NBD volumes, by a reconciler and one after the other.
    NbdVolumes,
    /// One LUN of iSCSI targets of several sizes.
    Iscsi,
    /// One LUN of an iSCSI target, login and logout with it.
    IscsiLogin,
}

impl Part {
    /// By this word the guest knows it, and the boot what it has to carry.
    fn word(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Nbd => "nbd",
            Self::NbdVolumes => "nbd-volumes",
            Self::Iscsi => "iscsi",
            Self::IscsiLogin => "iscsi-login",
        }
    }
}

/// Runs the parts that are wanted, keeps the figures and draws them. No time fails
/// it: only what does not work at all does.
pub(crate) fn run(arguments: &BenchArguments) -> Result<()> {
    let parts = arguments
        .part
        .map_or_else(|| Part::value_variants().to_vec(), |part| vec![part]);
    let run_dir = RunDir::create()?;
    let mut files = Vec::new();
    // First, while nothing of a VM's is left to be done.
    if parts.contains(&Part::Host) {
        let command = command(arguments);
        files.extend(host_bench::run(today()?, command, load_average)?);
    }
    let in_the_vm: Vec<Part> = parts
        .into_iter()
        .filter(|part| *part != Part::Host)
        .collect();
    if !in_the_vm.is_empty() {
        files.extend(run_in_the_vm(arguments, &in_the_vm, &run_dir)?);
    }
    let directory = if arguments.keep {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("results")
    } else {
        run_dir.kept("bench")
    };
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    println!("\nEvery round, tables and charts:");
    for (name, content) in files {
        let path = directory.join(name);
        fs::write(&path, content).with_context(|| path.display().to_string())?;
        println!("  {}", path.display());
    }
    Ok(())
}

/// Boots the bench's kernel and passes the tables on as they come.
fn run_in_the_vm(
    arguments: &BenchArguments,
    parts: &[Part],
    run_dir: &RunDir,
) -> Result<Vec<(&'static str, String)>> {
    // The first of those that a test run would take.
    let series = &Series::wanted(false)?[..1];
    let programs = programs::build_for_bench(run_dir)?;
    let (root, kernels) = schedule::prepare(series, false)?;
    let kernel = kernels.first().context("no kernel")?;
    let accel = Accel::choose(&kernel.vmlinux, run_dir)?;
    let setup = Setup {
        kernel,
        root: &root,
        programs: &programs,
        accel,
        run_dir,
        seat: 0,
    };
    let mut compare = vec!["compare".to_owned(), arguments.rounds.to_string()];
    compare.extend(parts.iter().map(|part| part.word().to_owned()));
    let job = Job {
        modules: modules::LOADED_AT_BOOT
            .iter()
            .map(|name| (*name).to_owned())
            .collect(),
        tests: Vec::new(),
        story: Some(compare),
        own_boot: true,
    };
    eprintln!("booting {} ({accel:?})\n", kernel.series);
    let load_before = load_average()?;
    let figures = boot_and_listen(&setup, &job)?;
    let results = Results {
        date: today()?,
        command: command(arguments),
        accelerator: format!("{accel:?}").to_lowercase(),
        host_processors: available_parallelism()?.get(),
        load_average: [load_before, load_average()?],
        figures,
    };
    files(results)
}

/// Each part has its own, so that one of them can be measured anew alone.
fn files(mut results: Results) -> Result<Vec<(&'static str, String)>> {
    let mut files = Vec::new();
    let figures = &mut results.figures;
    let (scsi, log_in) = (figures.scsi.take(), figures.log_in.take());
    let volumes = figures.volumes.take();
    if results.figures.nbd.is_some() {
        files.push(("nbd.json", serde_json::to_string_pretty(&results)?));
        results.figures.nbd = None;
        results.figures.nbd_at_once = None;
    }
    if let Some(volumes) = volumes {
        files.push(("volumes.md", results::write_volumes(&results, &volumes)));
        results.figures.volumes = Some(volumes);
        files.push(("volumes.json", serde_json::to_string_pretty(&results)?));
        results.figures.volumes = None;
    }
    if let Some(scsi) = scsi {
        files.push(("README.md", results::write(&results, &scsi)));
        files.extend(charts::draw(&results, &scsi));
        results.figures.scsi = Some(scsi);
        files.push(("attach.json", serde_json::to_string_pretty(&results)?));
        results.figures.scsi = None;
    }
    if let Some(log_in) = log_in {
        files.push(("login.md", results::write_log_in(&results, &log_in)));
        results.figures.log_in = Some(log_in);
        files.push(("login.json", serde_json::to_string_pretty(&results)?));
    }
    Ok(files)
}

fn boot_and_listen(setup: &Setup<'_>, job: &Job) -> Result<Figures> {
    let mut ending = None;
    let ended = boot::boot(setup, job, |report| {
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
        let log = setup.run_dir.keep_log("bench", &ended.console)?;
        bail!(
            "the guest ended before its bench ({}); its console: {}",
            ended.why,
            log.display()
        );
    };
    if status != 0 {
        bail!("the bench ended with status {status}");
    }
    let figures = result.context("the bench left no figures")?;
    serde_json::from_value(figures).context("the bench's figures")
}

/// As a user would write it.
fn command(arguments: &BenchArguments) -> String {
    let mut command = vec!["vm-tests/bench".to_owned()];
    if arguments.keep {
        command.push("--keep".to_owned());
    }
    if arguments.rounds != ROUNDS {
        command.push(format!("--rounds {}", arguments.rounds));
    }
    command.extend(arguments.part.map(|part| part.word().to_owned()));
    command.join(" ")
}

fn today() -> Result<String> {
    let date = Command::new("date").args(["--utc", "+%F"]).output();
    let date = date.context("date (coreutils)")?.stdout;
    Ok(String::from_utf8_lossy(&date).trim().to_owned())
}

fn load_average() -> Result<f64> {
    let path = "/proc/loadavg";
    let averages = fs::read_to_string(path).context(path)?;
    let first = averages.split(' ').next().unwrap_or_default();
    first.parse().context(path)
}
