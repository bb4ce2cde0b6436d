//! Child processes of pid 1, which also inherits all orphans.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// The guest has one PATH; tests inherit it.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub(crate) fn command(words: &[impl AsRef<str>]) -> Result<Command> {
    let (program, arguments) = words.split_first().context("an empty command")?;
    let mut command = Command::new(program.as_ref());
    command
        .args(arguments.iter().map(AsRef::as_ref))
        .env_clear()
        .envs([
            ("PATH", PATH),
            ("HOME", "/"),
            ("LC_ALL", "C.UTF-8"),
            ("RUST_BACKTRACE", "1"),
        ])
        .current_dir("/")
        .stdin(Stdio::null())
        .process_group(0);
    Ok(command)
}

/// Waits for `pid` and reaps every other child that ends meanwhile.
///
/// std's `Child::wait` must not be mixed with this: a child's status can be read only once.
pub(crate) fn wait(pid: Pid) -> Result<WaitStatus> {
    loop {
        match waitpid(Pid::from_raw(-1), None) {
            Ok(status) if status.pid() == Some(pid) => return Ok(status),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("waiting for a child"),
        }
    }
}

/// Reaps the children that have ended, without waiting.
pub(crate) fn reap() {
    while let Ok(status) = waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
        if status == WaitStatus::StillAlive {
            break;
        }
    }
}

pub(crate) fn pid_of(child: &std::process::Child) -> Result<Pid> {
    Ok(Pid::from_raw(i32::try_from(child.id()).context("a pid")?))
}

pub(crate) fn run_to_success(words: &[&str]) -> Result<()> {
    let child = command(words)?.spawn().with_context(|| words.join(" "))?;
    match wait(pid_of(&child)?)? {
        WaitStatus::Exited(_, 0) => Ok(()),
        status => bail!("{}: {status:?}", words.join(" ")),
    }
}

/// Runs a program and passes on its output as it prints it. Returns its exit status, or 128
/// plus the number of the signal that killed it.
pub(crate) fn run_live(
    words: &[String],
    mut printed: impl FnMut(String) -> Result<()>,
) -> Result<i32> {
    let (mut output, writer) = std::io::pipe()?;
    let mut command = command(words)?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let child = command.spawn().with_context(|| words.join(" "))?;
    // The command holds the pipe's write ends. The output ends only when the last of them is
    // closed.
    drop(command);
    let mut buffer = vec![0; 4096];
    loop {
        let length = output.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        printed(String::from_utf8_lossy(&buffer[..length]).into_owned())?;
    }
    match wait(pid_of(&child)?)? {
        WaitStatus::Exited(_, status) => Ok(status),
        WaitStatus::Signaled(_, signal, _) => Ok(128 + signal as i32),
        status => bail!("{}: {status:?}", words.join(" ")),
    }
}
