//! An agent that is killed at the steps of a login, of a logout, and of the recovery of a lost
//! session. The next agent finishes or rolls back what was begun, the data is what was written,
//! and nothing is left behind. No daemon runs. A run kills at the steps of its part: see
//! `guest::rotation`.
//!
//! The engine's `src/crash.rs` lists the steps. `own_boot_crash_mpath` kills at the steps
//! that such a volume shares with every other volume.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use lunbd::engine::{Condition, DetachVolume, SessionRecoveryOptions};
use lunbd::{Attachment, Deadline, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::crash::{Data, Place, Run, request, volume};
use vm_tests::guest::iscsi_target::IscsiTarget;
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::sessions;
use vm_tests::guest::kills::KillSweep;
use vm_tests::guest::lio::Store;
use vm_tests::guest::unwritten::LazyWriteback;

/// The limit of a step, also on a machine that is several times slower.
const PATIENCE: Duration = Duration::from_secs(120);

struct Rig {
    place: Place,
    sources: Vec<String>,
    data: Data,
    target: IscsiTarget,
}

/// The steps of each operation, or one step of each.
struct Steps<T> {
    attach: T,
    recover: T,
    detach: T,
}

impl Rig {
    fn attach(&self) -> Attachment {
        let engine = engine();
        let journal = self.place.open(&engine);
        let request = request(&self.sources);
        let attached = engine.attach_volume(&journal, &volume(), &request, soon());
        attached.unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn detach(&self) {
        let engine = engine();
        let journal = self.place.open(&engine);
        let how = DetachVolume::default();
        let detached = engine.detach_volume(&journal, &volume(), &how, soon());
        detached.unwrap_or_else(|error| panic!("{error:#}"));
    }

    #[track_caller]
    fn require_gone(&self, when: &str) {
        self.place.require_clean(when);
        // The kernel finishes what a killed process has requested, and removes the session's
        // host after the session.
        guest::wait_until("the kernel to have ended the host", PATIENCE, || {
            guest::entries("/sys/class/iscsi_host")
                .is_empty()
                .then_some(())
        });
        nothing_is_left();
        guest::wait_until("the target to have no session", PATIENCE, || {
            (self.target.sessions() == 0).then_some(())
        });
    }

    /// A login, the recovery of its session and a logout, each killed at its step.
    fn turn(&mut self, sweep: &mut KillSweep, at: &Steps<Option<&str>>) -> Steps<Vec<String>> {
        let attach = self.attach_killed_at(sweep, at.attach);
        let node = self.attach().node;
        self.data.compare(&node, "attached");
        let recover = self.recovery_killed_at(sweep, &node, at.recover);
        let detach = self.detach_killed_at(sweep, at.detach);
        Steps {
            attach,
            recover,
            detach,
        }
    }

    fn attach_killed_at(&mut self, sweep: &mut KillSweep, step: Option<&str>) -> Vec<String> {
        let when = format!("attach at {}", step.unwrap_or("no step"));
        let ended = sweep.run(&self.place, "attach", &self.sources, step);
        if ended.killed {
            let recovered = sweep.recover_attach(&self.place, &ended, &when);
            match recovered.and_then(|one| one.node) {
                Some(node) => self.data.compare(&node, &when),
                None => self.require_gone(&when),
            }
        }
        ended.steps
    }

    /// Data that is written to a lost session arrives without an error, and is there when the
    /// volume is attached again.
    fn recovery_killed_at(
        &mut self,
        sweep: &mut KillSweep,
        node: &Path,
        step: Option<&str>,
    ) -> Vec<String> {
        let when = format!("recovery at {}", step.unwrap_or("no step"));
        let [session] = &sessions()[..] else {
            panic!("{when}: {:?}", sessions());
        };
        // The kernel's timer would write the data before the session is lost.
        let lazy = LazyWriteback::start();
        let written = self.data.write_anew(node);
        self.target.cut(0);
        session.wait_until_lost(PATIENCE);
        drop(lazy);
        let written = thread::spawn(move || written.sync_all());
        let ended = sweep.run(&self.place, "recover-session", &[], step);
        let engine = engine();
        let mut keeper = engine
            .recover_sessions(SessionRecoveryOptions::new())
            .unwrap();
        let limit = Deadline::after(PATIENCE);
        while !written.is_finished() && !limit.has_passed() {
            let news = keeper.next(Deadline::after(Duration::from_millis(50)));
            println!("{when}: {:?}", news.unwrap());
        }
        assert!(written.is_finished(), "{when}: a write waits");
        let written = written.join().unwrap();
        written.unwrap_or_else(|error| panic!("{when}: {error}"));
        assert_eq!(attribute(session.id, "state"), "LOGGED_IN", "{when}");
        drop(keeper);
        if ended.killed {
            let found = sweep.recover(&self.place, &when).expect("the volume");
            assert_eq!(found.condition, Condition::Complete, "{when}");
        }
        ended.steps
    }

    /// A process that recovered the session was killed before it restarted a device that the
    /// kernel had set offline. The next recovery sets the device running.
    fn devices_run_again(&mut self, sweep: &mut KillSweep) {
        let node = self.attach().node;
        let [session] = &sessions()[..] else {
            panic!("{:?}", sessions());
        };
        let state = session.device_dir(1).join("state");
        let is = |wanted| fs::read_to_string(&state).unwrap().trim() == wanted;
        let steps = ["iscsi.to-run-device:1", "iscsi.device-runs:1"];
        let steps = sweep.select("run-device", &steps.map(str::to_owned));
        for step in [None]
            .into_iter()
            .chain(steps.iter().map(|step| Some(step.as_str())))
        {
            fs::write(&state, "offline\n").unwrap();
            assert!(is("offline"));
            let ended = sweep.run(&self.place, "run-device", &[], step);
            let runs = ended.steps.iter().any(|step| step.contains("device-runs"));
            assert!(is(if runs { "running" } else { "offline" }), "{step:?}");
            let engine = engine();
            let mut keeper = engine
                .recover_sessions(SessionRecoveryOptions::new())
                .unwrap();
            guest::wait_until("the device to run", PATIENCE, || {
                keeper
                    .next(Deadline::after(Duration::from_millis(50)))
                    .unwrap();
                is("running").then_some(())
            });
            self.data.compare(&node, "runs again");
        }
        self.detach();
        self.require_gone("devices that run again");
    }

    fn detach_killed_at(&mut self, sweep: &mut KillSweep, step: Option<&str>) -> Vec<String> {
        let when = format!("detach at {}", step.unwrap_or("no step"));
        let ended = sweep.run(&self.place, "detach", &[], step);
        if ended.killed {
            let recovered = sweep.recover(&self.place, &when);
            if let Some(found) = recovered.filter(|found| found.node.is_some()) {
                // The process was killed before it recorded the operation.
                assert_eq!(found.condition, Condition::Complete, "{when}");
                self.detach();
            }
        }
        self.require_gone(&when);
        ended.steps
    }

    /// A turn without a kill, and then as many turns as necessary.
    fn sweep(&mut self, sweep: &mut KillSweep) {
        let none = Steps {
            attach: None,
            recover: None,
            detach: None,
        };
        let all = self.turn(sweep, &none);
        let mut select = |operation: &str, steps: &[String]| {
            let tried = steps.iter().filter(|step| is_tried(step)).cloned();
            sweep.select(operation, &tried.collect::<Vec<_>>())
        };
        let attach = select("attach", &all.attach);
        let recover = select("recover-session", &all.recover);
        let detach = select("detach", &all.detach);
        let count = attach.len().max(recover.len()).max(detach.len());
        for turn in 0..count {
            let at = |steps: &'_ [String]| steps.get(turn).cloned();
            let (attach, recover, detach) = (at(&attach), at(&recover), at(&detach));
            let at = Steps {
                attach: attach.as_deref(),
                recover: recover.as_deref(),
                detach: detach.as_deref(),
            };
            self.turn(sweep, &at);
        }
    }
}

/// The steps of iSCSI, and those of the locks for a login and for the end of a session. Of the
/// settings, those that name a session, and one for all others.
fn is_tried(step: &str) -> bool {
    let (point, pass) = step.split_once(':').unwrap();
    match point {
        "iscsi.to-set" | "iscsi.set" => pass.parse::<u32>().unwrap() <= 6,
        _ => point.starts_with("iscsi.") || point.starts_with("device-lock."),
    }
}

#[test]
fn a_volume_with_a_login_is_whole_or_gone_after_a_kill_at_each_step_of_this_runs_part() {
    guest::sweep_time_limit();
    iscsi_tcp::prepare();
    assert!(!iscsi_tcp::iscsid_runs());
    let mut target = IscsiTarget::new("iqn.2026-01.example:crash");
    target.map(1, &Store::file("c1", 8 << 20));
    let mut rig = Rig {
        place: Place::new(),
        sources: vec![target.uri(&[0], 1)],
        data: Data::default(),
        target,
    };
    let mut sweep = KillSweep::new("iSCSI", &["iscsi.", "device-lock."]);
    let node = rig.attach().node;
    rig.data.write_anew(&node).sync_all().unwrap();
    rig.detach();
    rig.sweep(&mut sweep);
    rig.devices_run_again(&mut sweep);
    sweep.conclude(&["iscsi"]);
}

#[test]
fn a_logout_whose_process_was_killed_is_finished_by_the_next_detach_also_without_a_journal() {
    iscsi_tcp::prepare();
    let mut target = IscsiTarget::new("iqn.2026-01.example:crash");
    target.map(1, &Store::ramdisk("c2", 8 << 20));
    let (engine, place) = (engine(), Place::new());
    let sources = [target.uri(&[0], 1)];
    for step in [
        "iscsi.unbound:1",
        "iscsi.stopped:1",
        "iscsi.connection-destroyed:1",
    ] {
        engine.attach(&request(&sources), soon()).unwrap();
        let [session] = &sessions()[..] else {
            panic!("{:?}", sessions());
        };
        assert!(
            Run::start(&place, "detach-source", &sources, Some(step))
                .end()
                .killed
        );
        assert_eq!(sessions().len(), 1, "{step}");
        let source: Source = sources[0].parse().unwrap();
        let detachment = engine.detach(source, soon()).unwrap();
        let ended: Vec<u32> = detachment.logged_out.iter().map(|id| id.0).collect();
        assert_eq!(ended, [session.id], "{step}");
        nothing_is_left();
    }
}
