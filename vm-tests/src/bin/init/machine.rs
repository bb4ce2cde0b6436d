//! Sets up file systems, modules and udevd, and reads the kernel's log.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use vm_tests::guest::udevd::{self, TRIES};
use vm_tests::job::STATE_DIR;
use vm_tests::kernel_log::OVERWRITTEN;

use crate::process;

pub(crate) fn mount_filesystems() -> Result<()> {
    for (kind, target, data) in [
        ("proc", "/proc", None),
        ("sysfs", "/sys", None),
        ("devtmpfs", "/dev", Some("mode=755")),
        ("devpts", "/dev/pts", None),
        ("tmpfs", "/dev/shm", None),
        ("tmpfs", "/run", Some("mode=755")),
        ("tmpfs", "/tmp", None),
        ("debugfs", "/sys/kernel/debug", None),
    ] {
        fs::create_dir_all(target).with_context(|| target.to_owned())?;
        mount(Some(kind), target, Some(kind), MsFlags::empty(), data)
            .with_context(|| format!("mounting {target}"))?;
    }
    Ok(())
}

pub(crate) fn make_state_directory() -> Result<()> {
    fs::create_dir_all(STATE_DIR).context(STATE_DIR)
}

pub(crate) fn set_up(modules: &[String]) -> Result<()> {
    if !modules.is_empty() {
        let mut command = vec!["modprobe", "--all"];
        command.extend(modules.iter().map(String::as_str));
        process::run_to_success(&command)?;
    }
    process::run_to_success(&["ip", "link", "set", "lo", "up"])?;
    // systemd has started its own.
    if udevd::pid().is_none() {
        fs::create_dir_all("/run/udev").context("/run/udev")?;
        // No coldplug: the devices that exist from the start need no rules.
        process::run_to_success(&["/lib/systemd/systemd-udevd", "--daemon"])?;
    }
    ask_udevd(&["udevadm", "control", "--ping"])
}

/// Has the kernel warn again of what it warns of once: the warning of one test must not hide
/// that of a later one.
pub(crate) fn clear_warn_once() -> Result<()> {
    let path = "/sys/kernel/debug/clear_warn_once";
    fs::write(path, "1").context(path)
}

/// Runs `udevadm`, up to [`TRIES`] times.
pub(crate) fn ask_udevd(words: &[&str]) -> Result<()> {
    let mut asked = Ok(());
    for _ in 0..TRIES {
        asked = process::run_to_success(words);
        if asked.is_ok() {
            break;
        }
    }
    asked
}

pub(crate) fn kernel_release() -> Result<String> {
    let path = "/proc/sys/kernel/osrelease";
    Ok(fs::read_to_string(path).context(path)?.trim().to_owned())
}

pub(crate) fn uptime_millis() -> Result<u64> {
    let uptime = fs::read_to_string("/proc/uptime").context("/proc/uptime")?;
    let (whole, rest) = uptime
        .split_once('.')
        .context("/proc/uptime has no fraction")?;
    let hundredths = rest.get(..2).context("/proc/uptime has no hundredths")?;
    Ok(whole.parse::<u64>()? * 1000 + hundredths.parse::<u64>()? * 10)
}

/// The kernel's log; each read continues where the last one ended.
pub(crate) struct KernelLog(File);

impl KernelLog {
    pub(crate) fn open() -> Result<Self> {
        OpenOptions::new()
            .read(true)
            .custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits())
            .open("/dev/kmsg")
            .map(Self)
            .context("/dev/kmsg")
    }

    pub(crate) fn read_new(&mut self) -> String {
        let mut text = String::new();
        // One read is one record; the kernel's longest is below 8 KiB.
        let mut record = vec![0; 8 << 10];
        loop {
            match self.0.read(&mut record) {
                Ok(0) => break,
                Ok(length) => append_record(&mut text, &String::from_utf8_lossy(&record[..length])),
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                    text.push_str(OVERWRITTEN);
                    text.push('\n');
                }
                Err(_) => break,
            }
        }
        text
    }
}

/// `LEVEL,SEQUENCE,MICROSECONDS,FLAGS;TEXT`, then lines with a leading space
/// that repeat the device in key and value.
fn append_record(text: &mut String, record: &str) {
    let Some((head, body)) = record.split_once(';') else {
        return;
    };
    let micros: u64 = head
        .split(',')
        .nth(2)
        .and_then(|micros| micros.parse().ok())
        .unwrap_or(0);
    let line = body.lines().next().unwrap_or("");
    let time = format!("[{:5}.{:06}]", micros / 1_000_000, micros % 1_000_000);
    text.extend([time.as_str(), " ", line, "\n"]);
}
