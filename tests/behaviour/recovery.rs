//! Volumes that are not as the journal says, and the result of their recovery.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lunbd::engine::journal::Record;
use lunbd::engine::{Action, Condition, DetachVolume, Journal, Recovered};
use lunbd::id::VolumeId;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};

use super::machine::{Machine, delete, device_dir, devices, scan, soon, unit, write_attribute};

/// A journal on a machine, with one volume.
struct Node<M: Machine> {
    machine: Arc<M>,
    engine: Arc<Engine>,
    journal: Option<Journal>,
    source: Source,
}

fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

impl<M: Machine> Node<M> {
    fn on(machine: Arc<M>) -> Self {
        let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
        let journal = engine.open_journal_at(&machine.journal(), soon()).unwrap();
        Self {
            machine,
            engine,
            journal: Some(journal),
            source,
        }
    }

    fn journal(&self) -> &Journal {
        self.journal.as_ref().unwrap()
    }

    fn attach(&self) -> Attachment {
        let request = AttachRequest::new(self.source.clone());
        let attached = self
            .engine
            .attach_volume(self.journal(), &volume(), &request, soon());
        attached.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// What a recovery by the engine of the journal finds and does.
    fn recover(&self) -> Recovered {
        let recovery = self.engine.recover(self.journal(), soon()).unwrap();
        let [recovered] = <[Recovered; 1]>::try_from(recovery.volumes).expect("one volume");
        recovered
    }

    fn detach(self) {
        let how = DetachVolume::default();
        let detached = self
            .engine
            .detach_volume(self.journal(), &volume(), &how, soon());
        assert!(detached.unwrap().changed);
        assert_eq!(self.journal().records(), []);
        let left = devices(&*self.machine, &self.engine);
        assert_eq!(left, [] as [&str; 0]);
    }

    /// The path of the volume's record.
    fn record(&self) -> PathBuf {
        self.machine.journal().join("pvc-1.json")
    }
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

pub(crate) fn a_unit_that_is_another_device_now_is_changed_and_left_alone<M: Machine>() {
    let node = Node::on(M::with(1, 4));
    let attached = node.attach();
    if attached.diskseq.is_none() {
        node.detach();
        M::skip("one life of a disk cannot be told from the next before 5.15");
    }
    node.machine.settle();
    // Another process deletes the device and scans it again, without the engine.
    delete(&node.engine, &node.source);
    is(&node.recover(), Condition::Gone, "nothing");
    scan(&node.engine, &node.source);
    node.machine.settle();
    let changed = node.recover();
    is(&changed, Condition::Changed, "nothing");
    assert_eq!(changed.node, None);
    node.attach();
    is(&node.recover(), Condition::Complete, "nothing");
    node.detach();
}

pub(crate) fn a_unit_whose_paths_are_silent_is_left_alone_until_they_answer<M: Machine>() {
    let node = Node::on(M::with(1, 4));
    node.attach();
    node.machine.settle();
    let state = device_dir(&node.engine, &node.source).join("state");
    write_attribute(&node.engine, &state, "offline\n");
    is(&node.recover(), Condition::LinkDead, "nothing");
    write_attribute(&node.engine, &state, "running\n");
    is(&node.recover(), Condition::Complete, "nothing");
    node.detach();
}

fn read(record: &Path) -> serde_json::Value {
    let text = fs::read_to_string(record).unwrap();
    let (_, body) = text.split_once('\n').unwrap();
    serde_json::from_str(body).unwrap()
}

pub(crate) fn a_resize_is_written_down_and_one_that_was_begun_is_finished<M: Machine>() {
    let mut node = Node::on(M::with(1, 4));
    let attached = node.attach();
    let bytes = node.machine.grow();
    let resized = node
        .engine
        .resize_volume(node.journal(), &volume(), None, soon());
    assert_eq!(resized.unwrap().size, bytes);
    assert!(bytes > attached.size);
    let mut record = read(&node.record());
    assert_eq!(record["outcome"]["size"], bytes);
    assert!(record["intent"].is_null());

    // A process that is killed after it wrote its intent leaves this record.
    record["intent"] = serde_json::json!({
        "operation": { "resize": { "at_least": null } }, "begun_at": "2026-11-21T03:00:00Z",
    });
    node.journal = None;
    let body = serde_json::to_vec(&record).unwrap();
    fs::write(node.record(), Record::seal(&body)).unwrap();
    let larger = node.machine.grow();
    assert!(larger > bytes);
    node.engine = node.machine.engine();
    let journal = node.engine.open_journal_at(&node.machine.journal(), soon());
    node.journal = Some(journal.unwrap());
    is(&node.recover(), Condition::HalfAttached, "finished");
    assert_eq!(read(&node.record())["outcome"]["size"], larger);
    is(&node.recover(), Condition::Complete, "nothing");
    node.detach();
}

pub(crate) fn a_second_volume_whose_path_leads_to_the_first_ones_unit_is_taken_down_again<
    M: Machine,
>() {
    let node = Node::on(M::with_two_paths());
    let first = node.attach();
    let other_path = unit(node.machine.hosts()[1], 1);
    let second: VolumeId = "pvc-2".parse().unwrap();
    let request = AttachRequest::new(other_path);
    let refused = node
        .engine
        .attach_volume(node.journal(), &second, &request, soon());
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let text = error.to_string();
    assert!(text.contains("pvc-1") && text.contains("pvc-2"), "{text}");
    assert_eq!(devices(&*node.machine, &node.engine).len(), 1);
    assert!(node.journal().record(&second).is_none());
    let whole = node.recover();
    is(&whole, Condition::Complete, "nothing");
    assert_eq!(whole.node, Some(first.node));
    node.detach();
}
