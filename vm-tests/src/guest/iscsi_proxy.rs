//! A proxy in front of an iSCSI target. It changes, drops and adds PDUs.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

const HEADER: usize = 48;
const DIGEST: usize = 4;
const SCSI_COMMAND: u8 = 0x01;
/// The operation code.
const INQUIRY: u8 = 0x12;
const LOGIN_REQUEST: u8 = 0x03;
const LOGIN_RESPONSE: u8 = 0x23;
const SCSI_RESPONSE: u8 = 0x21;
/// The response to a task management request, and its result (RFC 7143, 11.6.1).
const TASK_RESPONSE: u8 = 0x22;
const NO_SUCH_TASK: u8 = 1;
const TASK_ENDED: u8 = 0;
const DATA_IN: u8 = 0x25;
const LOGOUT_REQUEST: u8 = 0x06;
const ASYNC_MESSAGE: u8 = 0x32;
const NO_TAG: [u8; 4] = [0xff; 4];
/// SYNCHRONIZE CACHE (10) and (16).
const FLUSHES: [u8; 2] = [0x35, 0x91];

/// A request of an initiator that the proxy records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// To flush a unit's cache.
    Flush,
    /// To log out.
    Logout,
}

/// The part of a PDU that the proxy corrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A byte of the PDU's first 48 bytes.
    Header,
    /// A byte of the data that was read.
    Data,
}

/// Carries PDUs between initiators and a target until it is dropped. Its sessions have only the
/// digests that it was started with.
#[derive(Debug)]
pub struct IscsiProxy {
    address: &'static str,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    ends: AtomicBool,
    digests: Digests,
    breaks: Mutex<Option<Part>>,
    wishes: Mutex<Vec<Wish>>,
    /// The peripheral qualifier that INQUIRY reports for every LUN.
    qualifier: AtomicU8,
    /// The tags of INQUIRY commands that are not answered yet.
    inquiries: Mutex<BTreeSet<[u8; 4]>>,
    /// The list of pages of vital product data is answered with an empty one.
    hides_pages: AtomicBool,
    /// As of INQUIRY, of that list.
    lists: Mutex<BTreeSet<[u8; 4]>>,
    /// READ CAPACITY is answered with sense data.
    refuses_capacity: AtomicBool,
    /// Commands with this operation code get no answer; 0 ignores none.
    ignored: AtomicU8,
    /// The tags of those commands.
    unanswered: Mutex<BTreeSet<[u8; 4]>>,
    /// The next READ CAPACITY silences its connection.
    is_to_be_silent: AtomicBool,
    /// The tags of READ CAPACITY commands.
    capacities: Mutex<BTreeSet<[u8; 4]>>,
    /// The connection that was made last.
    last: Mutex<Option<Way>>,
}

/// The parts of a PDU that have digests.
#[derive(Debug, Clone, Copy, Default)]
struct Digests {
    header: bool,
    data: bool,
}

/// The connection to the initiator, and the last header that was sent on it.
#[derive(Debug)]
struct Way {
    silent: Arc<AtomicBool>,
    initiator: TcpStream,
    target: TcpStream,
    header: [u8; HEADER],
}

impl IscsiProxy {
    /// Listens at `address` for the target at `portal`.
    #[must_use]
    pub fn start(address: &'static str, portal: &'static str) -> Self {
        Self::serve(address, portal, Shared::default())
    }

    /// The same for sessions with header and data digests.
    #[must_use]
    pub fn with_digests(address: &'static str, portal: &'static str) -> Self {
        let shared = Shared {
            digests: Digests {
                header: true,
                data: true,
            },
            ..Shared::default()
        };
        Self::serve(address, portal, shared)
    }

    fn serve(address: &'static str, portal: &'static str, shared: Shared) -> Self {
        super::enter();
        let listener = TcpListener::bind(address).expect(address);
        let shared = Arc::new(shared);
        let mine = Arc::clone(&shared);
        thread::spawn(move || {
            for initiator in listener.incoming() {
                if mine.ends.load(Ordering::Relaxed) {
                    return;
                }
                let initiator = initiator.expect("a connection");
                if let Err(error) = carry(&initiator, portal, &mine) {
                    println!("no way to {portal}: {error}");
                }
            }
        });
        Self { address, shared }
    }

    /// The recorded requests of initiators, in order.
    #[must_use]
    pub fn wishes(&self) -> Vec<Wish> {
        self.shared.wishes.lock().expect("the wishes").clone()
    }

    /// How often an initiator asked to log out.
    #[must_use]
    pub fn logouts(&self) -> usize {
        let wishes = self.wishes().into_iter();
        wishes.filter(|wish| *wish == Wish::Logout).count()
    }

    /// Sends an asynchronous message over the last connection, in the target's name.
    pub fn says_by_itself(&self, event: u8, parameters: [u16; 3]) {
        let mut last = self.shared.last.lock().expect("a way");
        let way = last.as_mut().expect("a connection");
        let mut pdu = [0; HEADER];
        (pdu[0], pdu[1], pdu[36]) = (ASYNC_MESSAGE, 0x80, event);
        pdu[16..20].copy_from_slice(&NO_TAG);
        // The message repeats the last numbers: the target does not know of it.
        pdu[24..36].copy_from_slice(&way.header[24..36]);
        for (place, parameter) in pdu[38..44].chunks_exact_mut(2).zip(parameters) {
            place.copy_from_slice(&parameter.to_be_bytes());
        }
        way.initiator.write_all(&pdu).expect("the initiator");
    }

    /// From now on every answer to INQUIRY has this peripheral qualifier.
    pub fn set_qualifier(&self, qualifier: u8) {
        self.shared.qualifier.store(qualifier, Ordering::Relaxed);
    }

    /// Whether the list of pages of vital product data is empty from now on.
    pub fn hide_pages(&self, hides: bool) {
        self.shared.hides_pages.store(hides, Ordering::Relaxed);
    }

    /// Whether READ CAPACITY is refused from now on: NOT READY, MANUAL INTERVENTION REQUIRED
    /// (04h/03h).
    pub fn refuse_capacity(&self, refuses: bool) {
        let shared = &self.shared.refuses_capacity;
        shared.store(refuses, Ordering::Relaxed);
    }

    /// From now on the proxy drops every answer to a command with this operation code.
    pub fn ignore(&self, operation: u8) {
        self.shared.ignored.store(operation, Ordering::Relaxed);
    }

    /// Flips one bit of the next PDU with data that is read.
    pub fn break_a_read(&self, part: Part) {
        *self.shared.breaks.lock().expect("what breaks") = Some(part);
    }

    /// Whether the corruption is still to come.
    #[must_use]
    pub fn is_to_break(&self) -> bool {
        self.shared.breaks.lock().expect("what breaks").is_some()
    }

    /// Carries nothing more over the last connection, in either direction, and leaves it open.
    /// The next connection is carried again.
    pub fn fall_silent(&self) {
        let last = self.shared.last.lock().expect("a way");
        let way = last.as_ref().expect("a connection");
        way.silent.store(true, Ordering::Relaxed);
    }

    /// The same from the next READ CAPACITY on, which is no longer carried.
    pub fn fall_silent_at_capacity(&self) {
        self.shared.is_to_be_silent.store(true, Ordering::Relaxed);
    }

    /// Whether the silence is still to come.
    #[must_use]
    pub fn is_to_be_silent(&self) -> bool {
        self.shared.is_to_be_silent.load(Ordering::Relaxed)
    }

    /// Ends the last connection when all its data has been read.
    pub fn cut(&self) {
        let last = self.shared.last.lock().expect("a way");
        let way = last.as_ref().expect("a connection");
        for stream in [&way.initiator, &way.target] {
            let _gone_already = stream.shutdown(Shutdown::Write);
        }
    }
}

impl Drop for IscsiProxy {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        let _wakes_it = TcpStream::connect(self.address);
    }
}

/// Carries both directions, each on a thread that ends with the connection.
fn carry(initiator: &TcpStream, portal: &str, shared: &Arc<Shared>) -> io::Result<()> {
    let target = TcpStream::connect(portal)?;
    for stream in [initiator, &target] {
        stream.set_nodelay(true)?;
    }
    let silent = Arc::new(AtomicBool::new(false));
    let way = Way {
        silent: Arc::clone(&silent),
        initiator: initiator.try_clone()?,
        target: target.try_clone()?,
        header: [0; HEADER],
    };
    *shared.last.lock().expect("a way") = Some(way);
    let (mut from, mut to) = (initiator.try_clone()?, target.try_clone()?);
    let (mine, quiet) = (Arc::clone(shared), Arc::clone(&silent));
    thread::spawn(move || {
        while let Ok((header, pdu)) = read(&mut from, mine.digests) {
            if quiet.load(Ordering::Relaxed) {
                continue;
            }
            let ignored = mine.ignored.load(Ordering::Relaxed);
            if header[0] & 0x3f == SCSI_COMMAND && ignored > 0 && header[32] == ignored {
                let mut unanswered = mine.unanswered.lock().expect("the unanswered");
                unanswered.insert(tag(&header));
            }
            note_inquiry(&mine, &header);
            if header[0] & 0x3f == SCSI_COMMAND && is_read_capacity(&header) {
                if mine.is_to_be_silent.swap(false, Ordering::Relaxed) {
                    quiet.store(true, Ordering::Relaxed);
                    continue;
                }
                let mut capacities = mine.capacities.lock().expect("the capacities");
                capacities.insert(tag(&header));
            }
            if let Some(wish) = wish(&header) {
                mine.wishes.lock().expect("the wishes").push(wish);
            }
            if to.write_all(&pdu).is_err() {
                break;
            }
        }
        end(&to, &quiet);
    });
    let (mut from, mut to) = (target, initiator.try_clone()?);
    let mine = Arc::clone(shared);
    thread::spawn(move || {
        let here = to.peer_addr().ok();
        while let Ok((header, mut pdu)) = read(&mut from, mine.digests) {
            if silent.load(Ordering::Relaxed) {
                continue;
            }
            let mut unanswered = mine.unanswered.lock().expect("the unanswered");
            let is_answer = matches!(header[0] & 0x3f, DATA_IN | SCSI_RESPONSE);
            if is_answer && unanswered.remove(&tag(&header)) {
                continue;
            }
            drop(unanswered);
            // The target has ended the task, but the initiator has not seen its answer.
            let ignores = mine.ignored.load(Ordering::Relaxed) > 0;
            if ignores && header[0] & 0x3f == TASK_RESPONSE && pdu[2] == NO_SUCH_TASK {
                pdu[2] = TASK_ENDED;
            }
            answer_inquiry(&mine, &header, &mut pdu);
            let mut capacities = mine.capacities.lock().expect("the capacities");
            let is_capacity = capacities.remove(&tag(&header));
            drop(capacities);
            let refuses = mine.refuses_capacity.load(Ordering::Relaxed);
            if header[0] & 0x3f == DATA_IN && is_capacity && refuses {
                pdu = not_ready(&header);
            }
            if header[0] & 0x3f == DATA_IN {
                let breaks = mine.breaks.lock().expect("what breaks").take();
                match breaks {
                    // The residual count.
                    Some(Part::Header) => pdu[HEADER - 1] ^= 1,
                    Some(Part::Data) => pdu[data_at(&header, mine.digests)] ^= 1,
                    None => {}
                }
            }
            // Hold the lock, so that no asynchronous message comes in between.
            let mut last = mine.last.lock().expect("a way");
            if let Some(way) = last.as_mut()
                && way.initiator.peer_addr().ok() == here
            {
                way.header = header;
            }
            if to.write_all(&pdu).is_err() {
                break;
            }
        }
        end(&to, &silent);
    });
    Ok(())
}

fn note_inquiry(shared: &Shared, header: &[u8; HEADER]) {
    if header[0] & 0x3f != SCSI_COMMAND || header[32] != INQUIRY {
        return;
    }
    let mut inquiries = shared.inquiries.lock().expect("the inquiries");
    inquiries.insert(tag(header));
    // EVPD, and page 0.
    if header[33] & 1 == 1 && header[34] == 0 {
        let mut lists = shared.lists.lock().expect("the lists");
        lists.insert(tag(header));
    }
}

/// Changes the answer to INQUIRY.
fn answer_inquiry(shared: &Shared, header: &[u8; HEADER], pdu: &mut [u8]) {
    let mut inquiries = shared.inquiries.lock().expect("the inquiries");
    let is_inquiry = inquiries.remove(&tag(header));
    drop(inquiries);
    let is_list = shared.lists.lock().expect("the lists").remove(&tag(header));
    if header[0] & 0x3f != DATA_IN {
        return;
    }
    let data = data_at(header, shared.digests);
    let qualifier = shared.qualifier.load(Ordering::Relaxed);
    if is_inquiry && qualifier > 0 {
        pdu[data] = pdu[data] & 0x1f | qualifier << 5;
    }
    if is_list && shared.hides_pages.load(Ordering::Relaxed) {
        // Its length.
        pdu[data + 2..data + 4].fill(0);
    }
}

/// Passes on that the other side has ended, unless the connection is silent.
fn end(to: &TcpStream, silent: &AtomicBool) {
    if !silent.load(Ordering::Relaxed) {
        let _gone_already = to.shutdown(Shutdown::Both);
    }
}

/// READ CAPACITY (10), or (16), which is a service action.
fn is_read_capacity(header: &[u8; HEADER]) -> bool {
    header[32] == 0x25 || (header[32] == 0x9e && header[33] & 0x1f == 0x10)
}

/// The response to a failed command. It replaces the command's last data PDU and has its
/// numbers (RFC 7143, 11.4). Only for a session without digests.
fn not_ready(data: &[u8; HEADER]) -> Vec<u8> {
    assert!(data[1] & 1 == 1, "the data come with the status");
    let mut sense = [0; 18];
    (sense[0], sense[2], sense[7]) = (0x70, 0x02, 10);
    (sense[12], sense[13]) = (0x04, 0x03);
    let mut pdu = vec![0; HEADER];
    // SCSI Response, final, completed at the target, CHECK CONDITION.
    (pdu[0], pdu[1], pdu[3]) = (0x21, 0x80, 0x02);
    pdu[16..20].copy_from_slice(&data[16..20]);
    pdu[24..36].copy_from_slice(&data[24..36]);
    pdu[7] = 20;
    pdu.extend([0, 18]);
    pdu.extend(sense);
    pdu
}

/// The initiator task tag.
fn tag(header: &[u8; HEADER]) -> [u8; 4] {
    [header[16], header[17], header[18], header[19]]
}

fn wish(header: &[u8; HEADER]) -> Option<Wish> {
    match header[0] & 0x3f {
        SCSI_COMMAND if FLUSHES.contains(&header[32]) => Some(Wish::Flush),
        LOGOUT_REQUEST => Some(Wish::Logout),
        _ => None,
    }
}

/// The offset of a PDU's data, in a session that is logged in.
fn data_at(header: &[u8; HEADER], digests: Digests) -> usize {
    let digest = if digests.header { DIGEST } else { 0 };
    HEADER + usize::from(header[4]) * 4 + digest
}

/// Reads one PDU.
fn read(from: &mut TcpStream, digests: Digests) -> io::Result<([u8; HEADER], Vec<u8>)> {
    let mut header = [0; HEADER];
    from.read_exact(&mut header)?;
    let [a, b, c] = [5, 6, 7].map(|at| usize::from(header[at]));
    let data = (a << 16 | b << 8 | c).next_multiple_of(4);
    let is_login = matches!(header[0] & 0x3f, LOGIN_REQUEST | LOGIN_RESPONSE);
    let digests = if is_login {
        Digests::default()
    } else {
        digests
    };
    // A PDU without data has no data digest.
    let digest = if digests.data && data > 0 { DIGEST } else { 0 };
    let mut pdu = header.to_vec();
    pdu.resize(data_at(&header, digests) + data + digest, 0);
    from.read_exact(&mut pdu[HEADER..])?;
    Ok((header, pdu))
}
