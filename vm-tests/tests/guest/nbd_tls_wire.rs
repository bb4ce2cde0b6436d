//! What goes over the wire of a device over TLS.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lunbd::engine::{HealOutcome, NbdOptions};
use lunbd::{AttachRequest, Source};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};
use std::os::fd::{AsFd as _, AsRawFd as _};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::certificates::Certificates;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::tls_proxy::TlsProxy;
use vm_tests::guest::tls_servers::{address, nbdkit, source};
use vm_tests::guest::writer::Writer;

const MIB: usize = 1 << 20;
const PLAIN: &[u8] = b"this goes over the wire in no plain block. ";

/// Every packet of the machine, from its start to its end.
struct Capture {
    stop: Arc<AtomicBool>,
    reading: JoinHandle<Vec<u8>>,
}

impl Capture {
    fn start() -> Self {
        let packets = socket(
            AddressFamily::Packet,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::EthAll,
        )
        .unwrap();
        setsockopt(&packets, sockopt::RcvBufForce, &(64 * MIB)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let reading = thread::spawn(move || {
            let mut all = Vec::new();
            let mut packet = vec![0; 1 << 17];
            loop {
                let is_last = told.load(Ordering::Relaxed);
                let mut ready = [PollFd::new(packets.as_fd(), PollFlags::POLLIN)];
                if poll(&mut ready, PollTimeout::from(50_u8)).unwrap() == 0 {
                    if is_last {
                        return all;
                    }
                    continue;
                }
                let length = recv(packets.as_raw_fd(), &mut packet, MsgFlags::empty()).unwrap();
                all.extend(&packet[..length]);
            }
        });
        Self { stop, reading }
    }

    fn end(self) -> Vec<u8> {
        self.stop.store(true, Ordering::Relaxed);
        self.reading.join().unwrap()
    }
}

/// The packets of an attach, a write of 2 MiB and a detach.
fn packets_of_a_write(source: Source, store: &Store) -> Vec<u8> {
    let written: Vec<u8> = PLAIN.iter().copied().cycle().take(2 * MIB).collect();
    let engine = engine();
    let capture = Capture::start();
    let request = AttachRequest::new(source.clone());
    let attachment = engine.attach(&request, soon()).unwrap();
    fs::write(&attachment.node, &written).unwrap();
    engine.detach(source, soon()).unwrap();
    let packets = capture.end();
    assert!(fs::read(store.path()).unwrap().starts_with(&written));
    assert!(packets.len() > 2 * MIB, "{}", packets.len());
    packets
}

fn has_plain_text(packets: &[u8]) -> bool {
    packets.windows(PLAIN.len()).any(|window| window == PLAIN)
}

#[test]
fn no_packet_of_a_device_over_tls_has_what_is_written_and_those_of_a_plain_one_have() {
    let _module = NbdModule::with_backend_ids(1);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(8 * MIB as u64);
    let server = nbdkit(&certificates, store.path(), &[]);
    let secured = source(address(&server), "", &certificates);
    assert!(!has_plain_text(&packets_of_a_write(secured, &store)));
    drop(server);

    let store = Store::sparse(8 * MIB as u64);
    let file = store.path().to_str().unwrap();
    let server = NbdServer::nbdkit(At::tcp(), &["file", file]);
    let plain = server.uri("").parse().unwrap();
    assert!(has_plain_text(&packets_of_a_write(plain, &store)));
}

/// A proxy sends the `KeyUpdate`. No server of `GnuTLS` can be made to send one here: the number
/// of records after which it sends one is fixed at 2^24 (`lib/record.c`, `_gnutls_send_tlen_int`),
/// no priority string changes it (`lib/priority.c` has no such option), and it sends none with
/// ChaCha20-Poly1305 (`lib/algorithms/ciphers.c`, `GNUTLS_CIPHER_FLAG_NO_REKEY`), the only cipher
/// that lunbd offers.
#[test]
fn a_connection_whose_server_renews_its_keys_dies_and_a_heal_loses_nothing() {
    let _module = NbdModule::with_backend_ids(1);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(64 * MIB as u64);
    let file = store.path().to_str().unwrap();
    let server = NbdServer::nbdkit(At::tcp(), &["file", file]);
    let proxy = TlsProxy::start(&certificates, address(&server));
    let source = source(proxy.address(), "", &certificates);
    let options = NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(120));
    let engine = engine();
    let request = AttachRequest::new(source.clone()).nbd(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    let index = attachment.nbd_index().unwrap();
    let writer = Writer::start(&attachment.node);
    for _ in 0..3 {
        writer.goes_on();
        proxy.renew_keys();
        guest::wait_until("the connection to die", Duration::from_secs(60), || {
            let looks = engine.heal(soon()).unwrap();
            let of_it = looks.into_iter().find(|look| look.index == index);
            let outcome = of_it.expect("the device").outcome;
            matches!(outcome, HealOutcome::Adopted(_)).then_some(())
        });
        writer.goes_on();
    }
    writer.end();
    engine.detach(source, soon()).unwrap();
}
