//! A device that is wanted over TLS has no connection without TLS.

use std::path::Path;
use std::time::Duration;

use lunbd::engine::{Flush, NbdOptions};
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::certificates::Certificates;
use vm_tests::guest::directory::Directory;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::tls_servers::{address, source};

/// `nbdkit` that serves clients with TLS and clients without TLS.
fn both(certificates: &Certificates) -> NbdServer {
    let directory = format!("--tls-certificates={}", certificates.path().display());
    NbdServer::nbdkit(At::tcp(), &["--tls=on", &directory, "memory", "8M"])
}

fn plain(server: &NbdServer) -> Source {
    format!("nbd://{}/", address(server)).parse().unwrap()
}

fn options(id: &str) -> NbdOptions {
    NbdOptions::default()
        .dead_connection_timeout(Duration::from_secs(60))
        .backend(id.parse().unwrap())
}

fn detach(engine: &Engine, source: Source, id: &str) {
    let request = DetachRequest::new(source).backend(id.parse().unwrap());
    let detachment = engine.detach(request, soon()).unwrap();
    assert!(detachment.changed && detachment.flush == Some(Flush::Done));
}

#[test]
fn an_attach_over_tls_takes_no_device_that_may_have_connections_without_tls() {
    let _module = NbdModule::with_backend_ids(2);
    let certificates = Certificates::new("tls");
    let server = both(&certificates);
    let (plain, secured) = (plain(&server), source(address(&server), "", &certificates));
    let request = |source: &Source| AttachRequest::new(source.clone()).nbd(options("pvc-1"));
    engine().attach(&request(&plain), soon()).unwrap();
    // The kernel does not show another process whether a device uses TLS.
    let agent = engine();
    let refused = agent.attach(&request(&secured), soon());
    let error = refused.expect_err("its connections are without TLS");
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let place = Directory::new("journal");
    let volume = "pvc-1".parse().unwrap();
    let attach = || {
        let agent = engine();
        let journal = agent.open_journal_at(&place, soon()).unwrap();
        let attached = agent.attach_volume(&journal, &volume, &request(&secured), soon());
        attached.map(|attachment| attachment.changed)
    };
    for _ in 0..2 {
        let error = attach().expect_err("the journal does not know the device");
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    }
    detach(&agent, plain, "pvc-1");

    // The journal has recorded that this device uses TLS.
    assert!(attach().unwrap());
    assert!(!attach().unwrap());
    detach(&agent, secured, "pvc-1");
}

#[test]
fn no_heal_gives_a_device_that_uses_tls_a_connection_without_tls() {
    let _module = NbdModule::with_backend_ids(2);
    let certificates = Certificates::new("tls");
    let mut server = both(&certificates);
    let (plain, secured) = (plain(&server), source(address(&server), "", &certificates));
    let agent = engine();
    // A later process would connect to the server that the id names.
    let misnamed = AttachRequest::new(secured.clone()).nbd(options(&plain.to_string()));
    let error = agent.attach(&misnamed, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(!Path::new("/sys/block/nbd0/pid").exists());

    let request = AttachRequest::new(secured.clone()).nbd(options("pvc-1"));
    agent.attach(&request, soon()).unwrap();
    server.kill();
    // A server without TLS comes back at the same address.
    let without_tls = NbdServer::nbdkit(server.at().clone(), &["memory", "8M"]);
    let short = Deadline::after(Duration::from_secs(5));
    let healing = agent
        .heal_source(&secured, &options("pvc-1"), short)
        .unwrap();
    assert!(!healing.outcome.serves(), "{healing:?}");
    guest::wait_until("no client", Duration::from_secs(10), || {
        (without_tls.connections() == 0).then_some(())
    });
    drop(without_tls);
    server.start();
    let healed = agent.heal_source(&plain, &options("pvc-1"), soon());
    let error = healed.expect_err("its connections use TLS");
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let healing = agent
        .heal_source(&secured, &options("pvc-1"), soon())
        .unwrap();
    assert!(healing.outcome.serves(), "{healing:?}");
    detach(&agent, secured, "pvc-1");
}
