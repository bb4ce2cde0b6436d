//! Builds the guest's programs and packs them into an initramfs.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use vm_tests::job::{TESTS_PROGRAM, TestCase};

use crate::newc::Newc;
use crate::run_dir::RunDir;
use crate::step::step;

/// The packages and features of every build, so that the host's tests and the guest's programs
/// share their dependencies. When cargo builds tests it also counts the features of
/// dev-dependencies, so only builds of tests share them.
pub(crate) const SELECTION: &[&str] = &[
    "-p",
    "lunbd",
    "-p",
    "lunbd-sys",
    "-p",
    "vm-tests",
    "-p",
    "vm-bench",
    "--features",
    "lunbd/cli,lunbd/metrics,vm-tests/guest",
];

/// The programs with crash points, which need a library of their own: the guest's, and the test
/// that runs on the host.
pub(crate) const WITH_CRASH_POINTS: &[&str] = &["--features", "vm-tests/crash-points"];
pub(crate) const TEST_WITH_CRASH_POINTS: &[&str] = &["--test", "killed_on_a_fake_kernel"];

/// Only boots with a file that has one of these marks in its name have the program: the guest
/// unpacks every byte.
const OF_SOME_BOOTS: &[(&str, &[&str])] = &[
    ("agent", &["reconcile"]),
    (CRASH_AGENT, &["crash", "reset"]),
];
const CRASH_AGENT: &str = "crash-agent";

/// The guest's library is optimised, because the emulator makes each instruction dear, and has
/// no debug sections, because the lab strips them. The host's tests use it as it is otherwise.
const FOR_THE_GUEST: [&str; 4] = [
    "--config",
    "profile.dev.package.lunbd.opt-level=1",
    "--config",
    "profile.dev.package.lunbd.debug=0",
];

/// The guest's programs, built and packed.
pub(crate) struct Programs {
    /// The programs of every boot.
    base: PathBuf,
    of_some_boots: BTreeMap<String, PathBuf>,
    /// Every VM test, sorted.
    pub(crate) tests: Vec<TestCase>,
}

impl Programs {
    /// The images to add after the guest's root and modules, for a boot that runs tests of
    /// these files.
    pub(crate) fn images(&self, files: &[&str]) -> Vec<PathBuf> {
        let some = self.of_some_boots.iter();
        let some = some.filter(|(program, _)| is_wanted(program, files));
        std::iter::once(&self.base)
            .chain(some.map(|(_, image)| image))
            .cloned()
            .collect()
    }

    /// Builds the programs that only some tests need, if `tests` has one of them.
    pub(crate) fn build_rest(&mut self, tests: &[TestCase], run_dir: &RunDir) -> Result<()> {
        let files: Vec<&str> = tests.iter().map(|test| test.file.as_str()).collect();
        if !is_wanted(CRASH_AGENT, &files) {
            return Ok(());
        }
        // The library is not optimised here: that takes longer than all kills save by it.
        let agent = ["--bin", CRASH_AGENT];
        let programs = [WITH_CRASH_POINTS, &agent, TEST_WITH_CRASH_POINTS].concat();
        let built = cargo(&[&["build"], SELECTION, &programs].concat(), &[])?;
        let executable = built.get(&("bin".to_owned(), CRASH_AGENT.to_owned()));
        let executable = executable.context("cargo built no crash-agent")?;
        let path = format!("usr/local/bin/{CRASH_AGENT}");
        let image = archive(run_dir, CRASH_AGENT, &[(path, executable)])?;
        self.of_some_boots.insert(CRASH_AGENT.to_owned(), image);
        Ok(())
    }
}

fn is_wanted(program: &str, files: &[&str]) -> bool {
    let marks = OF_SOME_BOOTS.iter().find(|(name, _)| *name == program);
    let marks = marks.map_or(&[] as &[&str], |(_, marks)| marks);
    let is_marked = |file: &&str| marks.iter().any(|mark| file.contains(mark));
    files.iter().any(is_marked)
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
    // Cargo builds a package's programs for its tests, so it builds `lunbd` for the test of the
    // command line.
    let tests = ["--no-run", "--test", "guest", "--test", "command_line"];
    let built = cargo(&[&["test"], SELECTION, &tests].concat(), &FOR_THE_GUEST)?;
    step("packing it", || {
        let mut programs = pack(&built, run_dir)?;
        programs.tests = list_tests(&built)?;
        Ok(programs)
    })
}

/// `program` of `package` with the `lunbd` command, both optimised.
pub(crate) fn build_for_story(run_dir: &RunDir, package: &str, program: &str) -> Result<Programs> {
    eprintln!("building what runs in the guest");
    let features = format!("{package}/guest,lunbd/cli");
    let packages = ["-p", "lunbd", "-p", "vm-tests", "-p", package];
    let programs = ["--bin", "lunbd", "--bin", "init", "--bin", program];
    let release = ["build", "--release", "--features", &features];
    let built = cargo(&[&release[..], &packages, &programs].concat(), &[])?;
    step("packing it", || pack(&built, run_dir))
}

/// The executables by (kind, name).
type Built = BTreeMap<(String, String), PathBuf>;

/// The lab's package. Cargo passes it to the programs that it runs. Without it, a lab that was
/// built elsewhere and copied with its target directory would build that other tree.
pub(crate) fn package_directory() -> PathBuf {
    let here = env::var_os("CARGO_MANIFEST_DIR");
    here.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// Cargo sets this for the programs that it runs, so the lab builds with the same cargo.
pub(crate) fn cargo_program() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

pub(crate) fn command_in_workspace(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        // The workspace's root: elsewhere `cargo test` would test another package.
        .current_dir(package_directory().join(".."))
        .stdin(Stdio::null());
    // `cargo run` sets these for the lab's own package. Build scripts that see them change
    // would run again.
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" {
            command.env_remove(name);
        }
    }
    command
}

fn cargo(arguments: &[&str], profile: &[&str]) -> Result<Built> {
    let mut command = command_in_workspace(cargo_program());
    command
        .args(arguments)
        .args(profile)
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

/// For the next fresh clone, which otherwise compiles them.
pub(crate) fn keep_compiled_dependencies() {
    let program = package_directory().join("compiled-dependencies");
    let status = command_in_workspace(&program).arg("keep").status();
    if !status.as_ref().is_ok_and(ExitStatus::success) {
        let shown = program.display();
        eprintln!("the compiled dependencies are not kept: {shown} keep: {status:?}");
    }
}

/// Packs no list of tests: a story has none.
fn pack(built: &Built, run_dir: &RunDir) -> Result<Programs> {
    let mut of_every_boot = Vec::new();
    let mut of_some_boots = BTreeMap::new();
    for ((kind, name), executable) in built {
        let path = match (kind.as_str(), name.as_str()) {
            ("bin", "init") => "init".to_owned(),
            ("bin", "agent" | "story" | "compare" | "lunbd") => {
                format!("usr/local/bin/{name}")
            }
            ("test", "guest") => TESTS_PROGRAM.trim_start_matches('/').to_owned(),
            _ => continue,
        };
        if OF_SOME_BOOTS.iter().any(|(program, _)| program == name) {
            let image = archive(run_dir, name, &[(path, executable)])?;
            of_some_boots.insert(name.clone(), image);
        } else {
            of_every_boot.push((path, executable));
        }
    }
    Ok(Programs {
        base: archive(run_dir, "programs", &of_every_boot)?,
        of_some_boots,
        tests: Vec::new(),
    })
}

fn archive(run_dir: &RunDir, name: &str, files: &[(String, &PathBuf)]) -> Result<PathBuf> {
    let image = run_dir.join(&format!("{name}.cpio"));
    let mut archive = Newc::new(BufWriter::new(File::create(&image)?));
    for (path, executable) in files {
        archive.file(path, 0o755, &stripped(executable)?)?;
    }
    archive.finish()?;
    Ok(image)
}

/// Removes the debug sections, which are most of the program. A panic names its place without
/// them, and the guest unpacks every byte.
fn stripped(executable: &Path) -> Result<Vec<u8>> {
    let small = executable.with_extension("stripped");
    let modified = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified());
    let built = modified(executable).with_context(|| executable.display().to_string())?;
    // cargo may bring back an older build under the same name, so the copy has its build's time.
    if modified(&small).ok() != Some(built) {
        // Write beside it and rename: two runs may share a target directory.
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
        File::options()
            .write(true)
            .open(&unfinished)?
            .set_modified(built)?;
        fs::rename(&unfinished, &small)?;
    }
    fs::read(&small).with_context(|| small.display().to_string())
}

/// Asks the test program to list its tests, and runs none of them.
fn list_tests(built: &Built) -> Result<Vec<TestCase>> {
    let executable = built
        .get(&("test".to_owned(), "guest".to_owned()))
        .context("cargo built no program of VM tests")?;
    let output = Command::new(executable)
        .args(["--list", "--format", "terse"])
        .output();
    let output = output.with_context(|| executable.display().to_string())?;
    if !output.status.success() {
        bail!("{} --list: {}", executable.display(), output.status);
    }
    let mut tests = parse_test_list(&String::from_utf8_lossy(&output.stdout))?;
    tests.sort();
    Ok(tests)
}

/// libtest's names are `module::name`, and each file is a module. A test outside a module has
/// no file that selects its boot.
fn parse_test_list(list: &str) -> Result<Vec<TestCase>> {
    let tests = list.lines().filter_map(|line| line.strip_suffix(": test"));
    tests
        .map(|id| {
            let (file, name) = id
                .split_once("::")
                .with_context(|| format!("the VM test {id} is in no file of its own"))?;
            Ok(TestCase {
                file: file.to_owned(),
                name: name.to_owned(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_has_the_agents_only_where_its_tests_need_them() {
        assert!(is_wanted("agent", &["attach", "iscsi_reconcile"]));
        assert!(!is_wanted("agent", &["attach", "iscsi_crash"]));
        assert!(is_wanted(CRASH_AGENT, &["own_boot_reset_mpath_nbd"]));
        assert!(!is_wanted(CRASH_AGENT, &["iscsi_reconcile", "lab"]));
    }

    #[test]
    fn the_list_of_tests_leaves_benchmarks_out() {
        let tests = parse_test_list(
            "attach::one_lun: test\nattach::many::luns: test\nattach::speed: benchmark\n",
        )
        .unwrap();
        let ids: Vec<String> = tests.iter().map(TestCase::id).collect();
        assert_eq!(ids, ["attach::one_lun", "attach::many::luns"]);
        assert_eq!(tests[1].file, "attach");
        assert!(parse_test_list("of_no_file: test\n").is_err());
    }

    /// A file that is not a module is never built, so its tests never fail.
    #[test]
    fn each_file_of_tests_is_a_module_of_the_program() {
        let program = include_str!("../../../tests/guest/main.rs");
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest");
        let mut count = 0;
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            let module = format!("\nmod {name};\n");
            assert!(
                name == "main" || program.contains(&module),
                "main.rs has no line for {name}"
            );
            count += 1;
        }
        assert!(count > 40, "{count}");
    }
}
