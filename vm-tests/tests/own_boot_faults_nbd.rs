//! Each write to sysfs, each netlink command and each ioctl of an attach and of a
//! detach fails once in every way, and once never returns: the error names the
//! stage, what stands is said, and the next try succeeds.
//!
//! The program under test is the command as users have it. See
//! `guest::inject` for how a call is taken away from it.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test panics to fail"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use vm_tests::guest::agent::unit;
use vm_tests::guest::crash::Place;
use vm_tests::guest::inject::{self, Fault, Traced};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, ScsiDebug};

const FAULTS: [Fault; 5] = [
    Fault::Fails(Errno::EIO),
    Fault::Fails(Errno::EBUSY),
    Fault::Fails(Errno::ENODEV),
    Fault::Fails(Errno::ETIMEDOUT),
    Fault::Hangs,
];

/// A caller's patience where something hangs, and where nothing should.
const SHORT: &str = "10s";
const LONG: &str = "60s";

/// What a slow machine may take.
const LIMIT: Duration = Duration::from_secs(38 * 60);

/// One volume and how to see whether it stands.
struct Rig<'a> {
    place: Place,
    source: String,
    stands: Box<dyn Fn() -> bool + 'a>,
}

#[derive(Default)]
struct Tally {
    injected: usize,
    /// How each came out.
    outcomes: BTreeMap<String, usize>,
    acts: BTreeSet<String>,
}

impl Rig<'_> {
    fn arguments<'a>(&'a self, operation: &'a str, timeout: &'a str) -> Vec<&'a str> {
        let journal = self.place.path().to_str().unwrap();
        let mut arguments = vec![operation];
        if operation == "attach" {
            arguments.push(&self.source);
        }
        arguments.extend(["--volume", "pvc-1", "--journal", journal]);
        arguments.extend(["--timeout", timeout]);
        arguments
    }

    /// The acts of one that nothing happens to.
    fn acts(&self, operation: &str) -> Vec<String> {
        let traced = inject::run(&self.arguments(operation, LONG), None);
        assert_eq!(traced.code, Some(0), "{operation}: {traced:?}");
        traced.acts
    }

    fn succeeds(&self, operation: &str, more: &[&str], after: &str) {
        let done = guest::lunbd(&[&self.arguments(operation, LONG), more].concat());
        assert!(done.status.success(), "{operation} after {after}: {done:?}");
    }

    fn is_known(&self) -> bool {
        self.place.path().join("pvc-1.json").exists()
    }

    fn sweep(&self, tally: &mut Tally) {
        let attach = self.acts("attach");
        let detach = self.acts("detach");
        println!("acts of an attach: {attach:?}\nof a detach: {detach:?}");
        for (operation, acts) in [("attach", attach), ("detach", detach)] {
            for (turn, act) in acts.iter().enumerate() {
                let one = turn % FAULTS.len();
                let faults = if guest::sweeps_are_whole() {
                    &FAULTS[..]
                } else {
                    &FAULTS[one..=one]
                };
                for &fault in faults {
                    if operation == "detach" {
                        self.succeeds("attach", &[], "the last");
                    }
                    self.one(operation, act, fault, tally);
                }
            }
        }
    }

    /// One fault, and the next try.
    fn one(&self, operation: &str, act: &str, fault: Fault, tally: &mut Tally) {
        let when = format!("{operation}, {act}, {fault:?}");
        let timeout = if fault == Fault::Hangs { SHORT } else { LONG };
        let traced = inject::run(&self.arguments(operation, timeout), Some((act, fault)));
        let Traced { code, said, .. } = &traced;
        let stage = traced.stage().unwrap_or("none");
        let seconds = traced.took.as_secs_f64();
        println!("{when}: exit {code:?}, stage {stage}, {seconds:.1} s: {said}");
        assert!(
            traced.took < Duration::from_secs(90),
            "{when}: it hung with its call"
        );
        let code = code.unwrap_or_else(|| panic!("{when}: it was killed"));
        if traced.injected {
            tally.injected += 1;
            tally.acts.insert(format!("{operation} {act}"));
            let outcome = if code == 0 {
                "succeeded all the same"
            } else {
                "failed with its stage"
            };
            *tally.outcomes.entry(outcome.to_owned()).or_default() += 1;
        }
        let (stands, known) = ((self.stands)(), self.is_known());
        match (operation, code) {
            ("attach", 0) => assert!(stands && known, "{when}: {stands} {known}"),
            ("detach", 0) => assert!(!stands && !known, "{when}: {stands} {known}"),
            _ => {
                assert_ne!(stage, "none", "{when}: {said}");
                // What stands is in the journal, for the next try or a recovery.
                assert!(known || !stands, "{when}: it stands and nobody knows");
                if operation == "attach" && code != 6 {
                    let said_to_stand = said["last_seen"].is_string();
                    assert!(!stands || said_to_stand, "{when}: it stands: {said}");
                }
            }
        }
        if operation == "attach" {
            self.succeeds("attach", &[], &when);
        }
        if stage == "flush" && code != 6 {
            // What a second flush would prove is nothing.
            let again = guest::lunbd(&self.arguments("detach", LONG));
            let said = String::from_utf8_lossy(&again.stderr);
            assert!(said.contains("an earlier flush"), "{when}: {said}");
            self.succeeds("detach", &["--abandon-unwritten"], &when);
        } else if self.is_known() {
            self.succeeds("detach", &[], &when);
        }
        assert!(!(self.stands)(), "{when}: it stands");
        self.place.require_clean(&when);
    }
}

fn conclude(what: &str, tally: &Tally, begun: Instant) {
    guest::tell(&format!(
        "{what}: {} faults in {} acts in {} s: {:?}",
        tally.injected,
        tally.acts.len(),
        begun.elapsed().as_secs(),
        tally.outcomes
    ));
    // All but a few, which do not come in every run.
    let each = if guest::sweeps_are_whole() {
        FAULTS.len()
    } else {
        1
    };
    assert!(tally.injected >= tally.acts.len() * each * 9 / 10);
}

#[test]
fn each_call_of_a_scsi_attach_and_detach_fails_once_in_every_way() {
    guest::time_limit(LIMIT);
    let begun = Instant::now();
    let target = ScsiDebug::with_luns(2);
    let rig = Rig {
        place: Place::new(),
        source: unit(&target, 1).to_string(),
        stands: Box::new(|| !target.devices().is_empty()),
    };
    let mut tally = Tally::default();
    rig.sweep(&mut tally);
    for act in [
        "attach write scan:1",
        "detach write delete:1",
        "detach fsync:1",
    ] {
        assert!(tally.acts.contains(act), "{act}: {:?}", tally.acts);
    }
    conclude("SCSI", &tally, begun);
}

#[test]
fn each_call_of_an_nbd_attach_and_detach_fails_once_in_every_way() {
    if guest::kernel() < (5, 14) {
        guest::skip("the kernel keeps no backend ids before 5.14");
    }
    guest::time_limit(LIMIT);
    let begun = Instant::now();
    let _module = NbdModule::load(2);
    let store = Store::sparse(8 << 20);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let connected = || {
        let mut names = guest::entries("/sys/block").into_iter();
        names.any(|name| Path::new("/sys/block").join(name).join("pid").exists())
    };
    let rig = Rig {
        place: Place::new(),
        source: server.uri("disk"),
        stands: Box::new(connected),
    };
    let mut tally = Tally::default();
    rig.sweep(&mut tally);
    for act in ["attach netlink command 1:1", "detach netlink command 2:1"] {
        assert!(tally.acts.contains(act), "{act}: {:?}", tally.acts);
    }
    conclude("NBD", &tally, begun);
}
