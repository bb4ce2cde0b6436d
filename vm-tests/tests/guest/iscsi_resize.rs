//! Units that grow on the array, over iSCSI sessions.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use lunbd::engine::{Multipath, ResizeRequest};
use lunbd::error::Stage;
use lunbd::{AttachRequest, Attachment, DetachTarget, Engine, ErrorKind, Source};
use serde_json::Value;
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Session, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};

const IQN: &str = "iqn.2026-01.example:resize";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn over(target: &IscsiTarget, portals: &[usize]) -> Source {
    target.uri(portals, 2).parse().unwrap()
}

fn size_of(disk: &str) -> u64 {
    let sectors = fs::read_to_string(format!("/sys/block/{disk}/size")).unwrap();
    sectors.trim().parse::<u64>().unwrap() * 512
}

fn two_paths(target: &IscsiTarget, engine: &Engine) -> Attachment {
    let request = AttachRequest::new(over(target, &[0, 1]))
        .min_paths(2)
        .multipath(Multipath::Require);
    engine.attach(&request, soon()).unwrap()
}

/// A mounted ext4 file system with a file in it.
struct Filesystem<'a>(&'a Path);

impl<'a> Filesystem<'a> {
    const AT: &'static str = "/tmp/resized";
    const TEXT: &'static str = "written before it grew";

    fn make(node: &'a Path) -> Self {
        guest::run(&["mkfs.ext4", "-q", "-F", node.to_str().unwrap()]);
        fs::create_dir_all(Self::AT).unwrap();
        guest::run(&["mount", "-t", "ext4", node.to_str().unwrap(), Self::AT]);
        fs::write(format!("{}/before", Self::AT), Self::TEXT).unwrap();
        Self(node)
    }

    /// Grows the mounted file system, and writes more than it had room for.
    fn grows_and_takes(&self, bytes: u64) {
        guest::run(&["resize2fs", self.0.to_str().unwrap()]);
        let at = |name| format!("{}/{name}", Self::AT);
        fs::write(at("after"), vec![0x3c; usize::try_from(bytes).unwrap()]).unwrap();
        assert_eq!(fs::read_to_string(at("before")).unwrap(), Self::TEXT);
    }
}

impl Drop for Filesystem<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(Self::AT).status();
    }
}

#[test]
fn a_grown_unit_with_one_path_shows_its_size_by_the_command_and_its_mounted_ext4_grows() {
    let engine = engine();
    let store = Store::growable("a1", 16 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(2, &store);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let source = over(&target, &[0]);
    let attachment = engine
        .attach(&AttachRequest::new(source.clone()), soon())
        .unwrap();
    let disk = session.disk(2).unwrap();
    let filesystem = Filesystem::make(&attachment.node);

    let resize = |more: &[&str]| {
        let source = source.to_string();
        let output = guest::lunbd(&[&["resize", &source, "--json"], more].concat());
        let told = if output.status.success() {
            output.stdout
        } else {
            output.stderr
        };
        (
            output.status.code(),
            serde_json::from_slice::<Value>(&told).unwrap(),
        )
    };
    let (code, told) = resize(&[]);
    assert_eq!((code, &told["changed"]), (Some(0), &Value::from(false)));
    let (code, told) = resize(&["--at-least", &(32 * MIB).to_string()]);
    assert_ne!(code, Some(0));
    assert_eq!(told["kind"], "not_ready", "{told}");
    // udev asks too, after a process has written to the disk.
    guest::udevd::settle();
    store.grow(32 * MIB);
    assert_eq!(size_of(&disk), 16 * MIB, "nobody has asked yet");
    let (code, told) = resize(&["--at-least", &(32 * MIB).to_string()]);
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(told["changed"], true);
    assert_eq!(told["old_size"], 16 * MIB);
    assert_eq!(told["size"], 32 * MIB);
    assert_eq!(told["node"], attachment.node.to_str().unwrap());
    assert_eq!(told["map"], Value::Null);
    assert_eq!(told["paths"].as_array().unwrap().len(), 1);
    assert_eq!(size_of(&disk), 32 * MIB);
    filesystem.grows_and_takes(18 * MIB);
    drop(filesystem);
    assert!(engine.detach(source, soon()).unwrap().safe_to_unmap);
}

fn state_of(session: &Session) -> String {
    let state = fs::read_to_string(session.device_dir(2).join("state"));
    state.unwrap_or_default().trim().to_owned()
}

/// A map of two paths with a mounted ext4 must grow. It cannot while one path is in `state`,
/// and grows when the path is back.
fn a_map_grows_when_both_its_paths_do(state: &str, without_multipathd: bool) {
    let engine = engine();
    let store = Store::growable("b1", 16 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(2, &store);
    let iscsid = Iscsid::start();
    // The path is blocked during the whole look, or only for a short time.
    let fast_io_fail = if state == "blocked" { 120 } else { 5 };
    let mut multipathd = Multipathd::start_with(NoPath::Fail, fast_io_fail);
    let sessions = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));
    let attachment = two_paths(&target, &engine);
    let map = multipathd::maps().pop().unwrap();
    let filesystem = Filesystem::make(&attachment.node);
    if without_multipathd {
        multipathd.stop();
    }
    let [_, second] = &sessions;
    target.portal_down(1);
    guest::wait_until(state, LIMIT, || (state_of(second) == state).then_some(()));
    store.grow(32 * MIB);
    // The request names the source of one path: the unit's name finds the other.
    let request = ResizeRequest::new(over(&target, &[0])).at_least(32 * MIB);
    let error = engine.resize(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady);
    assert_eq!(error.stage(), Some(Stage::Rescan));
    let dead = attachment.paths()[1].hctl.to_string();
    assert!(error.to_string().contains(&dead), "{error}");
    assert_eq!(size_of(&map), 16 * MIB, "{error}");

    target.portal_up(1);
    second.wait_for_state("LOGGED_IN", LIMIT);
    let resized = engine.resize(&request, soon()).unwrap();
    assert!(resized.changed);
    assert_eq!((resized.old_size, resized.size), (16 * MIB, 32 * MIB));
    assert_eq!(resized.node, attachment.node);
    assert_eq!(resized.paths.len(), 2);
    assert!(resized.map.is_some());
    for session in &sessions {
        assert_eq!(size_of(&session.disk(2).unwrap()), 32 * MIB);
    }
    assert_eq!(size_of(&map), 32 * MIB);
    let again = engine.resize(&request, soon()).unwrap();
    assert!(!again.changed && again.old_size == 32 * MIB, "{again:?}");
    filesystem.grows_and_takes(18 * MIB);
    drop(filesystem);
    let detachment = engine.detach(over(&target, &[0]), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
}

#[test]
fn a_map_keeps_its_size_while_the_io_of_a_path_waits_and_grows_with_both_paths() {
    a_map_grows_when_both_its_paths_do("blocked", false);
}

#[test]
fn without_multipathd_a_map_keeps_its_size_while_a_path_is_dead_and_grows_with_both_paths() {
    a_map_grows_when_both_its_paths_do("transport-offline", true);
}

#[test]
fn a_resize_reports_a_smaller_size_and_refuses_an_absent_or_unexpected_unit() {
    let engine = engine();
    let store = Store::growable("d1", 32 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(2, &store);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let request = ResizeRequest::new(over(&target, &[0]));
    let error = engine.resize(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let name = format!("unit:{}", store.wwid());
    let name = name.parse::<DetachTarget>().unwrap();
    let error = engine
        .resize(&ResizeRequest::new(name), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);

    engine
        .attach(&AttachRequest::new(over(&target, &[0])), soon())
        .unwrap();
    let other = "naa.60014050000000000000000000000000".parse().unwrap();
    let error = engine.resize(&request.clone().expect(other), soon());
    assert_eq!(error.unwrap_err().kind(), ErrorKind::IdentityMismatch);
    store.grow(16 * MIB);
    let at_least = request.clone().at_least(32 * MIB);
    let error = engine.resize(&at_least, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady);
    assert!(error.to_string().contains("33554432"), "{error}");
    let before = size_of(&session.disk(2).unwrap());
    assert_eq!(before, 32 * MIB, "the refused resize shrank it");
    store.grow(8 * MIB);
    let resized = engine.resize(&request, soon()).unwrap();
    assert!(resized.changed, "{resized:?}");
    assert_eq!(resized.size, 8 * MIB);
    assert_eq!(size_of(&session.disk(2).unwrap()), 8 * MIB);
    engine.detach(over(&target, &[0]), soon()).unwrap();
}

#[test]
fn a_map_keeps_its_size_after_its_paths_shrink_until_multipathd_applies_the_new_size() {
    let engine = engine();
    let store = Store::growable("e1", 32 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(2, &store);
    let iscsid = Iscsid::start();
    let mut multipathd = Multipathd::start(NoPath::Fail);
    let _sessions = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));
    let attachment = two_paths(&target, &engine);
    let map = multipathd::maps().pop().unwrap();
    multipathd.stop();
    store.grow(16 * MIB);
    let request = ResizeRequest::new(over(&target, &[0, 1]));
    let error = engine.resize(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains(&map), "{error}");
    assert_eq!(size_of(&map), 32 * MIB);
    // multipathd gives the map the size of its paths when it starts.
    multipathd.start_again();
    assert_eq!(engine.resize(&request, soon()).unwrap().size, 16 * MIB);
    assert_eq!(size_of(&map), 16 * MIB);
    store.grow(12 * MIB);
    let resized = engine.resize(&request, soon()).unwrap();
    assert_eq!((resized.old_size, resized.size), (16 * MIB, 12 * MIB));
    assert!(resized.changed, "{resized:?}");
    assert_eq!(size_of(&map), 12 * MIB);

    // The first path no longer belongs to the map; the other paths lead to it.
    let first = attachment.paths()[0].node.file_name().unwrap();
    let first = first.to_str().unwrap();
    guest::wait_until("multipathd to forget the first path", LIMIT, || {
        let _said = multipathd.ask(&format!("del path {first}"));
        (!multipathd.knows(first) && multipathd::map_of(first).is_none()).then_some(())
    });
    store.grow(24 * MIB);
    let resized = engine.resize(&request, soon()).unwrap();
    assert!(resized.map.is_some(), "{resized:?}");
    assert_eq!(size_of(&map), 24 * MIB);
    engine.detach(over(&target, &[0, 1]), soon()).unwrap();
}
