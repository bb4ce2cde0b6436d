//! An iSCSI target that sends what its script says, right or wrong. It is written from the
//! protocol and not with the engine's own constants, and runs on plain sockets without
//! privileges.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test uses a part of it, and a test panics to fail"
)]

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lunbd::id::Portal;

/// How long the target waits for a client before it gives up, so that a failed test does not
/// hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// Flags of a login: T, CSG and NSG.
pub(crate) const TO_OPERATIONAL: u8 = 0x81;
pub(crate) const TO_FULL: u8 = 0x87;
pub(crate) const STAY_IN_SECURITY: u8 = 0x00;
pub(crate) const STAY_IN_OPERATIONAL: u8 = 0x04;
pub(crate) const CONTINUE: u8 = 0x40;
pub(crate) const FINAL: u8 = 0x80;
pub(crate) const NO_TAG: u32 = 0xffff_ffff;

/// The script of one connection.
pub(crate) type Script = Box<dyn FnOnce(&mut Talk) -> io::Result<()> + Send>;

/// A listening target, which plays one script per connection, in order.
#[derive(Debug)]
pub(crate) struct Target {
    portal: Portal,
    sessions: JoinHandle<io::Result<()>>,
}

/// A listening address that is known before the scripts that name it are written.
#[derive(Debug)]
pub(crate) struct Place(TcpListener);

impl Place {
    pub(crate) fn new() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    pub(crate) fn portal(&self) -> Portal {
        self.0.local_addr().unwrap().to_string().parse().unwrap()
    }

    pub(crate) fn play(self, scripts: Vec<Script>) -> Target {
        let portal = self.portal();
        let sessions = thread::spawn(move || {
            for script in scripts {
                let (stream, _) = self.0.accept()?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                let header = [0; 48];
                let data = Vec::new();
                script(&mut Talk {
                    stream,
                    header,
                    data,
                })?;
            }
            Ok(())
        });
        Target { portal, sessions }
    }
}

impl Target {
    /// A target for one connection.
    pub(crate) fn one(script: impl FnOnce(&mut Talk) -> io::Result<()> + Send + 'static) -> Self {
        Place::new().play(vec![Box::new(script)])
    }

    pub(crate) fn portal(&self) -> &Portal {
        &self.portal
    }

    /// Waits until all scripts have played. Panics if a client did not do what a script
    /// expects.
    pub(crate) fn finish(self) {
        if let Err(error) = self.sessions.join().unwrap() {
            panic!("the target did not see what it expected: {error}");
        }
    }
}

/// One connection, and the last request on it.
#[derive(Debug)]
pub(crate) struct Talk {
    pub(crate) stream: TcpStream,
    pub(crate) header: [u8; 48],
    pub(crate) data: Vec<u8>,
}

impl Talk {
    /// Takes the next request, which must have this opcode.
    pub(crate) fn take(&mut self, opcode: u8) -> io::Result<()> {
        self.stream.read_exact(&mut self.header)?;
        let [a, b, c] = [5, 6, 7].map(|at| usize::from(self.header[at]));
        let length = a << 16 | b << 8 | c;
        self.data = vec![0; length.next_multiple_of(4)];
        self.stream.read_exact(&mut self.data)?;
        self.data.truncate(length);
        self.must(self.header[0] == opcode, "this opcode")
    }

    pub(crate) fn must(&self, holds: bool, what: &str) -> io::Result<()> {
        if holds {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&self.data);
        let seen = format!("expected {what}: {:02x?} {text:?}", self.header);
        Err(io::Error::other(seen))
    }

    /// The value of a key in the last request.
    pub(crate) fn value(&self, key: &str) -> Option<String> {
        let text = String::from_utf8(self.data.clone()).unwrap();
        let found = text
            .split('\0')
            .find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        found.map(str::to_owned)
    }

    /// A header of a reply to the last request.
    pub(crate) fn answer(&self, opcode: u8, flags: u8) -> [u8; 48] {
        let mut header = [0; 48];
        (header[0], header[1]) = (opcode, flags);
        header[16..20].copy_from_slice(&self.header[16..20]);
        if opcode == 0x23 {
            header[8..14].copy_from_slice(&self.header[8..14]);
        }
        header
    }

    pub(crate) fn send(&mut self, header: [u8; 48], data: &[u8]) -> io::Result<()> {
        self.stream.write_all(&pdu(header, data))
    }

    pub(crate) fn login(&mut self, flags: u8, text: &str) -> io::Result<()> {
        self.send(self.answer(0x23, flags), text.as_bytes())
    }

    pub(crate) fn status(&mut self, class: u8, detail: u8, text: &str) -> io::Result<()> {
        let mut header = self.answer(0x23, 0);
        (header[36], header[37]) = (class, detail);
        self.send(header, text.as_bytes())
    }

    pub(crate) fn text(&mut self, flags: u8, transfer_tag: u32, data: &[u8]) -> io::Result<()> {
        let mut header = self.answer(0x24, flags);
        header[20..24].copy_from_slice(&transfer_tag.to_be_bytes());
        self.send(header, data)
    }

    /// Plays a correct login, up to the request for targets.
    pub(crate) fn until_question(&mut self) -> io::Result<()> {
        self.until_operational()?;
        self.login(TO_FULL, "HeaderDigest=None\0DataDigest=None\0")?;
        self.take(0x44)?;
        self.must(self.data == b"SendTargets=All\0", "SendTargets")
    }

    /// Plays the security stage, up to the first operational request.
    pub(crate) fn until_operational(&mut self) -> io::Result<()> {
        self.take(0x43)?;
        self.must(self.header[1] == TO_OPERATIONAL, "the wish to go on")?;
        self.login(TO_OPERATIONAL, "AuthMethod=None\0")?;
        self.take(0x43)?;
        self.must(self.header[1] == TO_FULL, "the wish to be done")
    }

    /// Plays the login up to the answer to our challenge.
    pub(crate) fn until_proof(&mut self, challenge: &str) -> io::Result<()> {
        self.take(0x43)?;
        self.must(self.header[1] == STAY_IN_SECURITY, "no wish to go on")?;
        self.login(STAY_IN_SECURITY, "AuthMethod=CHAP\0")?;
        self.take(0x43)?;
        let offered = self.value("CHAP_A");
        self.must(offered.as_deref() == Some("8,6,5,7"), "all algorithms")?;
        let text = format!("CHAP_A=7\0CHAP_I=9\0CHAP_C={challenge}\0");
        self.login(STAY_IN_SECURITY, &text)
    }

    pub(crate) fn answer_logout(&mut self) -> io::Result<()> {
        self.take(0x46)?;
        self.send(self.answer(0x26, FINAL), b"")?;
        self.expect_close()
    }

    /// Expects that the client closes and sends nothing before.
    pub(crate) fn expect_close(&mut self) -> io::Result<()> {
        match self.stream.read(&mut [0; 64]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(io::Error::other("the client said more")),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends nothing more until the client closes, whatever the client sends.
    pub(crate) fn hang(&mut self) {
        while self.stream.read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
    }
}

pub(crate) fn pdu(mut header: [u8; 48], data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap().to_be_bytes();
    header[5..8].copy_from_slice(&length[1..]);
    let mut bytes = [&header[..], data].concat();
    bytes.resize(48 + data.len().next_multiple_of(4), 0);
    bytes
}
