use super::*;
use crate::id::NbdIndex;
use crate::reconcile::job::Outcome;
use crate::reconcile::state::tests::{
    end, id, nbd_status, refresh, request, take, unit_status, wanting, wanting_nbd,
};

#[test]
fn a_volume_that_lacks_a_path_is_looked_at_when_a_transport_may_be_back() {
    for is_missing in [false, true] {
        for change in [
            ChangeEvent::Transport { host: None },
            ChangeEvent::HostOrSession,
        ] {
            let mut state = wanting([request("scsi:2:0:0:1")]);
            refresh(&mut state, unit_status(is_missing));
            assert!(!state.refresh.is_wanted());
            state.handle_change(&change);
            assert_eq!(state.refresh.is_wanted(), is_missing, "{change:?}");
        }
    }
}

#[test]
fn the_transports_are_looked_at_after_the_event_of_a_session() {
    let mut state = wanting([]);
    assert!(state.transports.due().is_none());
    state.handle_change(&ChangeEvent::HostOrSession);
    assert!(state.transports.due().is_some());
}

#[test]
fn a_volume_is_attached_again_although_its_last_link_died() {
    let mut state = wanting_nbd(1);
    let attached = || Outcome::Attached(Box::new(nbd_status(0)));
    end(&mut state, StepKind::Attach, attached());
    let index = NbdIndex::new(0).unwrap();
    state.handle_change(&ChangeEvent::LinkDead(index));
    let mut gone = nbd_status(0);
    (gone.node, gone.condition) = (None, Condition::Gone);
    refresh(&mut state, gone);
    end(&mut state, StepKind::Attach, attached());
    assert!(state.attached(&id(0)).is_some());
}

#[test]
fn after_a_step_only_the_removal_of_its_device_is_looked_at() {
    let mut state = wanting_nbd(1);
    let attach = take(&mut state, StepKind::Attach);
    let mut status = nbd_status(0);
    status.condition = Condition::HalfAttached;
    state.set_status(status);
    let devpath = "/devices/virtual/block/nbd0".to_owned();
    for removed in [false, true] {
        let devpath = devpath.clone();
        state.handle_change(&ChangeEvent::Device { devpath, removed });
        // The step itself causes events.
        assert!(!state.refresh.is_wanted());
    }
    let attached = Outcome::Attached(Box::new(nbd_status(0)));
    state.end_step(attach, attached);
    assert!(state.refresh.is_wanted(), "its device went away meanwhile");
}

#[test]
fn a_device_whose_death_may_have_been_missed_is_asked() {
    let mut state = wanting_nbd(1);
    let attached = Outcome::Attached(Box::new(nbd_status(0)));
    end(&mut state, StepKind::Attach, attached);
    state.handle_change(&ChangeEvent::LinkNoticesLost);
    assert!(state.attached(&id(0)).is_none());
    take(&mut state, StepKind::Verify);
    // A unit has no link whose death is reported only once.
    let mut state = wanting([request("scsi:2:0:0:1")]);
    let attached = Outcome::Attached(Box::new(unit_status(false)));
    end(&mut state, StepKind::Attach, attached);
    state.handle_change(&ChangeEvent::LinkNoticesLost);
    assert!(state.attached(&id(0)).is_some());
}
