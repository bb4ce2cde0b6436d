//! Runs the bench: one VM, in which everything is timed side by side.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use vm_bench::figures::Figures;

use crate::lab::{self, Booted};
use crate::results::{self, Results};
use crate::{charts, host_bench};

const ROUNDS: u16 = 20;

#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    /// Run only this part.
    part: Option<Part>,
    /// How often each way is timed.
    #[arg(long, default_value_t = ROUNDS)]
    rounds: u16,
    /// Put figures and charts into vm-tests/results, to which the README links.
    #[arg(long)]
    keep: bool,
    /// Measure nothing, and write the pages and charts in vm-tests/results again from the
    /// figures there.
    #[arg(long, conflicts_with_all = ["part", "rounds", "keep"])]
    draw: bool,
}

/// One part of the bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// The benchmarks of criterion, on this machine and without a VM.
    Host,
    /// The start of the command.
    Start,
    /// One NBD export, and many at once.
    Nbd,
    /// Two hundred NBD volumes, by a reconciler and one after the other.
    NbdVolumes,
    /// One LUN of iSCSI targets of several sizes.
    Iscsi,
    /// One LUN of an iSCSI target, with login and logout.
    IscsiLogin,
    /// One SCSI and one NBD device beside more and more other devices.
    Scale,
    /// One NBD device without TLS, with the kernel's TLS, and with a proxy's TLS.
    NbdTls,
}

impl Part {
    /// The part's name for the guest, and for the boot, which carries what the part needs.
    fn word(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Start => "start",
            Self::Nbd => "nbd",
            Self::NbdVolumes => "nbd-volumes",
            Self::Iscsi => "iscsi",
            Self::IscsiLogin => "iscsi-login",
            Self::Scale => "scale",
            Self::NbdTls => "nbd-tls",
        }
    }
}

/// Runs the requested parts, keeps the figures and draws them. It fails only if something
/// does not work, and never because of a time.
pub(crate) fn run(arguments: &BenchArguments) -> Result<()> {
    if arguments.draw {
        return write(drawn()?, &results());
    }
    let parts = arguments
        .part
        .map_or_else(|| Part::value_variants().to_vec(), |part| vec![part]);
    let mut files = Vec::new();
    // This part runs first, while no VM loads the machine.
    if parts.contains(&Part::Host) {
        let command = command(arguments);
        files.extend(host_bench::run(today()?, command, load_average)?);
    }
    let in_the_vm: Vec<Part> = parts
        .into_iter()
        .filter(|part| *part != Part::Host)
        .collect();
    if !in_the_vm.is_empty() {
        files.extend(run_in_the_vm(arguments, &in_the_vm)?);
    }
    let directory = if arguments.keep {
        results()
    } else {
        lab::kept("bench")?
    };
    println!("\nEvery round, tables and charts:");
    write(files, &directory)
}

/// The directory of the kept results.
fn results() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../results")
}

fn write(files: Vec<(&'static str, String)>, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for (name, content) in files {
        let path = to.join(name);
        fs::write(&path, content).with_context(|| path.display().to_string())?;
        println!("  {}", path.display());
    }
    Ok(())
}

/// All pages and charts, drawn from the kept figures, which stay as they are.
fn drawn() -> Result<Vec<(&'static str, String)>> {
    let read = |name: &str| {
        let path = results().join(name);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let mut drawn = host_bench::files(&serde_json::from_str(&read("host.json")?)?)?;
    let parts = [
        "attach.json",
        "login.json",
        "nbd.json",
        "scale.json",
        "start.json",
        "tls.json",
        "volumes.json",
    ];
    for name in parts
        .into_iter()
        .filter(|name| results().join(name).exists())
    {
        drawn.extend(files(serde_json::from_str(&read(name)?)?)?);
    }
    for (name, content) in &mut drawn {
        // The last digit of a float may differ after it is read and written.
        if Path::new(name)
            .extension()
            .is_some_and(|kind| kind == "json")
        {
            *content = read(name)?;
        }
    }
    Ok(drawn)
}

/// Has the lab boot the bench's kernel, and prints the tables as they come.
fn run_in_the_vm(
    arguments: &BenchArguments,
    parts: &[Part],
) -> Result<Vec<(&'static str, String)>> {
    let mut compare = vec!["compare".to_owned(), arguments.rounds.to_string()];
    compare.extend(parts.iter().map(|part| part.word().to_owned()));
    if parts.contains(&Part::Scale) {
        // This word is no part: a boot carries NBD servers if a word names them.
        compare.push("with-nbd-servers".to_owned());
    }
    let load_before = load_average()?;
    let booted: Booted<Figures> = lab::run(&compare)?;
    files(Results {
        date: today()?,
        command: command(arguments),
        accelerator: booted.accelerator,
        host_processors: available_parallelism()?.get(),
        load_average: [load_before, load_average()?],
        figures: booted.result,
    })
}

/// The files of each part, so that one part can be measured again alone.
fn files(mut results: Results) -> Result<Vec<(&'static str, String)>> {
    let mut files = Vec::new();
    let figures = &mut results.figures;
    let (scsi, log_in) = (figures.scsi.take(), figures.log_in.take());
    let (volumes, scale) = (figures.volumes.take(), figures.scale.take());
    let tls = figures.tls.take();
    let nbd = (figures.nbd.take(), figures.nbd_at_once.take());
    if results.figures.start.is_some() {
        files.push(("start.json", serde_json::to_string_pretty(&results)?));
        results.figures.start = None;
    }
    (results.figures.nbd, results.figures.nbd_at_once) = nbd;
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
    if let Some(scale) = scale {
        files.push(("scale.md", results::write_scale(&results, &scale)));
        files.push(("scale.svg", charts::draw_scale(&results, &scale)));
        results.figures.scale = Some(scale);
        files.push(("scale.json", serde_json::to_string_pretty(&results)?));
        results.figures.scale = None;
    }
    if let Some(tls) = tls {
        files.push(("tls.md", results::write_tls(&results, &tls)));
        files.push(("tls.svg", charts::draw_tls(&results, &tls)));
        results.figures.tls = Some(tls);
        files.push(("tls.json", serde_json::to_string_pretty(&results)?));
        results.figures.tls = None;
    }
    if let Some(log_in) = log_in {
        files.push(("login.md", results::write_log_in(&results, &log_in)));
        results.figures.log_in = Some(log_in);
        files.push(("login.json", serde_json::to_string_pretty(&results)?));
    }
    Ok(files)
}

/// The command as a user would write it.
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A result that was written by hand could not be repeated.
    #[test]
    fn a_command_made_every_file_of_the_results() {
        let mut known = BTreeSet::new();
        for (name, content) in drawn().unwrap() {
            let kept = fs::read_to_string(results().join(name)).unwrap();
            assert_eq!(content, kept, "{name}: `vm-tests/bench --draw` writes it");
            known.insert(name.to_owned());
        }
        // The sweep itself writes its page.
        known.insert("sweeps.md".to_owned());
        for entry in fs::read_dir(results()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(known.contains(&name), "no command writes {name}");
        }
    }
}
