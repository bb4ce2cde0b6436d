//! Logins to tgt, a target that negotiates otherwise than the kernel's and
//! sends logins on.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test panics to fail"
)]

use std::fs::OpenOptions;
use std::io::{Read as _, Seek as _, Write as _};
use std::time::Duration;

use lunbd::iscsi::{DiscoveryOptions, SessionOptions, discover};
use lunbd::transport::Via;
use lunbd::{AttachRequest, Attachment, Deadline, Engine, Result, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::INITIATOR;
use vm_tests::guest::tgt::Tgt;

const IQN: &str = "iqn.2026-01.example:process";
const BYTES: u64 = 8 << 20;
const LIMIT: Duration = Duration::from_secs(30);

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

fn source(portal: &str) -> Source {
    format!("iscsi://{portal}/{IQN}/1").parse().unwrap()
}

fn attach(engine: &Engine, portal: &str, options: SessionOptions) -> Result<Attachment> {
    let request = AttachRequest::new(source(portal)).log_in(options);
    engine.attach(&request, soon())
}

fn session_of(attachment: &Attachment) -> u32 {
    match &attachment.paths()[0].via {
        Via::Iscsi {
            session: Some(id), ..
        } => id.0,
        other => panic!("{other:?}"),
    }
}

fn writes_and_reads(attachment: &Attachment) {
    let data: Vec<u8> = (0..200_000_u32).map(|at| at.to_le_bytes()[0]).collect();
    let mut disk = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&attachment.node)
        .unwrap();
    disk.write_all(&data).unwrap();
    disk.sync_all().unwrap();
    guest::run(&["blockdev", "--flushbufs", attachment.node.to_str().unwrap()]);
    disk.rewind().unwrap();
    let mut found = vec![0; data.len()];
    disk.read_exact(&mut found).unwrap();
    assert!(found == data, "other data came back");
}

/// Detaches and looks whether anything stayed, here or there.
fn leaves_nothing(engine: &Engine, portal: &str, target: &Tgt) {
    let detachment = engine.detach(source(portal), soon()).unwrap();
    assert_eq!(detachment.logged_out.len(), 1, "{detachment:?}");
    nothing_is_left();
    guest::wait_until("the target to have no connection", LIMIT, || {
        (target.connections() == 0).then_some(())
    });
}

#[test]
fn a_unit_is_found_logged_in_to_used_and_left_with_digests_and_without() {
    iscsi_tcp::prepare();
    let engine = engine();
    for portal in ["127.0.0.1:3260", "[::1]:3260"] {
        let target = Tgt::start("0", portal, IQN, BYTES);
        let ask = DiscoveryOptions::new(INITIATOR.parse().unwrap());
        let found = discover(&portal.parse().unwrap(), &ask, Deadline::after(LIMIT)).unwrap();
        let [only] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(only.iqn.as_str(), IQN);
        assert_eq!(only.portals[0].portal.to_string(), portal);
        for (header, data) in [(false, false), (true, true)] {
            let options = options().digests(header, data);
            let attachment = attach(&engine, portal, options).unwrap();
            assert_eq!(attachment.size, BYTES);
            let session = session_of(&attachment);
            let has = |name| attribute(session, name) == "1";
            assert_eq!((has("header_digest"), has("data_digest")), (header, data));
            assert!(target.connections() > 0);
            writes_and_reads(&attachment);
            leaves_nothing(&engine, portal, &target);
        }
    }
}

#[test]
fn a_login_that_is_sent_on_is_a_session_there_and_is_left_there() {
    iscsi_tcp::prepare();
    let engine = engine();
    let (first, second) = ("127.0.0.1:3260", "127.0.0.2:3260");
    let sends_on = Tgt::start("0", first, IQN, BYTES);
    let takes = Tgt::start("1", second, IQN, BYTES);
    sends_on.redirect("127.0.0.2", "3260");
    let attachment = attach(&engine, first, options()).unwrap();
    let session = session_of(&attachment);
    assert_eq!(attribute(session, "address"), "127.0.0.2");
    assert_eq!(attribute(session, "persistent_address"), "127.0.0.1");
    assert_eq!((sends_on.connections(), takes.connections()), (0, 1));
    writes_and_reads(&attachment);
    leaves_nothing(&engine, first, &takes);
}
