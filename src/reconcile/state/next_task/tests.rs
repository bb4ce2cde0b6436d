use super::*;
use crate::error::ErrorKind;
use crate::reconcile::state::tests::{end, failed, id, retry_late, wanting_nbd};
use crate::reconcile::step::StepKind;

#[test]
fn a_resync_looks_at_all_once_and_tries_soon_what_failed() {
    let mut state = wanting_nbd(1);
    retry_late(&mut state);
    end(&mut state, StepKind::Attach, failed(ErrorKind::Unreachable));
    state.refresh.resync_after(Duration::ZERO);
    let task = state.next_task(None);
    assert!(matches!(task, Task::Refresh(Scope::All, 1)), "{task:?}");
    assert!(!state.refresh.until_resync().is_zero());
    let failure = state.tracked[&id(0)].failure.as_ref().unwrap();
    let pause = failure.next_try().unwrap() - Instant::now();
    assert!(pause < Duration::from_secs(60), "{pause:?}");
}
