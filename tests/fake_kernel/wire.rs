//! The requests of an engine's process to the kernel; request and reply are one line each.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::commands::Answer;

/// The kernel's socket, below the machine's directory.
pub(super) const SOCKET: &str = "kernel";

/// Each request is a system call.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    Write {
        path: PathBuf,
        inode: u64,
        text: String,
    },
    Open {
        life: u64,
    },
    Sync {
        life: u64,
    },
    WritePages {
        life: u64,
    },
    DropPages {
        life: u64,
    },
    Command {
        life: u64,
        cdb: Vec<u8>,
        length: usize,
    },
    /// Asks for the events from now on. The first line confirms it, and each further line is an
    /// event.
    Listen,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Done,
    Answered(Answer),
    /// The errno.
    Refused(i32),
}

/// A uevent for a process, of udev or of the kernel.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Heard {
    pub(super) of_udev: bool,
    pub(super) datagram: String,
}

pub(super) fn say(stream: &mut UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    stream.write_all(&line)
}

pub(super) fn hear<T: DeserializeOwned>(reader: &mut BufReader<UnixStream>) -> io::Result<T> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}

/// Sends one request and returns its reply.
pub(super) fn ask(root: &Path, request: &Request) -> io::Result<Reply> {
    let mut stream = UnixStream::connect(root.join(SOCKET))?;
    say(&mut stream, request)?;
    hear(&mut BufReader::new(stream))
}
