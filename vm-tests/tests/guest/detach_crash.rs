//! A detach whose process is killed while it writes a path of its removed map back.

use lunbd::{DetachRequest, DetachTarget};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::crash::{Place, Run};
use vm_tests::guest::dirty_path::{DirtyPath, protect_disks};

/// Kills the agent at the step, and returns all steps that it passed.
fn killed_at(step: Option<&str>) -> Vec<String> {
    let (engine, place) = (engine(), Place::new());
    let dirty = DirtyPath::new(&engine);
    assert!(!dirty.is_stored(), "it is written back");
    protect_disks(true);
    let map = dirty.map.node();
    let nodes = [&map, &dirty.disks[1], &dirty.disks[0]];
    let node = map.display().to_string();
    let ended = Run::start(&place, "detach-device", &[node], step).end();
    assert_eq!(ended.killed, step.is_some(), "{step:?}: {ended:?}");
    let when = format!("after a kill at {step:?}");
    assert!(nodes.iter().any(|node| node.exists()), "{when} all is gone");
    // Nothing is safe before the last path is gone, and that one has lost its pages.
    for node in nodes.into_iter().filter(|node| node.exists()) {
        let detached = engine.detach(DetachTarget::Device(node.clone()), soon());
        let safe = match &detached {
            Ok(detachment) => detachment.safe_to_unmap,
            Err(failure) => failure.receipt.safe_to_unmap,
        };
        assert!(!safe, "{when} it is lost: {detached:?}");
    }
    protect_disks(false);
    for node in nodes.into_iter().filter(|node| node.exists()) {
        let abandon = DetachRequest::new(DetachTarget::Device(node.clone())).abandon_unwritten();
        let abandoned = engine.detach(abandon, soon());
        abandoned.unwrap_or_else(|failure| panic!("{when}: {failure}"));
    }
    place.require_clean(&when);
    ended.steps
}

#[test]
fn a_failed_write_beside_a_map_is_not_safe_to_unmap_after_a_kill_at_any_step_of_its_record() {
    let steps = killed_at(None);
    let steps: Vec<_> = steps
        .iter()
        .filter(|step| step.starts_with("failed-flush."))
        .collect();
    assert!(!steps.is_empty());
    for step in steps {
        killed_at(Some(step));
    }
}
