//! Uses KVM where it really runs guests, and emulation elsewhere.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cache;
use crate::run_dir::RunDir;
use crate::step::step;

/// How QEMU runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accel {
    Kvm,
    /// Emulation, where each processor of the guest has a thread of the host.
    Tcg,
    /// Emulation, where the guest's processors take turns on one thread of the host. With four
    /// machines at once on two processors this takes a fifth less processor time: a processor
    /// that waits for the other's lock gives up its turn and does not spin. (2026-11-26, 7.2.13,
    /// the 62 tests of `attach::,mpath_map::,nbd_kernel::,iscsi_log_in::,apply_followed_file::,
    /// scsi_settle::`, each twice: 383 s and 298 s.) Two processors of such a guest never run at
    /// the same moment.
    TcgOnOneThread,
}

impl Accel {
    pub(crate) fn arguments(self) -> [&'static str; 4] {
        // A kernel that sees the flags `erms` and `fsrm` copies and clears memory with
        // `rep movsb` and `rep stosb`, which TCG runs byte by byte. With `la57` it has five levels
        // of page tables, and TCG walks them all: with four, three runs of `mpath_map::` on 7.2.13
        // took 92 s of processor time and not 102 s (2026-11-29, taking turns).
        const EMULATED: &str = "max,erms=off,fsrm=off,la57=off";
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", EMULATED],
            Self::TcgOnOneThread => ["-accel", "tcg,thread=single", "-cpu", EMULATED],
        }
    }

    /// The user's choice, or the result of a probe with a real kernel: KVM, or this
    /// `emulation`. `with_kvm` is the emulator's command for KVM.
    pub(crate) fn choose(
        emulation: Self,
        with_kvm: Command,
        vmlinux: &Path,
        run_dir: &RunDir,
    ) -> Result<Self> {
        match env::var("LUNBD_VM_ACCEL").as_deref() {
            Ok("kvm") => return Ok(Self::Kvm),
            Ok("tcg") => return Ok(Self::Tcg),
            Ok("tcg-on-one-thread") => return Ok(Self::TcgOnOneThread),
            Ok("") | Err(_) => {}
            Ok(other) => bail!("LUNBD_VM_ACCEL={other}: expected kvm, tcg or tcg-on-one-thread"),
        }
        let usable = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok();
        // KVM hangs on a host that is itself a paravirtual guest of this kind.
        if !usable || Path::new("/sys/module/kvm_pvm").exists() || failed_before() {
            return Ok(emulation);
        }
        let works = step("probing KVM", || probe(with_kvm, vmlinux, run_dir))?;
        if !works {
            remember_failure();
        }
        Ok(if works { Self::Kvm } else { emulation })
    }
}

/// KVM may open and run a few instructions, and still hang a guest. Only a kernel's first
/// output proves that it works.
fn probe(mut command: Command, vmlinux: &Path, run_dir: &RunDir) -> Result<bool> {
    let console = run_dir.join("kvm-probe.console");
    fs::write(&console, "")?;
    command.args([
        "-m",
        "256",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
    ]);
    command.arg("-kernel").arg(vmlinux);
    command.args(["-append", "console=ttyS0 earlyprintk=serial panic=-1"]);
    command
        .arg("-serial")
        .arg(format!("file:{}", console.display()));
    // QEMU prints an error if KVM does not work; here that is no error.
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = command.spawn().context("setpriv (util-linux)")?;
    let start = Instant::now();
    let mut works = false;
    while !works && start.elapsed() < Duration::from_millis(2500) && child.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_millis(50));
        works = fs::read(&console)?
            .windows(13)
            .any(|window| window == b"Linux version");
    }
    let _ended_already = child.kill();
    child.wait()?;
    Ok(works)
}

/// A failed probe is remembered until the host boots again.
fn memory() -> Option<(std::path::PathBuf, String)> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some((cache::directory().ok()?.join("kvm-failed-in-boot"), boot))
}

fn failed_before() -> bool {
    memory().is_some_and(|(path, boot)| fs::read_to_string(path).is_ok_and(|known| known == boot))
}

fn remember_failure() {
    if let Some((path, boot)) = memory() {
        // If the result cannot be stored, the next run probes again.
        let _unwritable = fs::write(path, boot);
    }
}
