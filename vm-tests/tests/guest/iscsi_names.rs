//! Targets whose names contain capital letters.

use lunbd::iscsi::{DiscoveryOptions, SessionOptions, discover};
use lunbd::{AttachRequest, Source};
use vm_tests::guest::agent::{engine, session_of, soon, writes_and_reads};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::INITIATOR;
use vm_tests::guest::served::Served;
use vm_tests::guest::tgt::Tgt;

const IQN: &str = "iqn.2000-01.com.Example:Box.Target-1.5A";

#[test]
fn a_target_whose_name_has_capitals_is_found_attached_and_detached() {
    has_capitals::<IscsiTarget>();
}

#[test]
fn of_tgt_a_target_whose_name_has_capitals_is_found_attached_and_detached() {
    has_capitals::<Tgt>();
}

fn has_capitals<T: Served>() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = T::serve(IQN, &[1], 8 << 20);
    let ask = DiscoveryOptions::new(INITIATOR.parse().unwrap());
    let found = discover(&PORTALS[0].parse().unwrap(), &ask, soon()).unwrap();
    let names = found.targets.iter();
    let names: Vec<_> = names.map(|target| target.iqn.to_string()).collect();
    assert_eq!(names, [IQN]);

    let source: Source = target.uri(&[0], 1).parse().unwrap();
    let options = SessionOptions::new(INITIATOR.parse().unwrap());
    let request = AttachRequest::new(source.clone()).log_in(options.clone());
    let attachment = engine.attach(&request, soon()).unwrap();
    let session = session_of(&attachment);
    assert_eq!(attribute(session, "targetname"), IQN);
    writes_and_reads(&attachment);

    // Another spelling of the same name finds the session.
    let other: Source = source.to_string().to_lowercase().parse().unwrap();
    let request = AttachRequest::new(other.clone()).log_in(options);
    let again = engine.attach(&request, soon()).unwrap();
    assert_eq!((session_of(&again), again.changed), (session, false));
    let detachment = engine.detach(other, soon()).unwrap();
    let ended: Vec<_> = detachment.logged_out.iter().map(|id| id.0).collect();
    assert_eq!(ended, [session]);
    nothing_is_left();
}
