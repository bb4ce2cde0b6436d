//! Runs `lunbd` on a terminal, as a user sees it.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::process::{Command, ExitStatus};

use nix::errno::Errno;
use nix::pty::{Winsize, openpty};

const SIZE: Winsize = Winsize {
    ws_row: 40,
    ws_col: 120,
    ws_xpixel: 0,
    ws_ypixel: 0,
};

/// Runs it on a terminal. Returns its exit status and everything that it drew.
#[must_use]
pub fn lunbd(arguments: &[&str]) -> (ExitStatus, String) {
    super::enter();
    let pty = openpty(&SIZE, None).expect("a terminal");
    let end = || pty.slave.try_clone().expect("its other end");
    let mut command = Command::new("lunbd");
    command.args(arguments).env("TERM", "xterm");
    command.stdin(end()).stdout(end()).stderr(end());
    let mut child = command.spawn().expect("lunbd");
    // The read ends when no process has the other end open.
    drop((command, pty.slave));
    let mut drawn = Vec::new();
    let mut screen = File::from(pty.master);
    let mut part = [0; 4096];
    loop {
        match screen.read(&mut part) {
            Ok(0) => break,
            Ok(read) => drawn.extend(&part[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.raw_os_error() == Some(Errno::EIO as i32) => break,
            Err(error) => panic!("reading the terminal: {error}"),
        }
    }
    let status = child.wait().expect("its end");
    (status, String::from_utf8_lossy(&drawn).into_owned())
}
