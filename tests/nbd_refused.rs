//! NBD commands that the library or the kernel refuses, each at its own stage. No kernel here
//! has the devices that they name.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

#[allow(dead_code, reason = "other tests use the rest of it")]
mod machine;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;

use lunbd::engine::{HealOutcome, NbdOptions};
use lunbd::error::{Retry, Stage};
use lunbd::id::NbdIndex;
use lunbd::nbd::{self, Connect, Reconfigure, Timeouts};
use lunbd::{AttachRequest, Deadline, Engine, Error, ErrorKind, Roots, Source};
use machine::Machine;

const URI: &str = "nbd://127.0.0.1:1/x";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// An index that the module cannot have, whatever its parameters are.
fn no_device() -> NbdIndex {
    NbdIndex::new(0xf_ffff).unwrap()
}

/// A machine whose nbd0 has this backend id and these further attributes.
fn machine(backend: &str, more: &[(&str, &str)]) -> Machine {
    let machine = Machine::new();
    let basic = [("dev", "43:0"), ("backend", backend), ("ro", "0")];
    for (file, text) in basic.iter().chain(more) {
        machine.write(&format!("sys/block/nbd0/{file}"), &format!("{text}\n"));
    }
    machine
}

#[track_caller]
fn fails_at(error: &Error, stage: Stage, kind: ErrorKind, retry: Retry) {
    assert_eq!(error.stage(), Some(stage), "{error}");
    assert_eq!(error.kind(), kind, "{error}");
    assert_eq!(error.retry(), retry, "{error}");
}

#[test]
fn a_connect_without_a_socket_and_one_with_too_many_are_never_tried_again() {
    let timeouts = Timeouts {
        request: Duration::from_secs(1),
        dead_connection: Duration::from_secs(1),
    };
    let null = || OwnedFd::from(File::open("/dev/null").unwrap());
    for count in [0, 1025] {
        let sockets = std::iter::repeat_with(null).take(count).collect();
        let command = Connect::new(sockets, 1 << 20, timeouts).index(no_device());
        let error = command.send(&Roots::default(), soon()).unwrap_err();
        fails_at(
            &error,
            Stage::Connect,
            ErrorKind::InvalidInput,
            Retry::Never,
        );
        assert_eq!(error.retry().as_str(), "never");
        assert!(error.to_string().contains("expected 1 to 1024"), "{error}");
    }
    let sockets = std::iter::repeat_with(null).take(1025).collect();
    let command = Reconfigure::new(no_device(), timeouts).sockets(sockets);
    let error = command.send(&Roots::default(), soon()).unwrap_err();
    fails_at(
        &error,
        Stage::Reconfigure,
        ErrorKind::InvalidInput,
        Retry::Never,
    );
}

#[test]
fn a_backend_id_that_is_attached_under_another_index_is_refused_at_connect() {
    let machine = machine(URI, &[("pid", "1")]);
    let engine = Engine::start(machine.roots()).unwrap();
    let source: Source = URI.parse().unwrap();
    let attach = |options| {
        let request = AttachRequest::new(source.clone()).nbd(options);
        engine.attach(&request, soon()).unwrap_err()
    };
    let seven = NbdIndex::new(7).unwrap();
    let error = attach(NbdOptions::default().index(seven));
    fails_at(&error, Stage::Connect, ErrorKind::InUse, Retry::AfterChange);
    assert!(
        error.to_string().contains("as nbd0, not as nbd7"),
        "{error}"
    );
    let error = attach(NbdOptions::default().read_only());
    fails_at(&error, Stage::Connect, ErrorKind::InUse, Retry::AfterChange);
    assert!(error.to_string().contains("writable"), "{error}");
}

#[test]
fn a_device_that_is_disconnected_while_it_is_healed_is_left_alone_at_reconfigure() {
    // The device has no pid and no node: the read fails, and nothing is connected.
    let machine = machine(URI, &[]);
    let engine = Engine::start(machine.roots()).unwrap();
    let healings = engine.heal(soon()).unwrap();
    let [healing] = healings.as_slice() else {
        panic!("{healings:?}");
    };
    let HealOutcome::Failed(error) = &healing.outcome else {
        panic!("{healing:?}");
    };
    fails_at(error, Stage::Reconfigure, ErrorKind::Vanished, Retry::Again);
    assert_eq!(healing.dials, 0, "no server is dialled for it");
}

#[test]
fn a_disconnect_of_a_device_that_is_not_there_fails_at_disconnect() {
    let roots = Roots::default();
    let error = nbd::disconnect(&roots, no_device(), soon()).unwrap_err();
    assert_eq!(error.stage(), Some(Stage::Disconnect), "{error}");
    // The kind depends on whether the module is loaded and the caller is privileged.
    let expected = [
        ErrorKind::NotSupported,
        ErrorKind::NotPermitted,
        ErrorKind::NotFound,
        ErrorKind::InvalidInput,
    ];
    assert!(expected.contains(&error.kind()), "{error}");
}
