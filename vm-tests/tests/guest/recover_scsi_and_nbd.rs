//! An agent that dies after it recorded its intent and before it recorded the outcome: the next
//! one reads the state from the kernel and the journal.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lunbd::engine::{
    Action, Condition, DetachVolume, Journal, NbdOptions, Recovered, StageObserver,
};
use lunbd::error::Stage;
use lunbd::id::VolumeId;
use lunbd::{AttachRequest, Engine, ErrorKind, Source};
use nix::mount::{MsFlags, mount, umount};
use serde_json::Value;
use vm_tests::guest::agent::{engine, soon, unit};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, ScsiDebug, udevd};

const LIMIT: Duration = Duration::from_secs(60);
const LEASES: &str = "/run/lunbd";

/// A journal of one test; removed on drop.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        guest::enter();
        let path = format!("/tmp/journal-{}", std::process::id());
        let _not_there = fs::remove_dir_all(&path);
        Self(PathBuf::from(path))
    }

    fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn open(&self, engine: &Engine) -> Journal {
        engine.open_journal_at(&self.0, soon()).unwrap()
    }

    /// The only record, as it is on the disk.
    fn record(&self) -> Option<Value> {
        let text = fs::read_to_string(self.0.join("pvc-1.json")).ok()?;
        let (_, body) = text.split_once('\n')?;
        serde_json::from_str(body).ok()
    }

    /// Starts the command on the volume `pvc-1` of this journal.
    fn start(&self, arguments: &[&str]) -> Agent {
        let child = Command::new("lunbd")
            .args(arguments)
            .args(["--volume", "pvc-1", "--journal", self.text()])
            .args(["--timeout", "5m"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Agent(child)
    }

    /// Recovers with a new engine without any earlier knowledge.
    fn recover(&self) -> Recovered {
        self.recover_by(soon())
    }

    fn recover_by(&self, deadline: lunbd::Deadline) -> Recovered {
        let engine = engine();
        let recovery = engine.recover(&self.open(&engine), deadline).unwrap();
        assert_eq!(recovery.problems, []);
        let [recovered] = <[Recovered; 1]>::try_from(recovery.volumes).expect("one volume");
        recovered
    }

    fn detach(&self) {
        let engine = engine();
        let journal = self.open(&engine);
        let how = DetachVolume::default();
        let detached = engine
            .detach_volume(&journal, &volume(), &how, soon())
            .unwrap();
        assert!(detached.changed);
        self.is_clean();
    }

    /// Panics unless there is no record, no file beside it and no lock file.
    fn is_clean(&self) {
        assert_eq!(guest::agent::journal_files(&self.0), [] as [&str; 0]);
        let mut leases = guest::entries(LEASES);
        leases.retain(|name| Path::new(name).extension() == Some("lock".as_ref()));
        assert_eq!(leases, [] as [&str; 0]);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _gone_already = fs::remove_dir_all(&self.0);
    }
}

/// A process that is killed on drop, not stopped.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

#[track_caller]
fn is(recovered: &Recovered, condition: Condition, action: &str) {
    assert_eq!(recovered.condition, condition, "{recovered:?}");
    let done = match recovered.action {
        Action::Nothing => "nothing",
        Action::Finished => "finished",
        Action::Undone => "undone",
        Action::Healed => "healed",
        _ => "failed",
    };
    assert_eq!(done, action, "{recovered:?}");
}

/// Recovers until the link is healed: a recovery gives a server five seconds. If this time
/// ends after the kernel has taken the connection, the next recovery finds a whole volume.
fn heals(place: &Place) {
    let mut may_be_taken = false;
    let recovered = guest::wait_until("a recovery that heals", LIMIT, || {
        let recovered = place.recover();
        let Action::Failed(error) = &recovered.action else {
            return Some(recovered);
        };
        may_be_taken |= recovered.condition == Condition::LinkDead
            && error.kind() == ErrorKind::TimedOut
            && error.stage() == Some(Stage::Reconfigure);
        None
    });
    if may_be_taken && recovered.condition == Condition::Complete {
        is(&recovered, Condition::Complete, "nothing");
    } else {
        is(&recovered, Condition::LinkDead, "healed");
    }
}

#[test]
fn the_command_attaches_recovers_and_detaches_a_volume_and_a_second_time_too() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    let journal = ["--journal", place.text()];
    let of_volume = ["--volume", "../a/b", "--json"];
    let source = unit(&target, 1).to_string();
    let attached = guest::lunbd(&[&["attach", &source][..], &of_volume, &journal].concat());
    assert!(attached.status.success(), "{attached:?}");
    let attached: Value = serde_json::from_slice(&attached.stdout).unwrap();
    assert!(place.0.join("%2E.%2Fa%2Fb.json").is_file());

    let other = unit(&target, 2).to_string();
    assert!(guest::lunbd(&["attach", &other]).status.success());
    let recovered = guest::lunbd(&[&["recover", "--json"][..], &journal].concat());
    assert!(recovered.status.success(), "{recovered:?}");
    let recovered: Value = serde_json::from_slice(&recovered.stdout).unwrap();
    assert_eq!(recovered["volumes"][0]["volume"], "../a/b");
    assert_eq!(recovered["volumes"][0]["condition"], "complete");
    assert_eq!(recovered["volumes"][0]["action"], "nothing");
    assert_eq!(recovered["volumes"][0]["node"], attached["node"]);
    assert_eq!(recovered["foreign"][0]["device"], other);
    let told = guest::lunbd(&[&["recover"][..], &journal].concat());
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(
        told.contains("../a/b: attached") && told.contains("foreign"),
        "{told}"
    );

    let detached = guest::lunbd(&[&["detach"][..], &of_volume, &journal].concat());
    assert!(detached.status.success(), "{detached:?}");
    place.is_clean();
    assert!(target.disk(1).is_none() && target.disk(2).is_some());
    let again = guest::lunbd(&[&["detach"][..], &of_volume, &journal].concat());
    assert!(again.status.success(), "{again:?}");
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    let first: Value = serde_json::from_slice(&detached.stdout).unwrap();
    assert_eq!(again["changed"], false);
    assert_eq!(again["safe_to_unmap"], first["safe_to_unmap"]);
    assert!(guest::lunbd(&["detach", &other]).status.success());
}

#[test]
fn a_full_disk_under_the_journal_refuses_before_anything_is_scanned() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    fs::create_dir_all(&place.0).unwrap();
    let size = Some("size=16k");
    mount(
        Some("none"),
        &place.0,
        Some("tmpfs"),
        MsFlags::empty(),
        size,
    )
    .unwrap();
    let engine = engine();
    let journal = place.open(&engine);
    let filler = place.0.join("filler");
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&filler)
        .unwrap();
    let full = loop {
        if let Err(error) = file.write_all(&[0; 4096]) {
            break error;
        }
    };
    assert_eq!(full.raw_os_error(), Some(nix::libc::ENOSPC));
    drop(file);
    let request = AttachRequest::new(unit(&target, 1));
    let stages = Arc::new(Mutex::new(Vec::new()));
    let entered = Arc::clone(&stages);
    let observer = StageObserver::new(move |stage| entered.lock().unwrap().push(stage));
    let noted = request.clone().observe(observer);
    let refused = engine.attach_volume(&journal, &volume(), &noted, soon());
    let devices = target.devices();
    fs::remove_file(&filler).unwrap();
    let left = guest::entries(&place.0);
    let attached = engine.attach_volume(&journal, &volume(), &request, soon());
    let detached = engine.detach_volume(&journal, &volume(), &DetachVolume::default(), soon());
    drop(journal);
    guest::wait_until("nothing of the journal to be open", LIMIT, || {
        umount(&place.0).ok()
    });
    let error = refused.unwrap_err();
    assert_eq!(error.errno(), Some(nix::libc::ENOSPC), "{error}");
    assert_eq!(error.stage(), Some(Stage::Journal), "{error}");
    let stages = stages.lock().unwrap();
    assert!(!stages.contains(&Stage::Scan), "{stages:?}");
    assert_eq!(devices, [] as [&str; 0]);
    assert_eq!(left, ["journal.lock"]);
    attached.unwrap();
    detached.unwrap();
}

#[test]
fn an_nbd_volume_is_finished_healed_and_detached_after_kills_of_agent_and_server() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(8 << 20);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let uri = server.uri("disk");
    let place = Place::new();
    let held = udevd::stopped();
    let agent = place.start(&["attach", &uri, "--io-timeout", "5s"]);
    guest::wait_until("the connect", LIMIT, || {
        fs::read_to_string("/sys/block/nbd0/backend")
            .ok()
            .filter(|id| id.trim() == uri)
    });
    drop(agent);
    drop(held);
    assert!(place.record().unwrap()["outcome"].is_null());
    let recovered = place.recover();
    is(&recovered, Condition::HalfAttached, "finished");
    assert_eq!(recovered.node, Some(PathBuf::from("/dev/nbd0")));
    is(&place.recover(), Condition::Complete, "nothing");

    server.kill();
    is(&place.recover(), Condition::LinkDead, "failed");
    server.start();
    heals(&place);
    is(&place.recover(), Condition::Complete, "nothing");
    place.detach();
}

/// Whether a thread of the process is in this function of the kernel.
fn is_in(pid: u32, function: &str) -> bool {
    let threads = format!("/proc/{pid}/task");
    guest::entries(&threads).iter().any(|thread| {
        let stack = fs::read_to_string(format!("{threads}/{thread}/stack"));
        stack.is_ok_and(|stack| stack.contains(function))
    })
}

#[test]
fn an_agent_that_is_killed_while_its_flush_waits_for_a_dead_server_lets_go_of_its_journal() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(8 << 20);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let place = Place::new();
    let source: Source = server.uri("disk").parse().unwrap();
    let patient = NbdOptions::default().dead_connection_timeout(Duration::from_secs(600));
    {
        let engine = engine();
        let request = AttachRequest::new(source).nbd(patient);
        let attached = engine.attach_volume(&place.open(&engine), &volume(), &request, soon());
        attached.unwrap();
    }
    server.kill();
    let mut agent = place.start(&["detach"]);
    let pid = agent.0.id();
    guest::wait_until("a flush that waits", LIMIT, || {
        is_in(pid, "blkdev_fsync").then_some(())
    });
    agent.0.kill().unwrap();
    // The dead process holds the journal until its other threads have ended.
    let next = engine();
    guest::wait_until("the journal", LIMIT, || {
        next.open_journal_at(&place.0, soon()).ok().map(drop)
    });
    assert!(agent.0.try_wait().unwrap().is_none(), "the flush is over");
    let recovered = place.recover();
    is(&recovered, Condition::HalfDetached, "failed");
    let Action::Failed(error) = &recovered.action else {
        unreachable!();
    };
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let holder = format!("process {pid} (lunbd)");
    assert!(error.to_string().contains(&holder), "{error}");
    server.start();
    heals(&place);
    agent.0.wait().unwrap();
    place.detach();
}

/// The kernel's timeout of a scan's INQUIRY, in seconds.
const INQUIRY_LIMIT: &str = "/sys/module/scsi_mod/parameters/inq_timeout";

#[test]
fn an_agent_killed_in_its_scan_releases_its_journal_and_the_recovery_rolls_its_device_back() {
    let target = ScsiDebug::with_luns(2);
    let place = Place::new();
    let limit = fs::read_to_string(INQUIRY_LIMIT).unwrap();
    fs::write(INQUIRY_LIMIT, "45").unwrap();
    // The target swallows every command (SDEBUG_OPT_TIMEOUT).
    target.set("every_nth", -1);
    target.set("opts", 4);
    let mut agent = place.start(&["attach", &unit(&target, 1).to_string()]);
    let pid = agent.0.id();
    guest::wait_until("a scan that waits", LIMIT, || {
        is_in(pid, "scsi_probe_and_add_lun").then_some(())
    });
    agent.0.kill().unwrap();
    let next = engine();
    guest::wait_until("the journal", LIMIT, || {
        next.open_journal_at(&place.0, soon()).ok().map(drop)
    });
    assert!(agent.0.try_wait().unwrap().is_none(), "the scan is over");
    let recovered = std::thread::scope(|scope| {
        let recovering = scope.spawn(|| {
            let patient = lunbd::Deadline::after(Duration::from_secs(180));
            place.recover_by(patient)
        });
        guest::wait_until("the undoing", LIMIT, || {
            let record = place.record()?;
            let undoes = &record["intent"]["operation"]["detach"];
            undoes.is_object().then_some(())
        });
        assert!(agent.0.try_wait().unwrap().is_none(), "the scan is over");
        target.set("opts", 0);
        target.set("every_nth", 0);
        recovering.join().unwrap()
    });
    fs::write(INQUIRY_LIMIT, limit).unwrap();
    assert!(
        !is_in(pid, "scsi_probe_and_add_lun"),
        "it was not waited for"
    );
    // The kernel decides whether it asks the unit again or gives up.
    is(&recovered, Condition::Gone, "undone");
    agent.0.wait().unwrap();
    place.is_clean();
    assert_eq!(target.devices(), [] as [&str; 0]);
}
