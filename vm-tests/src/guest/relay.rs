//! A TCP relay in front of servers. One address leads first to one server and later to another,
//! while connections to the first continue.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use super::nbd_server::{At, NbdServer};

/// Carries bytes between clients and servers until it is dropped.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    ends: AtomicBool,
    /// New connections lead to these servers in turns.
    leads_to: Mutex<Vec<SocketAddr>>,
    /// New connections carry one NBD request, and hold the next.
    holds: AtomicBool,
    has_held: AtomicBool,
    carried: Mutex<Vec<Carried>>,
}

/// A connection that the relay carries.
#[derive(Debug)]
struct Carried {
    client: TcpStream,
    server: TcpStream,
    /// One of the two directions has ended, or both are being ended.
    has_ended: Arc<AtomicBool>,
}

impl Carried {
    fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
        for stream in [&self.client, &self.server] {
            let _ended_already = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Relay {
    /// Starts a relay to `server`.
    #[must_use]
    pub fn to(server: &NbdServer) -> Self {
        super::enter();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("the port's number");
        let shared = Arc::new(Shared {
            ends: AtomicBool::new(false),
            leads_to: Mutex::new(vec![address_of(server)]),
            holds: AtomicBool::new(false),
            has_held: AtomicBool::new(false),
            carried: Mutex::default(),
        });
        let mine = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                if mine.ends.load(Ordering::Relaxed) {
                    return;
                }
                if let Err(error) = carry(client.expect("a connection"), &mine) {
                    println!("the relay has no way to its server: {error}");
                }
            }
        });
        Self { address, shared }
    }

    /// The address for clients.
    #[must_use]
    pub fn at(&self) -> At {
        At::Tcp(self.address)
    }

    /// Connects new connections to `server`. Existing ones continue unchanged.
    pub fn lead_to(&self, server: &NbdServer) {
        self.lead_in_turns_to(&[server]);
    }

    /// Connects one new connection to the first server, the next one to the second, and so on.
    pub fn lead_in_turns_to(&self, servers: &[&NbdServer]) {
        let addresses = servers.iter().map(|server| address_of(server));
        *self.shared.leads_to.lock().expect("where it leads") = addresses.collect();
    }

    /// Whether new connections carry one NBD request to the server and hold back the others,
    /// like a server that no longer answers. A client that sends a request before it hands
    /// the connection over gets its answer.
    pub fn hold_all_but_one_request(&self, holds: bool) {
        self.shared.holds.store(holds, Ordering::Relaxed);
    }

    /// Whether the relay has held a request back.
    #[must_use]
    pub fn has_held_a_request(&self) -> bool {
        self.shared.has_held.load(Ordering::Relaxed)
    }

    /// Ends each live connection.
    pub fn cut_all(&self) {
        let carried = self.shared.carried.lock().expect("the connections");
        carried.iter().for_each(Carried::end);
    }

    /// Ends the connection at this place among the live ones, oldest first.
    pub fn cut(&self, place: usize) {
        let carried = self.shared.carried.lock().expect("the connections");
        let mut standing = carried.iter().filter(|one| stands(one));
        standing.nth(place).expect("a connection").end();
    }

    /// The clients of the live connections, oldest first.
    #[must_use]
    pub fn clients(&self) -> Vec<SocketAddr> {
        let carried = self.shared.carried.lock().expect("the connections");
        let standing = carried.iter().filter(|one| stands(one));
        standing
            .filter_map(|one| one.client.peer_addr().ok())
            .collect()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        let _wakes_it = TcpStream::connect(self.address);
        let carried = self.shared.carried.lock().expect("the connections");
        carried.iter().for_each(Carried::end);
    }
}

fn stands(one: &Carried) -> bool {
    !one.has_ended.load(Ordering::Relaxed)
}

fn address_of(server: &NbdServer) -> SocketAddr {
    let At::Tcp(address) = server.at() else {
        panic!("not on TCP: {:?}", server.at());
    };
    *address
}

/// Carries both directions, each on a thread that ends with the connection.
fn carry(client: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    let address = {
        let mut leads_to = shared.leads_to.lock().expect("where it leads");
        leads_to.rotate_left(1);
        *leads_to.last().expect("a server")
    };
    let server = TcpStream::connect(address)?;
    let has_ended = Arc::new(AtomicBool::new(false));
    let holds = shared.holds.load(Ordering::Relaxed);
    for (mut from, mut to, holds) in [
        (client.try_clone()?, server.try_clone()?, holds),
        (server.try_clone()?, client.try_clone()?, false),
    ] {
        from.set_nodelay(true)?;
        let has_ended = Arc::clone(&has_ended);
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            let _ended = if holds {
                carry_one_request(&mut from, &mut to, &shared.has_held)
            } else {
                io::copy(&mut from, &mut to).map(drop)
            };
            has_ended.store(true, Ordering::Relaxed);
            for stream in [&from, &to] {
                let _ended_already = stream.shutdown(Shutdown::Both);
            }
        });
    }
    let mut carried = shared.carried.lock().expect("the connections");
    carried.push(Carried {
        client,
        server,
        has_ended,
    });
    Ok(())
}

/// The handshake, and one request of those that follow it.
fn carry_one_request(
    from: &mut TcpStream,
    to: &mut TcpStream,
    has_held: &AtomicBool,
) -> io::Result<()> {
    /// `NBD_REQUEST_MAGIC`. Before its first request, a client waits for each answer of the
    /// handshake.
    const REQUEST: [u8; 4] = [0x25, 0x60, 0x95, 0x13];
    let mut bytes = [0; 4096];
    let mut has_carried_one = false;
    loop {
        let count = from.read(&mut bytes)?;
        if count == 0 {
            return Ok(());
        }
        let is_request = bytes[..count].starts_with(&REQUEST);
        if has_carried_one {
            has_held.store(true, Ordering::Relaxed);
        } else {
            to.write_all(&bytes[..count])?;
        }
        has_carried_one |= is_request;
    }
}
