//! An NBD server that does what its script says, right or wrong, on plain sockets without
//! privileges.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "each test uses a part of it, a test panics to fail, and a server may be slow"
)]

pub(crate) mod bytes;

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lunbd::id::NbdUri;
use tempfile::TempDir;

/// How long the server waits for a client before it gives up, so that a failed test does not
/// hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// One step of the server. After the last step it closes the connection.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// Sends these bytes at once.
    Send(Vec<u8>),
    /// Sends these bytes, as far as the client reads before it disconnects.
    SendUntilClosed(Vec<u8>),
    /// Sends one byte of these per interval, until the client disconnects.
    Dribble(Vec<u8>, Duration),
    /// The client must send exactly these bytes next.
    Expect(Vec<u8>),
    /// The client must send an option with this code next, with any data.
    ExpectOption(u32),
    /// The client must close, and send nothing before.
    ExpectClose,
    /// Sends nothing more until the client closes, whatever the client sends.
    Hang,
}

/// The greeting, the client's answer, and its `OPT_GO`.
pub(crate) fn until_go() -> Vec<Step> {
    vec![
        Step::Send(bytes::greeting()),
        Step::Expect(bytes::client_flags(3)),
        Step::ExpectOption(bytes::OPT_GO),
    ]
}

pub(crate) fn with(mut script: Vec<Step>, more: impl IntoIterator<Item = Step>) -> Vec<Step> {
    script.extend(more);
    script
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

type Accept = Box<dyn FnMut() -> io::Result<Box<dyn Stream>> + Send>;

/// A listening server, which plays one script per connection.
#[derive(Debug)]
pub(crate) struct Server {
    address: NbdUri,
    sessions: JoinHandle<Result<(), String>>,
    _directory: Option<TempDir>,
}

impl Server {
    /// Listens on TCP, for one connection.
    pub(crate) fn tcp(script: Vec<Step>) -> Self {
        Self::tcp_sessions(vec![script])
    }

    /// Listens on TCP, for as many connections as there are scripts, one after another.
    pub(crate) fn tcp_sessions(scripts: Vec<Vec<Step>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = NbdUri::tcp("127.0.0.1", Some(port), "").unwrap();
        let accept = move || {
            let (stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        };
        Self::start(address, None, Box::new(accept), scripts)
    }

    /// Listens on a Unix socket, for one connection.
    pub(crate) fn unix(script: Vec<Step>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let address = NbdUri::unix(&path, "").unwrap();
        let accept = move || {
            let (stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(PATIENCE))?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        };
        Self::start(address, Some(directory), Box::new(accept), vec![script])
    }

    fn start(
        address: NbdUri,
        directory: Option<TempDir>,
        mut accept: Accept,
        scripts: Vec<Vec<Step>>,
    ) -> Self {
        let sessions = thread::spawn(move || {
            for script in scripts {
                let mut stream = accept().map_err(|error| format!("accept: {error}"))?;
                for step in &script {
                    play(step, &mut *stream).map_err(|error| format!("{step:?}: {error}"))?;
                }
            }
            Ok(())
        });
        Self {
            address,
            sessions,
            _directory: directory,
        }
    }

    /// The address of its export `name`.
    pub(crate) fn uri(&self, name: &str) -> NbdUri {
        let server = self.address.server().clone();
        match server {
            lunbd::id::NbdServer::Tcp { host, port } => NbdUri::tcp(&host, Some(port), name),
            lunbd::id::NbdServer::Tls { .. } => unreachable!("it speaks in the clear"),
            lunbd::id::NbdServer::Unix { socket } => NbdUri::unix(&socket, name),
        }
        .unwrap()
    }

    /// Waits until all scripts have played. Panics if a client did not do what a script
    /// expects.
    pub(crate) fn finish(self) {
        let result = self.sessions.join().unwrap();
        assert_eq!(result, Ok(()), "the server did not see what it expected");
    }
}

fn play(step: &Step, stream: &mut dyn Stream) -> Result<(), String> {
    let text = |error: io::Error| error.to_string();
    match step {
        Step::Send(bytes) => stream.write_all(bytes).map_err(text),
        Step::SendUntilClosed(bytes) => {
            let _client_has_read_enough = stream.write_all(bytes);
            Ok(())
        }
        Step::Dribble(bytes, interval) => {
            for byte in bytes {
                if stream.write_all(&[*byte]).is_err() {
                    break;
                }
                thread::sleep(*interval);
            }
            Ok(())
        }
        Step::Expect(expected) => {
            let mut bytes = vec![0; expected.len()];
            stream.read_exact(&mut bytes).map_err(text)?;
            if bytes != *expected {
                return Err(format!("the client sent {bytes:?}"));
            }
            Ok(())
        }
        Step::ExpectOption(code) => {
            let mut header = [0; 16];
            stream.read_exact(&mut header).map_err(text)?;
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            if &header[..8] != b"IHAVEOPT" || word(8) != *code {
                return Err(format!("the client sent {header:?}"));
            }
            let mut data = vec![0; word(12) as usize];
            stream.read_exact(&mut data).map_err(text)
        }
        Step::ExpectClose => {
            let mut bytes = [0; 64];
            match stream.read(&mut bytes) {
                Ok(0) => Ok(()),
                Ok(read) => Err(format!("the client sent {:?}", &bytes[..read])),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
                Err(error) => Err(text(error)),
            }
        }
        Step::Hang => {
            let mut bytes = [0; 64];
            while stream.read(&mut bytes).is_ok_and(|read| read > 0) {}
            Ok(())
        }
    }
}
