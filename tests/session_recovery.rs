//! Which lost sessions are recovered and what is reported about them, on a machine made of
//! files, without a kernel that takes a connection.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use lunbd::engine::{
    SessionRecovery, SessionRecoveryOptions, SessionRecoveryOutcome, SessionRecoveryReport,
};
use lunbd::iscsi::{Credentials, Secret};
use lunbd::{Deadline, Engine, ErrorKind, Roots};
use parking_lot::Mutex;

struct Machine {
    root: tempfile::TempDir,
    engine: Engine,
    /// A port at which no server listens.
    port: u16,
}

impl Machine {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for dir in ["sys/class", "run", "dev", "proc"] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = nobody.local_addr().unwrap().port();
        Self { root, engine, port }
    }

    fn session(&self, id: u32) -> PathBuf {
        let host = format!("sys/devices/platform/host{id}/session{id}");
        let path = format!("{host}/iscsi_session/session{id}");
        self.root.path().join(path)
    }

    fn connection(&self, id: u32) -> PathBuf {
        let name = format!("connection{id}:0");
        let below = self.session(id);
        let device = below.parent().unwrap().parent().unwrap();
        device.join(format!("{name}/iscsi_connection/{name}"))
    }

    fn set(&self, id: u32, name: &str, value: &str) {
        fs::write(self.session(id).join(name), format!("{value}\n")).unwrap();
    }

    fn set_connection(&self, id: u32, name: &str, value: &str) {
        fs::write(self.connection(id).join(name), format!("{value}\n")).unwrap();
    }

    /// Adds a session that lunbd created and that is logged in.
    fn add(&self, id: u32) {
        for (dir, kind) in [
            (self.session(id), "session"),
            (self.connection(id), "connection"),
        ] {
            fs::create_dir_all(&dir).unwrap();
            let class = self.root.path().join(format!("sys/class/iscsi_{kind}"));
            fs::create_dir_all(&class).unwrap();
            symlink(&dir, class.join(dir.file_name().unwrap())).unwrap();
        }
        for (name, value) in [
            ("state", "LOGGED_IN"),
            ("creator", "-1"),
            ("ifacename", "lunbd"),
            ("initiatorname", "iqn.2026-01.example:host"),
            ("targetname", &format!("iqn.2026-01.example:array{id}")),
            ("target_id", "0"),
            ("recovery_tmo", "120"),
        ] {
            self.set(id, name, value);
        }
        for (name, value) in [
            ("state", "up"),
            ("persistent_address", "127.0.0.1"),
            ("persistent_port", &self.port.to_string()),
        ] {
            self.set_connection(id, name, value);
        }
    }

    fn lose(&self, id: u32) {
        self.set_connection(id, "state", "failed");
        self.set(id, "state", "FAILED");
    }

    fn keeper(&self) -> SessionRecovery {
        self.keeper_with(None)
    }

    fn keeper_with(&self, known: Option<Credentials>) -> SessionRecovery {
        let options = SessionRecoveryOptions::new().credentials(move |_| Ok(known.clone()));
        self.engine.recover_sessions(options).unwrap()
    }
}

/// The reports, until none comes for a while or there are `enough`.
fn news(keeper: &mut SessionRecovery, enough: usize) -> Vec<SessionRecoveryReport> {
    let mut all = Vec::new();
    let long = Deadline::after(Duration::from_secs(60));
    while all.len() < enough && !long.has_passed() {
        all.extend(keeper.next(long).unwrap());
    }
    all.extend(
        keeper
            .next(Deadline::after(Duration::from_millis(300)))
            .unwrap(),
    );
    all.sort_by_key(|kept| kept.session);
    all
}

/// Takes a lock of lunbd as another process does: the last holder removes the file.
fn locked(path: &Path) -> fs::File {
    loop {
        let file = fs::File::create(path).unwrap();
        file.lock().unwrap();
        let at_path = fs::metadata(path);
        if at_path.is_ok_and(|at_path| at_path.ino() == file.metadata().unwrap().ino()) {
            return file;
        }
    }
}

#[test]
fn only_lost_sessions_of_lunbd_are_tried_and_each_failure_is_reported_once() {
    let machine = Machine::new();
    for id in 1..=6 {
        machine.add(id);
    }
    machine.lose(1);
    // The session's own state follows its connection's.
    machine.set_connection(2, "state", "failed");
    // These sessions belong to iscsid and to another program.
    machine.lose(3);
    machine.set(3, "creator", "812");
    machine.lose(4);
    machine.set(4, "ifacename", "default");
    // These sessions are being ended.
    machine.lose(5);
    machine.set_connection(5, "state", "down");
    machine.lose(6);
    machine.set(6, "target_id", "-1");
    let told = news(&mut machine.keeper(), 2);
    let sessions: Vec<u32> = told.iter().map(|kept| kept.session.0).collect();
    assert_eq!(sessions, [1, 2], "{told:?}");
    for kept in &told {
        let SessionRecoveryOutcome::Failed(error) = &kept.outcome else {
            panic!("{kept:?}");
        };
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert_eq!(
            kept.target,
            Some(
                format!("iqn.2026-01.example:array{}", kept.session)
                    .parse()
                    .unwrap()
            )
        );
        // The time of the loss is unknown, because no process saw it.
        assert_eq!(kept.budget_left, None);
        assert!(kept.tries > 0);
    }
}

#[test]
fn missing_credentials_are_reported_and_delay_no_other_session() {
    let machine = Machine::new();
    for id in [1, 2, 3] {
        machine.add(id);
        machine.lose(id);
    }
    // A file on a hung file system does not answer for a while.
    let (answer, awaited) = mpsc::channel::<()>();
    let awaited = Mutex::new(awaited);
    let options = SessionRecoveryOptions::new().credentials(move |name| {
        if !name.target.as_str().ends_with("array2") {
            let awaited = awaited.lock();
            let _until_then = awaited.recv();
        }
        Ok(None)
    });
    let mut keeper = machine.engine.recover_sessions(options).unwrap();
    let told = news(&mut keeper, 3);
    let expected = [
        (1, ErrorKind::TimedOut),
        (2, ErrorKind::Unreachable),
        (3, ErrorKind::TimedOut),
    ];
    assert_eq!(failures(&told), expected, "{told:?}");
    assert!(told.iter().all(|kept| kept.tries > 0), "{told:?}");
    assert!(
        told[0].to_string().contains("the current re-login attempt"),
        "{}",
        told[0]
    );
    assert!(
        told[0].to_string().contains("session 1 is FAILED"),
        "{}",
        told[0]
    );
    // A recovery with credentials does not wait for one that still waits for its credentials.
    let told = news(&mut machine.keeper(), 3);
    let unreachable = [1, 2, 3].map(|id| (id, ErrorKind::Unreachable));
    assert_eq!(failures(&told), unreachable, "{told:?}");
    // A change of a session's state meanwhile is reported.
    machine.set_connection(3, "state", "up");
    machine.set(3, "state", "LOGGED_IN");
    let told = news(&mut keeper, 1);
    let healthy =
        |kept: &SessionRecoveryReport| matches!(kept.outcome, SessionRecoveryOutcome::Healthy);
    assert!(told.len() == 1 && told.iter().all(healthy), "{told:?}");
    assert_eq!(told[0].session.0, 3);
    // When the credentials come, the login is tried again.
    drop(answer);
    let told = news(&mut keeper, 1);
    assert_eq!(failures(&told), [(1, ErrorKind::Unreachable)], "{told:?}");
}

fn failures(told: &[SessionRecoveryReport]) -> Vec<(u32, ErrorKind)> {
    let failure = |kept: &SessionRecoveryReport| match &kept.outcome {
        SessionRecoveryOutcome::Failed(error) => (kept.session.0, error.kind()),
        _ => panic!("{kept:?}"),
    };
    told.iter().map(failure).collect()
}

/// The server at the other end would receive the writes that wait.
#[test]
fn a_session_with_mutual_chap_is_reported_and_not_dialled_without_such_credentials() {
    let machine = Machine::new();
    machine.add(1);
    machine.set(1, "username_in", "lunbd:mutual-chap");
    machine.lose(1);
    let impostor = TcpListener::bind(("127.0.0.1", machine.port)).unwrap();
    impostor.set_nonblocking(true).unwrap();
    let [own, its] = ["one", "other"].map(|secret| Secret::new(secret).unwrap());
    let one_way = Credentials::new("host", own).unwrap();
    let mutual = one_way.clone().mutual(None, its).unwrap();
    for too_little in [None, Some(one_way)] {
        let told = news(&mut machine.keeper_with(too_little), 1);
        assert_eq!(failures(&told), [(1, ErrorKind::NotPermitted)], "{told:?}");
        assert!(told[0].to_string().contains("mutual CHAP"), "{}", told[0]);
        let dialled = impostor.accept().map_err(|error| error.kind());
        assert_eq!(dialled.unwrap_err(), std::io::ErrorKind::WouldBlock);
    }
    drop(impostor);
    let told = news(&mut machine.keeper_with(Some(mutual)), 1);
    assert_eq!(failures(&told), [(1, ErrorKind::Unreachable)], "{told:?}");
}

#[test]
fn the_source_of_the_credentials_gets_no_more_time_than_the_call_has() {
    const LIMIT: Duration = Duration::from_secs(2);
    let machine = Machine::new();
    machine.add(1);
    machine.lose(1);
    let asked: Arc<Mutex<Vec<Duration>>> = Arc::default();
    let times = Arc::clone(&asked);
    let options = SessionRecoveryOptions::new().credentials_within(move |_, deadline| {
        times.lock().push(deadline.remaining());
        Ok(None)
    });
    let source = format!(
        "iscsi://127.0.0.1:{}/iqn.2026-01.example:array1/1",
        machine.port
    );
    let source = source.parse().unwrap();
    let healed = machine
        .engine
        .heal_sessions(&source, &options, Deadline::after(LIMIT));
    assert_eq!(failures(&healed.unwrap()).len(), 1);
    let asked = asked.lock();
    assert!(
        asked.len() > 1 && asked.iter().all(|time| *time <= LIMIT),
        "{asked:?}"
    );
}

#[test]
fn credentials_whose_source_panics_are_asked_for_again() {
    let machine = Machine::new();
    machine.add(1);
    machine.lose(1);
    let asked = AtomicUsize::new(0);
    let options = SessionRecoveryOptions::new().credentials(move |_| {
        assert!(asked.fetch_add(1, Ordering::SeqCst) > 0, "the first time");
        Ok(None)
    });
    let mut keeper = machine.engine.recover_sessions(options).unwrap();
    let told = news(&mut keeper, 2);
    let expected = [(1, ErrorKind::Io), (1, ErrorKind::Unreachable)];
    assert_eq!(failures(&told), expected, "{told:?}");
}

/// The process that recovered the session may have been killed before it set the devices
/// running.
#[test]
fn devices_run_again_at_the_first_look_and_after_another_process_recovered_their_session() {
    let machine = Machine::new();
    machine.add(1);
    machine.add(2);
    machine.lose(2);
    let state = |id: u32| {
        // hostN/sessionN is the device above its class directory.
        let class = machine.session(id);
        let device = class.ancestors().nth(2).unwrap();
        device.join(format!("target{id}:0:0/{id}:0:0:1/state"))
    };
    for id in [1, 2] {
        fs::create_dir_all(state(id).parent().unwrap()).unwrap();
        fs::write(state(id), "offline\n").unwrap();
        let bus = machine.root.path().join("sys/bus/scsi/devices");
        fs::create_dir_all(&bus).unwrap();
        symlink(state(id).parent().unwrap(), bus.join(format!("{id}:0:0:1"))).unwrap();
    }
    let is = |id: u32, wanted: &str| fs::read_to_string(state(id)).unwrap() == wanted;
    let mut keeper = machine.keeper();
    let runs = |keeper: &mut SessionRecovery, id| {
        let limit = Deadline::after(Duration::from_secs(60));
        while !is(id, "running\n") && !limit.has_passed() {
            keeper
                .next(Deadline::after(Duration::from_millis(20)))
                .unwrap();
        }
        assert!(is(id, "running\n"));
    };
    runs(&mut keeper, 1);
    assert!(is(2, "offline\n"), "it is lost");
    machine.set_connection(2, "state", "up");
    machine.set(2, "state", "LOGGED_IN");
    runs(&mut keeper, 2);
}

#[cfg(feature = "metrics")]
#[test]
fn what_becomes_of_a_lost_session_is_counted() {
    let machine = Machine::new();
    for id in [1, 2] {
        machine.add(id);
        machine.lose(id);
    }
    let recorder = metrics_util::debugging::DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let mut keeper = machine.keeper();
        news(&mut keeper, 2);
        machine.set(2, "creator", "812");
        assert_eq!(news(&mut keeper, 1).len(), 1);
    });
    let counts = snapshotter.snapshot().into_vec().into_iter();
    let mut counts: Vec<String> = counts
        .filter(|(key, ..)| key.key().name() == "lunbd_session_recoveries_total")
        .map(|(key, _, _, value)| {
            let outcome = key.key().labels().next().unwrap();
            format!("{} {value:?}", outcome.value())
        })
        .collect();
    counts.sort();
    assert_eq!(counts, ["failed Counter(2)", "gone Counter(1)"]);
}

/// The kernel sends no event here: it may have no memory for one.
#[test]
fn a_loss_without_a_kernel_event_is_found_in_sysfs() {
    let machine = Machine::new();
    machine.add(1);
    let mut keeper = machine.keeper();
    let turn = Deadline::after(Duration::from_millis(100));
    assert!(keeper.next(turn).unwrap().is_empty());
    machine.lose(1);
    let told = news(&mut keeper, 1);
    assert!(
        matches!(&told[..], [kept] if matches!(kept.outcome, SessionRecoveryOutcome::Failed(_))),
        "{told:?}"
    );
}

#[test]
fn a_session_is_followed_until_it_serves_again_or_is_gone() {
    let machine = Machine::new();
    for id in [1, 2] {
        machine.add(id);
        machine.lose(id);
    }
    let mut keeper = machine.keeper();
    assert_eq!(news(&mut keeper, 2).len(), 2);
    machine.set(1, "state", "FREE");
    let told = news(&mut keeper, 1);
    assert!(
        matches!(
            told[..],
            [SessionRecoveryReport {
                outcome: SessionRecoveryOutcome::BudgetSpent,
                ..
            }]
        ),
        "{told:?}"
    );
    // Another process recovers session 1, and session 2 is logged out.
    machine.set(1, "state", "LOGGED_IN");
    machine.set_connection(1, "state", "up");
    fs::remove_file(machine.root.path().join("sys/class/iscsi_session/session2")).unwrap();
    let told = news(&mut keeper, 2);
    let [first, second] = &told[..] else {
        panic!("{told:?}");
    };
    assert!(
        matches!(first.outcome, SessionRecoveryOutcome::Healthy),
        "{first:?}"
    );
    assert!(
        matches!(second.outcome, SessionRecoveryOutcome::Gone),
        "{second:?}"
    );
}

#[test]
fn a_session_at_which_another_process_is_at_work_is_left_to_it() {
    let machine = Machine::new();
    machine.add(1);
    machine.lose(1);
    let asked = Arc::new(Mutex::new(None));
    let mine = Arc::clone(&asked);
    let options = SessionRecoveryOptions::new().credentials(move |name| {
        *mine.lock() = Some(name.isid());
        Ok(None)
    });
    let mut keeper = machine.engine.recover_sessions(options).unwrap();
    assert_eq!(news(&mut keeper, 1).len(), 1);
    let isid = asked.lock().take().unwrap();
    drop(keeper);
    // The other process would hold this lock.
    let lock = format!("run/lunbd/iscsi-login-{isid:?}.lock");
    let held = locked(&machine.root.path().join(lock));
    let mut keeper = machine.keeper();
    let told = keeper
        .next(Deadline::after(Duration::from_millis(500)))
        .unwrap();
    assert!(told.is_empty(), "{told:?}");
    drop(held);
    assert_eq!(news(&mut keeper, 1).len(), 1);
}
