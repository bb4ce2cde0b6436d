//! Builds what runs in the guest and packs it into an initramfs.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use vm_tests::job::TestCase;

use crate::newc::Newc;
use crate::run_dir::RunDir;
use crate::step::step;

/// The guest's programs, built and packed. A boot has the tests that it runs and
/// no others: all of them are half a gibibyte, and the guest unpacks every byte.
pub(crate) struct Programs {
    /// What every boot has.
    base: PathBuf,
    /// The test programs, by their files' names.
    of_file: BTreeMap<String, PathBuf>,
    /// Every test that the programs offer, sorted.
    pub(crate) tests: Vec<TestCase>,
}

impl Programs {
    /// What goes behind the guest's root and modules for a boot that runs tests of
    /// `files`.
    pub(crate) fn images(&self, files: &[&str]) -> Vec<PathBuf> {
        let wanted = self.of_file.iter();
        let wanted = wanted.filter(|(file, _)| files.contains(&file.as_str()));
        std::iter::once(&self.base)
            .chain(wanted.map(|(_, image)| image))
            .cloned()
            .collect()
    }
}

#[derive(Debug, Deserialize)]
struct Artifact {
    reason: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

pub(crate) fn build(run_dir: &RunDir) -> Result<Programs> {
    eprintln!("building what runs in the guest");
    let mut built = cargo(&[
        "test",
        "--no-run",
        "-p",
        "vm-tests",
        "--features",
        "guest",
        "--test",
        "*",
    ])?;
    built.extend(cargo(&[
        "build",
        "-p",
        "lunbd",
        "--features",
        "cli",
        "--bin",
        "lunbd",
    ])?);
    built.extend(cargo(&[
        "build",
        "-p",
        "vm-tests",
        "--features",
        "crash-points",
        "--bin",
        "crash-agent",
    ])?);
    // The bench has a quicker one, and every boot unpacks what it is given.
    built.remove(&("bin".to_owned(), "compare".to_owned()));
    step("packing it", || {
        let mut programs = pack(&built, run_dir)?;
        programs.tests = list_tests(&built)?;
        Ok(programs)
    })
}

/// What the bench runs, with the optimisations that the programs beside it
/// have too.
pub(crate) fn build_for_bench(run_dir: &RunDir) -> Result<Programs> {
    eprintln!("building what runs in the guest");
    let release = ["build", "--release", "-p"];
    let guest = ["vm-tests", "--features", "guest", "--bin", "init"];
    let mut built = cargo(&[&release[..], &guest, &["--bin", "compare"]].concat())?;
    let command = ["lunbd", "--features", "cli", "--bin", "lunbd"];
    built.extend(cargo(&[&release[..], &command].concat())?);
    step("packing it", || pack(&built, run_dir))
}

/// The executables by (kind, name).
type Built = BTreeMap<(String, String), PathBuf>;

pub(crate) fn cargo_command() -> Command {
    // Set by cargo for what it runs, so the lab builds with the same cargo.
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null());
    // `cargo run` sets these for the lab's own package; build scripts that see
    // them change would run again.
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" {
            command.env_remove(name);
        }
    }
    command
}

fn cargo(arguments: &[&str]) -> Result<Built> {
    let mut command = cargo_command();
    command
        .args(arguments)
        .arg("--message-format=json-render-diagnostics");
    command.stderr(Stdio::inherit());
    let output = command.output().context("cargo")?;
    if !output.status.success() {
        bail!("cargo {}: {}", arguments.join(" "), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Artifact>(line).ok())
        .filter(|artifact| artifact.reason == "compiler-artifact")
        .filter_map(|artifact| {
            let target = artifact.target?;
            Some((
                (target.kind.first()?.clone(), target.name),
                artifact.executable?,
            ))
        })
        .collect())
}

/// Lists no tests: who packs for the bench has none.
fn pack(built: &Built, run_dir: &RunDir) -> Result<Programs> {
    let base = run_dir.join("programs.cpio");
    let mut of_every_boot = Newc::new(BufWriter::new(File::create(&base)?));
    let mut of_file = BTreeMap::new();
    for ((kind, name), executable) in built {
        let path = match (kind.as_str(), name.as_str()) {
            ("bin", "init") => "init".to_owned(),
            ("bin", "agent" | "story" | "compare" | "crash-agent" | "lunbd") => {
                format!("usr/local/bin/{name}")
            }
            ("test", name) => {
                let image = run_dir.join(&format!("test-{name}.cpio"));
                let mut archive = Newc::new(BufWriter::new(File::create(&image)?));
                archive.file(&format!("tests/{name}"), 0o755, &stripped(executable)?)?;
                archive.finish()?;
                of_file.insert(name.to_owned(), image);
                continue;
            }
            _ => continue,
        };
        of_every_boot.file(&path, 0o755, &stripped(executable)?)?;
    }
    of_every_boot.finish()?;
    Ok(Programs {
        base,
        of_file,
        tests: Vec::new(),
    })
}

/// Without debug sections, which are most of the program: a panic names its
/// place without them, and the guest unpacks every byte.
fn stripped(executable: &Path) -> Result<Vec<u8>> {
    let small = executable.with_extension("stripped");
    let newer = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).ok();
    if newer(&small) < newer(executable) {
        // Written beside and renamed: two runs may share a target directory.
        let unfinished = executable.with_extension(format!("stripped-{}", std::process::id()));
        let mut strip = Command::new("strip");
        strip
            .arg("--strip-debug")
            .arg("-o")
            .arg(&unfinished)
            .arg(executable);
        if !strip.status().context("strip (binutils)")?.success() {
            bail!("strip {}", executable.display());
        }
        fs::rename(&unfinished, &small)?;
    }
    fs::read(&small).with_context(|| small.display().to_string())
}

/// Asks each test program for its tests; listing runs none of them.
fn list_tests(built: &Built) -> Result<Vec<TestCase>> {
    let mut tests = Vec::new();
    for ((kind, file), executable) in built {
        if kind != "test" {
            continue;
        }
        let output = Command::new(executable)
            .args(["--list", "--format", "terse"])
            .output();
        let output = output.with_context(|| executable.display().to_string())?;
        if !output.status.success() {
            bail!("{} --list: {}", executable.display(), output.status);
        }
        tests.extend(parse_test_list(
            file,
            &String::from_utf8_lossy(&output.stdout),
        ));
    }
    tests.sort();
    Ok(tests)
}

fn parse_test_list(file: &str, list: &str) -> Vec<TestCase> {
    list.lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(|name| TestCase {
            file: file.to_owned(),
            name: name.to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_tests_leaves_benchmarks_out() {
        let tests = parse_test_list(
            "attach",
            "one_lun: test\nmany::luns: test\nspeed: benchmark\n",
        );
        let ids: Vec<String> = tests.iter().map(TestCase::id).collect();
        assert_eq!(ids, ["attach::one_lun", "attach::many::luns"]);
    }

    /// One that is not listed in Cargo.toml is never built, and so never red.
    #[test]
    fn each_file_of_tests_is_one_that_cargo_builds() {
        let manifest = include_str!("../../../Cargo.toml");
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
        let mut count = 0;
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            let listed = format!("[[test]]\nname = \"{name}\"\n");
            assert!(manifest.contains(&listed), "{name} is not in Cargo.toml");
            count += 1;
        }
        assert!(count > 40, "{count}");
    }
}
