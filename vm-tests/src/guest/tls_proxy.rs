//! A TLS server before a plain NBD server, which renews its keys when it is told to.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection};

use super::certificates::Certificates;

/// Serves each client over TLS 1.3 what the plain server behind it serves.
#[derive(Debug)]
pub struct TlsProxy {
    address: SocketAddr,
    renews_keys: Arc<AtomicBool>,
}

impl TlsProxy {
    /// Its threads stay until the process ends.
    ///
    /// # Panics
    /// If it cannot listen, or a file is no certificate.
    #[must_use]
    pub fn start(certificates: &Certificates, server: SocketAddr) -> Self {
        let read = |name: &str| fs::read(certificates.path().join(name)).expect("a file");
        let certificate = CertificateDer::from_pem_slice(&read("server-cert.pem"));
        let key = PrivateKeyDer::from_pem_slice(&read("server-key.pem"));
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.expect("a certificate")],
                key.expect("a key"),
            )
            .expect("a configuration");
        let config = Arc::new(config);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let renews_keys = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&renews_keys);
        thread::spawn(move || {
            for client in listener.incoming() {
                let (told, config) = (Arc::clone(&told), Arc::clone(&config));
                let client = client.expect("a client");
                thread::spawn(move || {
                    let ended = relay(&client, server, config, &told);
                    println!("TLS proxy: a connection has ended: {ended:?}");
                });
            }
        });
        Self {
            address,
            renews_keys,
        }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends a `KeyUpdate` over the one connection that there is.
    pub fn renew_keys(&self) {
        self.renews_keys.store(true, Ordering::Relaxed);
    }
}

fn relay(
    mut client: &TcpStream,
    server: SocketAddr,
    config: Arc<ServerConfig>,
    renews_keys: &AtomicBool,
) -> io::Result<()> {
    let mut plain = TcpStream::connect(server)?;
    // The greeting and the client's flags are in the clear, and STARTTLS (option 5) is.
    pass(&plain, client, 18)?;
    pass(client, &plain, 4)?;
    client.read_exact(&mut [0; 16])?;
    client.write_all(&[
        0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0,
    ])?;
    let mut session = ServerConnection::new(config).map_err(io::Error::other)?;
    let mut bytes = vec![0; 1 << 15];
    loop {
        while session.wants_write() {
            session.write_tls(&mut client)?;
        }
        let handshake_is_done = !session.is_handshaking();
        if handshake_is_done && renews_keys.swap(false, Ordering::Relaxed) {
            session.refresh_traffic_keys().map_err(io::Error::other)?;
            continue;
        }
        let mut ready =
            [client.as_fd(), plain.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        poll(&mut ready, PollTimeout::from(20_u8))?;
        let [from_client, from_server] = ready.map(|fd| fd.any().unwrap_or(false));
        if from_client {
            if session.read_tls(&mut client)? == 0 {
                plain.shutdown(Shutdown::Both)?;
                return Ok(());
            }
            let state = session.process_new_packets().map_err(io::Error::other)?;
            let mut request = vec![0; state.plaintext_bytes_to_read()];
            session.reader().read_exact(&mut request)?;
            plain.write_all(&request)?;
        }
        if from_server && handshake_is_done {
            match plain.read(&mut bytes)? {
                0 => return client.shutdown(Shutdown::Both),
                read => session.writer().write_all(&bytes[..read])?,
            }
        }
    }
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, length: usize) -> io::Result<()> {
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    to.write_all(&bytes)
}
