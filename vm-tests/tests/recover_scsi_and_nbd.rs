//! An agent that dies between what it meant to do and what it could say of it:
//! the next one finds out from the kernel and the journal.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test panics to fail"
)]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lunbd::engine::journal::Record;
use lunbd::engine::{Action, Condition, DetachVolume, Journal, NbdOptions, Recovered};
use lunbd::error::Stage;
use lunbd::id::VolumeId;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};
use nix::fcntl::{Flock, FlockArg};
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

    /// The one record there is, as it is on the disk.
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

    /// Recovers with an engine that knows nothing of what was before.
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

    /// No record, no file beside it, no lease.
    fn is_clean(&self) {
        assert_eq!(guest::entries(&self.0), ["journal.lock"]);
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

/// A process that is killed, not ended.
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

fn attach(engine: &Engine, journal: &Journal, source: Source) -> Attachment {
    let request = AttachRequest::new(source);
    engine
        .attach_volume(journal, &volume(), &request, soon())
        .unwrap()
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

#[test]
fn the_command_attaches_recovers_and_detaches_a_volume_and_leaves_no_record() {
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
    assert_eq!(again.status.code(), Some(3), "{again:?}");
    assert!(guest::lunbd(&["detach", &other]).status.success());
}

#[test]
fn an_attach_that_was_killed_before_its_outcome_is_finished() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    // It cannot have settled, so it cannot have come to its outcome.
    let held = udevd::stopped();
    let agent = place.start(&["attach", &unit(&target, 1).to_string()]);
    let disk = guest::wait_until("the disk", LIMIT, || target.disk(1));
    drop(agent);
    drop(held);
    let record = place.record().unwrap();
    assert_eq!(record["intent"]["operation"], "attach");
    assert!(record["outcome"].is_null(), "{record}");

    let recovered = place.recover();
    is(&recovered, Condition::HalfAttached, "finished");
    assert_eq!(recovered.node, Some(Path::new("/dev").join(&disk)));
    is(&place.recover(), Condition::Complete, "nothing");
    assert!(place.record().unwrap()["intent"].is_null());
    place.detach();
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn an_attach_that_was_killed_before_its_scan_is_undone() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    let source = unit(&target, 1).to_string();
    let name = source.replacen(':', "-", 1);
    let address = held_lease(&name);
    let agent = place.start(&["attach", &source]);
    guest::wait_until("the intent", LIMIT, || place.record());
    drop(agent);
    drop(address);
    is(&place.recover(), Condition::Gone, "undone");
    place.is_clean();
    assert_eq!(target.devices(), [] as [&str; 0]);
}

/// What the engine waits for at stage `lock`, held by this process.
struct HeldLease {
    path: String,
    _file: Flock<File>,
}

fn held_lease(name: &str) -> HeldLease {
    fs::create_dir_all(LEASES).unwrap();
    let path = format!("{LEASES}/{name}.lock");
    let file = File::create(&path).unwrap();
    let file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno);
    HeldLease {
        path,
        _file: file.unwrap(),
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        let _gone_already = fs::remove_file(&self.path);
    }
}

#[test]
fn a_detach_that_was_killed_is_finished_by_the_units_name() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    let attached = {
        let engine = engine();
        attach(&engine, &place.open(&engine), unit(&target, 1))
    };
    let name = attached.identity().unwrap().wwid().unwrap().to_string();
    let lease = held_lease(&format!("unit-{}", name.replace('.', "-")));
    let agent = place.start(&["detach"]);
    let begun = || place.record().filter(|record| !record["intent"].is_null());
    guest::wait_until("the intent", LIMIT, begun);
    drop(agent);
    drop(lease);
    assert!(target.disk(1).is_some());
    is(&place.recover(), Condition::HalfDetached, "finished");
    place.is_clean();
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn a_detach_that_was_killed_after_its_delete_is_proven() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    {
        let engine = engine();
        attach(&engine, &place.open(&engine), unit(&target, 1));
    }
    let held = udevd::stopped();
    let agent = place.start(&["detach"]);
    guest::wait_until("the delete", LIMIT, || {
        target.devices().is_empty().then_some(())
    });
    drop(agent);
    drop(held);
    assert!(!place.record().unwrap()["intent"].is_null());
    is(&place.recover(), Condition::Gone, "finished");
    place.is_clean();
}

#[test]
fn a_detach_that_is_refused_leaves_the_volume_attached_and_is_not_finished_later() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    let engine = engine();
    let journal = place.open(&engine);
    let attached = attach(&engine, &journal, unit(&target, 1));
    let node = attached.node.to_str().unwrap();
    guest::run(&["mkswap", node]);
    guest::run(&["swapon", node]);
    let how = DetachVolume::default();
    let refused = engine
        .detach_volume(&journal, &volume(), &how, soon())
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InUse, "{refused}");
    guest::run(&["swapoff", node]);
    drop(journal);
    is(&place.recover(), Condition::Complete, "nothing");
    assert!(target.disk(1).is_some());
    place.detach();
}

#[test]
fn a_unit_that_is_another_device_now_is_changed_and_left_alone() {
    if guest::kernel() < (5, 15) {
        guest::skip("one life of a disk cannot be told from the next before 5.15");
    }
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    let engine = engine();
    let journal = place.open(&engine);
    attach(&engine, &journal, unit(&target, 1));
    // Somebody takes it away and brings it again, past us.
    fs::write(target.device_dir(1).join("delete"), "1").unwrap();
    let gone = engine.recover(&journal, soon()).unwrap();
    is(&gone.volumes[0], Condition::Gone, "nothing");
    target.scan("0 0 1");
    target.wait_for_disk(1);
    udevd::settle();
    let changed = engine.recover(&journal, soon()).unwrap();
    is(&changed.volumes[0], Condition::Changed, "nothing");
    assert_eq!(changed.volumes[0].node, None);
    attach(&engine, &journal, unit(&target, 1));
    let whole = engine.recover(&journal, soon()).unwrap();
    is(&whole.volumes[0], Condition::Complete, "nothing");
    drop(journal);
    place.detach();
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn a_unit_whose_paths_are_silent_is_left_alone_until_they_answer() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    let engine = engine();
    let journal = place.open(&engine);
    attach(&engine, &journal, unit(&target, 1));
    let state = target.device_dir(1).join("state");
    fs::write(&state, "offline\n").unwrap();
    let silent = engine.recover(&journal, soon()).unwrap();
    is(&silent.volumes[0], Condition::LinkDead, "nothing");
    fs::write(&state, "running\n").unwrap();
    let whole = engine.recover(&journal, soon()).unwrap();
    is(&whole.volumes[0], Condition::Complete, "nothing");
    drop(journal);
    place.detach();
}

#[test]
fn a_resize_is_written_down_and_one_that_was_begun_is_finished() {
    let target = ScsiDebug::with_luns(4);
    let place = Place::new();
    let engine = engine();
    let journal = place.open(&engine);
    let attached = attach(&engine, &journal, unit(&target, 1));
    target.set("virtual_gb", 1);
    let resized = engine
        .resize_volume(&journal, &volume(), None, soon())
        .unwrap();
    assert!(resized.size > attached.size);
    let size = |place: &Place| place.record().unwrap()["outcome"]["size"].clone();
    assert_eq!(size(&place), resized.size);
    drop(journal);

    let mut record = place.record().unwrap();
    assert!(record["intent"].is_null());
    record["intent"] = serde_json::json!({
        "operation": { "resize": { "at_least": null } }, "begun_at": "2026-11-21T03:00:00Z",
    });
    let body = serde_json::to_vec(&record).unwrap();
    fs::write(place.0.join("pvc-1.json"), Record::seal(&body)).unwrap();
    target.set("virtual_gb", 2);
    is(&place.recover(), Condition::HalfAttached, "finished");
    assert!(size(&place).as_u64().unwrap() > resized.size);
    is(&place.recover(), Condition::Complete, "nothing");
    place.detach();
}

#[test]
fn a_second_volume_that_turns_out_to_be_the_same_unit_is_refused_and_taken_down_again() {
    let target = ScsiDebug::options().luns(2).paths(2).load();
    let place = Place::new();
    let engine = engine();
    let journal = place.open(&engine);
    let first = attach(&engine, &journal, unit(&target, 1));
    let other_path: Source = format!("scsi:{}:0:0:1", target.hosts()[1]).parse().unwrap();
    let second: VolumeId = "pvc-2".parse().unwrap();
    let request = AttachRequest::new(other_path);
    let error = engine
        .attach_volume(&journal, &second, &request, soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let text = error.to_string();
    assert!(text.contains("pvc-1") && text.contains("pvc-2"), "{text}");
    assert_eq!(target.devices().len(), 1);
    assert!(journal.record(&second).is_none());
    let whole = engine.recover(&journal, soon()).unwrap();
    is(&whole.volumes[0], Condition::Complete, "nothing");
    assert_eq!(whole.volumes[0].node, Some(first.node));
    drop(journal);
    place.detach();
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
    let refused = engine.attach_volume(&journal, &volume(), &request, soon());
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
    assert_eq!(devices, [] as [&str; 0]);
    assert_eq!(left, ["journal.lock"]);
    attached.unwrap();
    detached.unwrap();
}

#[test]
fn an_nbd_volume_is_finished_healed_and_detached_after_kills_of_agent_and_server() {
    if guest::kernel() < (5, 14) {
        guest::skip("the kernel keeps no backend ids before 5.14");
    }
    let _module = NbdModule::load(2);
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
    is(&place.recover(), Condition::LinkDead, "healed");
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
    if guest::kernel() < (5, 14) {
        guest::skip("the kernel keeps no backend ids before 5.14");
    }
    let _module = NbdModule::load(2);
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
    // It is held by the dead process until its other threads have ended.
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
    is(&place.recover(), Condition::LinkDead, "healed");
    agent.0.wait().unwrap();
    place.detach();
}

/// What the kernel gives a scan's INQUIRY, in seconds.
const INQUIRY_LIMIT: &str = "/sys/module/scsi_mod/parameters/inq_timeout";

#[test]
fn an_agent_that_is_killed_in_its_scan_lets_go_of_its_journal_and_what_comes_of_it_is_undone() {
    let target = ScsiDebug::with_luns(2);
    let place = Place::new();
    let limit = fs::read_to_string(INQUIRY_LIMIT).unwrap();
    fs::write(INQUIRY_LIMIT, "45").unwrap();
    // Every command is swallowed (SDEBUG_OPT_TIMEOUT).
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
    // Whether it asked the unit again, or gave it up, is the kernel's affair.
    is(&recovered, Condition::Gone, "undone");
    agent.0.wait().unwrap();
    place.is_clean();
    assert_eq!(target.devices(), [] as [&str; 0]);
}
