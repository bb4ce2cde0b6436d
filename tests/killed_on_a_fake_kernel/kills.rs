//! One operation on the volume that is killed at a step, what a recovery makes of it, and the
//! repeated operation.

use std::collections::BTreeSet;
use std::fs;

use lunbd::CrashPoint;
use lunbd::engine::{Action, Condition, DetachVolume, Recovered};

use crate::rig::{Rig, open_journal, soon, volume};

/// What a recovery found and did.
pub(crate) fn outcome(recovered: &Recovered) -> (Condition, &'static str) {
    let done = match recovered.action {
        Action::Nothing => "nothing",
        Action::Finished => "finished",
        Action::Undone => "undone",
        _ => "something else",
    };
    (recovered.condition, done)
}

impl Rig {
    pub(crate) fn attach_killed_at(&mut self, step: Option<&str>) -> Vec<String> {
        let when = format!("attach at {}", step.unwrap_or("no step"));
        // The process also creates its journal.
        let _not_there = fs::remove_dir_all(self.journal());
        let ended = self.run("attach", step);
        assert!(ended.killed || ended.succeeded, "{when}");
        if ended.killed {
            let stood = !self.kernel().devices().is_empty();
            let recovered = self.recover(&when);
            // The intent is the first record, and the outcome the second.
            let expected = match (ended.records(), stood) {
                (0, _) => None,
                (1, false) => Some((Condition::Gone, "undone")),
                (1, true) => Some((Condition::HalfAttached, "finished")),
                _ => Some((Condition::Complete, "nothing")),
            };
            assert_eq!(recovered.as_ref().map(outcome), expected, "{when}");
            if recovered.and_then(|one| one.node).is_none() {
                self.require_gone(&when);
            }
        }
        self.attach(&when);
        assert_eq!(self.kernel().devices(), ["0:0:0:1"], "{when}");
        ended.steps
    }

    pub(crate) fn resize_killed_at(&mut self, all: &[String], step: Option<&str>) -> Vec<String> {
        let when = format!("resize at {}", step.unwrap_or("no step"));
        let bytes = self.grow();
        let ended = self.run("resize", step);
        assert!(ended.killed || ended.succeeded, "{when}");
        if let Some(step) = step.filter(|_| ended.killed) {
            let recovered = self.recover(&when).expect("the volume");
            if !is_before_intent(all, step) {
                assert_eq!(self.size(&recovered.node.unwrap()), bytes, "{when}");
            }
        }
        let engine = self.engine();
        let journal = open_journal(&engine, &self.journal());
        let resized = engine.resize_volume(&journal, &volume(), None, soon());
        assert_eq!(resized.unwrap().size, bytes, "{when}");
        ended.steps
    }

    pub(crate) fn detach_killed_at(&mut self, all: &[String], step: Option<&str>) -> Vec<String> {
        let when = format!("detach at {}", step.unwrap_or("no step"));
        let ended = self.run("detach", step);
        assert!(ended.killed || ended.succeeded, "{when}");
        if let Some(step) = step.filter(|_| ended.killed) {
            let stood = !self.kernel().devices().is_empty();
            let recovered = self.recover(&when);
            let expected = match (ended.records(), stood) {
                (0, _) => Some((Condition::Complete, "nothing")),
                (_, true) => Some((Condition::HalfDetached, "finished")),
                // The record is removed last, and may be gone.
                (_, false) => recovered.as_ref().map(|_| (Condition::Gone, "finished")),
            };
            assert_eq!(recovered.as_ref().map(outcome), expected, "{when}");
            if is_before_intent(all, step) {
                let recovered = recovered.expect("the volume");
                assert_eq!(recovered.condition, Condition::Complete, "{when}");
                self.detach(&DetachVolume::default(), &when);
            }
        }
        self.require_gone(&when);
        ended.steps
    }
}

/// Whether a kill at this step comes before the operation is recorded.
fn is_before_intent(steps: &[String], step: &str) -> bool {
    let position = |wanted: &str| steps.iter().position(|step| step == wanted);
    match (position(step), position("journal.renamed:1")) {
        (Some(step), Some(renamed)) => step < renamed,
        _ => false,
    }
}

/// The points of these kinds at which no run was killed.
pub(crate) fn missed(killed: &BTreeSet<String>, kinds: &[&str]) -> Vec<&'static str> {
    let points = CrashPoint::ALL.iter().map(|point| point.as_str());
    let of_kind = |point: &&str| kinds.iter().any(|kind| point.starts_with(kind));
    points
        .filter(of_kind)
        .filter(|point| !killed.contains(*point))
        .collect()
}
