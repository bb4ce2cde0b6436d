//! Volumes that are kept as wanted over sessions of our own, without a daemon. An agent logs in
//! and is killed, which leaves the sessions up, and the next agent logs out of them.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lunbd::engine::Condition;
use lunbd::engine::journal::Record;
use lunbd::id::VolumeId;
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Attachment, Engine, Source};
use serde_json::{Value, json};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::iscsi_target::IscsiTarget;
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, sessions};
use vm_tests::guest::lio::Store;

const IQN: &str = "iqn.2026-01.example:reconcile";
const USER: (&str, &str) = ("asker", "the-askers-own-secret");
const MIB: u64 = 1 << 20;
/// The limit of a wait, also on a machine that is several times slower.
const LIMIT: Duration = Duration::from_secs(240);

/// The files of an agent.
struct Place(Directory);

impl Place {
    fn new() -> Self {
        iscsi_tcp::prepare();
        assert!(!iscsi_tcp::iscsid_runs());
        Self(Directory::new("iscsi-node"))
    }

    fn journal(&self) -> PathBuf {
        self.0.join("journal")
    }

    /// The bytes of every file of the journal.
    fn files(&self) -> Vec<String> {
        let files = guest::entries(self.journal());
        let read = |name| fs::read_to_string(self.journal().join(name));
        files
            .into_iter()
            .filter_map(|name| read(name).ok())
            .collect()
    }

    fn record(&self) -> Option<Value> {
        let text = fs::read_to_string(self.journal().join("pvc-1.json")).ok()?;
        let (_, body) = text.split_once('\n').unwrap();
        let record: Value = serde_json::from_str(body).unwrap();
        record.get("detached").is_none().then_some(record)
    }

    /// Writes a record that the next process finds.
    fn put(&self, record: &Value) {
        let body = serde_json::to_vec(record).unwrap();
        fs::write(self.journal().join("pvc-1.json"), Record::seal(&body)).unwrap();
    }

    fn want(&self, volumes: &Value) -> Agent {
        let file = self.0.join("desired.json");
        fs::write(&file, json!({ "volume": volumes }).to_string()).unwrap();
        let mut said = OpenOptions::new();
        let said = said.append(true).create(true).open(self.said()).unwrap();
        let agent = Command::new("agent")
            .args([file, self.journal()])
            .stdin(Stdio::null())
            .stdout(said)
            .spawn()
            .unwrap();
        Agent(agent)
    }

    fn secrets(&self) -> PathBuf {
        self.0.join("chap")
    }

    /// Wants LUN 1 of a target that requires a secret.
    fn want_with_chap(&self, target: &mut IscsiTarget) -> Agent {
        target.ask_for_chap(USER, None);
        let (user, secret) = USER;
        fs::write(self.secrets(), format!("user={user}\nsecret={secret}\n")).unwrap();
        self.want(&json!([{
            "id": "pvc-1", "source": target.uri(&[0], 1),
            "log_in": { "chap_file": self.secrets() },
        }]))
    }

    fn said(&self) -> PathBuf {
        self.0.join("said")
    }

    /// The events about sessions that its agents have printed.
    fn said_of_sessions(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.said()).unwrap_or_default();
        // The last line may be incomplete.
        let events = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        events
            .filter(|event: &Value| event["event"] == "session")
            .collect()
    }
}

/// A process that is killed on drop, not stopped.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _reaped_already = self.0.wait();
    }
}

fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

#[test]
fn a_volume_with_a_login_outlives_its_agent_and_the_next_agent_detaches_it_and_logs_out() {
    let place = Place::new();
    let store = Store::ramdisk("d1", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let agent = place.want_with_chap(&mut target);
    let record = guest::wait_until("the volume to be attached", LIMIT, || {
        let record = place.record()?;
        (record["intent"].is_null() && !record["outcome"].is_null()).then_some(record)
    });
    drop(agent);
    let [session] = &sessions()[..] else {
        panic!("{:?}", sessions());
    };
    let is = |name| attribute(session.id, name);
    assert_eq!((&*is("creator"), &*is("ifacename")), ("-1", "lunbd"));
    assert_eq!(is("initiatorname"), INITIATOR);
    // The device needs no process.
    let node = record["outcome"]["node"].as_str().unwrap();
    File::open(node).unwrap().read_exact(&mut [0; 512]).unwrap();
    let kept = &record["spec"]["log_in"]["credentials"]["file"];
    assert_eq!(kept.as_str().map(Path::new), Some(&*place.secrets()));
    let (user, secret) = USER;
    for text in place.files() {
        assert!(!text.contains(secret) && !text.contains(user), "{text}");
    }

    let agent = place.want(&json!([]));
    guest::wait_until("the volume to be gone", LIMIT, || {
        place.record().is_none().then_some(())
    });
    drop(agent);
    nothing_is_left();
    assert_eq!(
        guest::agent::journal_files(&place.journal()),
        [] as [&str; 0]
    );
}

#[test]
fn portals_that_are_added_and_put_in_another_order_leave_a_volume_that_is_in_use() {
    let place = Place::new();
    let store = Store::ramdisk("d5", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let attached_from = |portals: &[usize]| {
        let source = target.uri(portals, 1);
        let agent = place.want(&json!([{ "id": "pvc-1", "source": source, "log_in": {} }]));
        let record = guest::wait_until(&format!("{source} to be attached"), LIMIT, || {
            let record = place.record()?;
            let is_done = record["intent"].is_null() && !record["outcome"].is_null();
            (is_done && record["spec"]["sources"][0] == *source).then_some(record)
        });
        drop(agent);
        let outcome = &record["outcome"];
        (outcome["node"].clone(), outcome["devno"].clone())
    };
    let first = attached_from(&[0]);
    let in_use = File::options()
        .read(true)
        .custom_flags(nix::libc::O_EXCL)
        .open(first.0.as_str().unwrap())
        .unwrap();
    for (portals, count) in [(&[1, 0][..], 2), (&[0, 1], 2), (&[2, 0], 3)] {
        assert_eq!(attached_from(portals), first, "{portals:?}");
        assert_eq!(sessions().len(), count, "{portals:?}");
    }
    drop(in_use);
    // The detach also removes the path of a portal that is no longer wanted.
    let agent = place.want(&json!([]));
    guest::wait_until("the volume to be gone", LIMIT, || {
        place.record().is_none().then_some(())
    });
    drop(agent);
    nothing_is_left();
}

#[test]
fn the_agent_recovers_a_cut_session_and_so_does_the_next_agent_before_it_detaches() {
    let place = Place::new();
    let store = Store::ramdisk("d4", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let agent = place.want_with_chap(&mut target);
    let node = guest::wait_until("the volume to be attached", LIMIT, || {
        let record = place.record()?;
        let node = record["outcome"]["node"].as_str()?.to_owned();
        record["intent"].is_null().then_some(node)
    });
    let recovered = || {
        let mut said = place.said_of_sessions();
        said.retain(|event| event["outcome"] == "recovered");
        said.len()
    };
    let before = recovered();
    target.cut(0);
    guest::wait_until("the session to be had back", LIMIT, || {
        (recovered() > before).then_some(())
    });
    // The exclusive open makes the disk a disk in use.
    let claim = nix::libc::O_EXCL;
    let disk = File::options().read(true).custom_flags(claim).open(node);
    let mut disk = disk.unwrap();
    disk.read_exact(&mut [0; 512]).unwrap();

    drop(agent);
    let before = recovered();
    target.cut(0);
    // Only the journal still has the login of the session.
    let agent = place.want(&json!([]));
    guest::wait_until("the session to be had back again", LIMIT, || {
        (recovered() > before).then_some(())
    });
    disk.seek(SeekFrom::Start(MIB)).unwrap();
    disk.read_exact(&mut [0; 512]).unwrap();
    drop((agent, disk));
    let agent = place.want(&json!([]));
    guest::wait_until("the volume to be gone", LIMIT, || {
        place.record().is_none().then_some(())
    });
    drop(agent);
    nothing_is_left();
}

/// Attaches a volume with a login, and then removes its device without the engine: the session
/// stays.
fn leave_a_session(engine: &Engine, place: &Place, target: &IscsiTarget) -> Attachment {
    let journal = engine.open_journal_at(&place.journal(), soon()).unwrap();
    let source: Source = target.uri(&[0], 1).parse().unwrap();
    let options = SessionOptions::new(INITIATOR.parse().unwrap());
    let request = AttachRequest::new(source).log_in(options);
    let attachment = engine
        .attach_volume(&journal, &volume(), &request, soon())
        .unwrap();
    let device = attachment.hctl().unwrap().to_string();
    fs::write(format!("/sys/bus/scsi/devices/{device}/delete"), "1").unwrap();
    assert_eq!(sessions().len(), 1);
    attachment
}

#[test]
fn a_session_that_a_killed_process_left_without_a_device_is_logged_out_by_recovery() {
    let place = Place::new();
    let store = Store::ramdisk("d2", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let engine = engine();
    let attach = json!("attach");
    let detach = json!({ "detach": { "abandon_unwritten": false } });
    // Three points: between the login and the scan, without and with an expected unit from the
    // caller; and between the delete and the logout.
    for (operation, expect, is_known) in [
        (&attach, false, false),
        (&attach, true, false),
        (&detach, false, true),
    ] {
        leave_a_session(&engine, &place, &target);
        let mut record = place.record().unwrap();
        record["intent"] = json!({ "operation": operation, "begun_at": "2026-11-21T03:00:00Z" });
        if expect {
            record["spec"]["expect"] = store.wwid().into();
        }
        if !is_known {
            record["outcome"] = Value::Null;
        }
        place.put(&record);
        let journal = engine.open_journal_at(&place.journal(), soon()).unwrap();
        let recovery = engine.recover(&journal, soon()).unwrap();
        let [found] = recovery.volumes.as_slice() else {
            panic!("{recovery:?}");
        };
        println!("{operation}, {expect}: {found:?}");
        assert_eq!(found.condition, Condition::Gone);
        assert!(recovery.is_whole(), "{recovery:?}");
        assert_eq!(journal.records(), []);
        nothing_is_left();
    }
}

#[test]
fn the_detach_of_a_volume_without_a_device_logs_out_of_its_session() {
    let place = Place::new();
    let store = Store::ramdisk("d3", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let engine = engine();
    leave_a_session(&engine, &place, &target);
    let [session] = &sessions()[..] else {
        panic!("{:?}", sessions());
    };
    let journal = engine.open_journal_at(&place.journal(), soon()).unwrap();
    let how = lunbd::engine::DetachVolume::default();
    let detachment = engine
        .detach_volume(&journal, &volume(), &how, soon())
        .unwrap();
    let ended: Vec<u32> = detachment.logged_out.iter().map(|id| id.0).collect();
    assert_eq!(ended, [session.id]);
    nothing_is_left();
}
