//! The QEMU that runs the machines.
//!
//! Under emulation the VM tests take a third less processor time with QEMU 10 than with 7.2,
//! which Debian 12 has: `LUNBD_VM_KERNEL=6.1 vm-tests/test --vm-only attach::,detach::,scsi_settle::`
//! took 1:54 and 1:56 of processor time with 7.2.22, and 1:19 and 1:19 with 10.0.2 (2026-11-26).
//! So the lab unpacks the newer one of Debian's backports, if this machine has an older one,
//! and does not install it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::accel::Accel;
use crate::apt::Archive;
use crate::cache::{Cache, Entry};
use crate::debian::Mirrors;
use crate::package;
use crate::step::step;

const INSTALLED: &str = "qemu-system-x86_64";
/// An installed QEMU of this major version is as fast as a newer one.
const FAST_ENOUGH: u32 = 10;

/// The emulator's program, and where its firmware is.
#[derive(Debug)]
pub(crate) struct Emulator {
    program: PathBuf,
    firmware: Vec<PathBuf>,
    _entry: Option<Entry>,
}

impl Emulator {
    /// The installed QEMU, or a newer one from Debian's backports. A machine whose archive has
    /// no backports uses the installed one.
    pub(crate) fn prepare(cache: &Cache, mirrors: &Mirrors) -> Result<Self> {
        let installed = Self {
            program: INSTALLED.into(),
            firmware: Vec::new(),
            _entry: None,
        };
        if installed.major_version()? >= FAST_ENOUGH {
            return Ok(installed);
        }
        match Self::of_backports(cache, mirrors) {
            Ok(newer) => Ok(newer),
            Err(error) => {
                eprintln!("the installed QEMU runs the machines, which is slower: {error:#}");
                Ok(installed)
            }
        }
    }

    fn of_backports(cache: &Cache, mirrors: &Mirrors) -> Result<Self> {
        let suite = format!("{}-backports", mirrors.codename);
        let entry = cache.entry("qemu", &format!("1 {suite}"), |directory| {
            step(&format!("downloading QEMU of {suite}"), || {
                let archive = Archive::update(cache, mirrors, &suite)?;
                let family = archive.family("qemu-system-x86", &["qemu-system-", "seabios"])?;
                let packages = archive.download(&family)?;
                package::unpack(&packages, &directory.join(TREE))?;
                let unpacked = Self::below(directory, None).major_version()?;
                if unpacked < FAST_ENOUGH {
                    bail!("{suite} has QEMU {unpacked}");
                }
                Ok(())
            })
        })?;
        let directory = entry.join("");
        Ok(Self::below(&directory, Some(entry)))
    }

    fn below(directory: &Path, entry: Option<Entry>) -> Self {
        let usr = directory.join(TREE).join("usr");
        Self {
            program: usr.join("bin").join(INSTALLED),
            firmware: ["qemu", "seabios"]
                .map(|of| usr.join("share").join(of))
                .into(),
            _entry: entry,
        }
    }

    /// QEMU's command for a machine without memory and devices. QEMU ends when the thread that
    /// starts it ends, even if the lab is killed.
    pub(crate) fn command(&self, accel: Accel) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(&self.program);
        for directory in &self.firmware {
            command.arg("-L").arg(directory);
        }
        // AHCI would take the first SCSI host numbers.
        command.args(["-M", "q35,sata=off,smbus=off"]);
        command.args(accel.arguments());
        command
    }

    fn major_version(&self) -> Result<u32> {
        let output = Command::new(&self.program).arg("--version").output();
        let output = output.with_context(|| self.program.display().to_string())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = parse_major_version(&text);
        version.with_context(|| {
            let complaint = String::from_utf8_lossy(&output.stderr);
            format!("{} --version: {text}{complaint}", self.program.display())
        })
    }
}

/// Where the packages are below the cache's entry.
const TREE: &str = "unpacked";

/// `QEMU emulator version 10.0.2 (Debian ...)`
fn parse_major_version(text: &str) -> Option<u32> {
    let (_, version) = text.split_once("version ")?;
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_major_version_is_the_number_before_the_first_point() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright (c) 2003\n";
        assert_eq!(parse_major_version(text), Some(10));
        assert_eq!(parse_major_version("QEMU emulator version 7.2.22"), Some(7));
        assert_eq!(parse_major_version("no QEMU"), None);
    }

    #[test]
    fn a_machine_of_an_unpacked_qemu_has_its_own_firmware() {
        let emulator = Emulator::below(Path::new("/cache/qemu-1"), None);
        let command = format!("{:?}", emulator.command(Accel::Tcg));
        for part in [
            "unpacked/usr/bin/qemu-system-x86_64",
            "-L",
            "unpacked/usr/share/seabios",
        ] {
            assert!(command.contains(part), "{command}");
        }
    }
}
