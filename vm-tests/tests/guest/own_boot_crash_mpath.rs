//! An agent that is killed at the steps of its work, one step per process. The next agent
//! finishes or rolls back what was begun, the data is what was written, and nothing is left
//! behind.
//!
//! The engine's `src/crash.rs` lists the steps. A first process passes all of them and records
//! them. Then each step of this run's part has its kill, at every pass. Five runs with
//! consecutive seeds kill at each step that `guest::kills` selects.

use std::fs;
use std::path::Path;

use lunbd::engine::{Condition, DetachVolume, Unit};
use lunbd::{Attachment, ErrorKind};
use vm_tests::guest::agent::{engine, soon, unit};
use vm_tests::guest::crash::{Data, Place, Run, request, volume};
use vm_tests::guest::kills::{KillSweep, is_before_intent};
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};
use vm_tests::guest::{self, ScsiDebug};

/// A volume and the target below it.
struct Rig {
    place: Place,
    sources: Vec<String>,
    /// The unit's name, once it is known.
    name: Option<String>,
    data: Data,
    target: ScsiDebug,
    gigabytes: u64,
    multipathd: Option<Multipathd>,
}

/// The steps of each operation.
#[derive(Default, Clone)]
struct Steps {
    attach: Vec<String>,
    /// The steps of an attach that adds a lost path again.
    retake: Vec<String>,
    resize: Vec<String>,
    detach: Vec<String>,
}

impl Rig {
    /// Writes the first data, and learns the unit's name.
    fn begin(&mut self) {
        let attached = self.attach();
        let Unit::Scsi { identity, .. } = &attached.unit else {
            panic!("{attached:?}");
        };
        self.name = identity.wwid().map(ToString::to_string);
        assert!(self.name.is_some(), "{attached:?}");
        let disk = self.data.write_anew(&attached.node);
        disk.sync_all().unwrap();
        drop(disk);
        self.detach(&DetachVolume::default());
    }

    /// The agent's arguments: each source, and the expected unit.
    fn wanted(&self) -> Vec<String> {
        self.sources.iter().chain(&self.name).cloned().collect()
    }

    fn attach(&self) -> Attachment {
        let engine = engine();
        let journal = self.place.open(&engine);
        let request = request(&self.wanted());
        let attached = engine.attach_volume(&journal, &volume(), &request, soon());
        attached.unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn resize(&self) -> u64 {
        let engine = engine();
        let journal = self.place.open(&engine);
        let resized = engine.resize_volume(&journal, &volume(), None, soon());
        resized.unwrap_or_else(|error| panic!("{error:#}")).size
    }

    fn detach(&self, how: &DetachVolume) {
        let engine = engine();
        let journal = self.place.open(&engine);
        match engine.detach_volume(&journal, &volume(), how, soon()) {
            Ok(_) => {}
            Err(failure) if failure.kind() == ErrorKind::NotFound => {}
            Err(failure) => panic!("{failure:#}"),
        }
    }

    #[track_caller]
    fn require_gone(&self, when: &str) {
        assert_eq!(self.target.devices(), [] as [&str; 0], "{when}");
        assert_eq!(multipathd::maps(), [] as [&str; 0], "{when}");
        self.place.require_clean(when);
    }

    fn grow(&mut self) -> u64 {
        self.gigabytes += 1;
        self.target.set("virtual_gb", self.gigabytes);
        self.gigabytes << 30
    }

    /// An attach, another one that adds a lost path again, a resize and a detach, each killed
    /// at its step. A resize that is `alone` has no multipathd.
    fn turn(
        &mut self,
        sweep: &mut KillSweep,
        all: &Steps,
        at: &[Option<&String>; 4],
        alone: bool,
    ) -> Steps {
        let [attach, retake, resize, detach] = at.map(|step| step.map(String::as_str));
        let mut passed = Steps {
            attach: self.attach_killed_at(sweep, attach),
            ..Steps::default()
        };
        let node = self.attach().node;
        self.data.compare(&node, "attached");
        let mut written = Some(self.data.write_anew(&node));
        if self.multipathd.is_some() {
            // A map that is open cannot be removed.
            written.take().unwrap().sync_all().unwrap();
        }
        if let Some(lost) = self.sources.get(1).cloned() {
            passed.retake = self.retake_killed_at(sweep, &lost, &node, retake);
        }
        if let Some(multipathd) = self.multipathd.as_mut().filter(|_| alone) {
            multipathd.stop();
        }
        passed.resize = self.resize_killed_at(sweep, &all.resize, resize);
        if let Some(multipathd) = self.multipathd.as_mut().filter(|_| alone) {
            multipathd.start_again();
        }
        self.data.compare(&node, "resized");
        if self.multipathd.is_some() {
            multipathd::make_a_partition(&node);
        }
        passed.detach = self.detach_killed_at(sweep, &all.detach, detach);
        drop(written);
        passed
    }

    fn attach_killed_at(&mut self, sweep: &mut KillSweep, step: Option<&str>) -> Vec<String> {
        let when = format!("attach at {}", step.unwrap_or("no step"));
        let ended = sweep.run(&self.place, "attach", &self.wanted(), step);
        if ended.killed {
            let recovered = sweep.recover_attach(&self.place, &ended, &when);
            match recovered.and_then(|one| one.node) {
                Some(node) => self.data.compare(&node, &when),
                None => self.require_gone(&when),
            }
        }
        ended.steps
    }

    fn retake_killed_at(
        &mut self,
        sweep: &mut KillSweep,
        lost: &str,
        node: &Path,
        step: Option<&str>,
    ) -> Vec<String> {
        let when = format!("retake at {}", step.unwrap_or("no step"));
        let hctl = lost.strip_prefix("scsi:").unwrap();
        fs::write(format!("/sys/bus/scsi/devices/{hctl}/delete"), "1").unwrap();
        let ended = sweep.run(&self.place, "retake", &self.wanted(), step);
        if ended.killed {
            let recovered = sweep.recover(&self.place, &when).expect("the volume");
            assert_eq!(recovered.node.as_deref(), Some(node), "{when}");
            self.data.compare(node, &when);
        }
        assert_eq!(self.attach().node, node, "{when}");
        assert_eq!(self.target.devices().len(), 2, "{when}");
        self.data.compare(node, &when);
        ended.steps
    }

    fn resize_killed_at(
        &mut self,
        sweep: &mut KillSweep,
        all: &[String],
        step: Option<&str>,
    ) -> Vec<String> {
        let when = format!("resize at {}", step.unwrap_or("no step"));
        let size = self.grow();
        let ended = sweep.run(&self.place, "resize", &[], step);
        if ended.killed {
            let recovered = sweep.recover(&self.place, &when).expect("the volume");
            let node = recovered.node.expect("its node");
            if !is_before_intent(all, step.unwrap_or_default()) {
                assert_eq!(size_of(&node), size, "{when}");
            }
        }
        assert_eq!(self.resize(), size, "{when}");
        ended.steps
    }

    fn detach_killed_at(
        &mut self,
        sweep: &mut KillSweep,
        all: &[String],
        step: Option<&str>,
    ) -> Vec<String> {
        let when = format!("detach at {}", step.unwrap_or("no step"));
        let ended = sweep.run(&self.place, "detach", &[], step);
        if ended.killed {
            let recovered = sweep.recover(&self.place, &when);
            if is_before_intent(all, step.unwrap_or_default()) {
                let recovered = recovered.expect("the volume");
                assert_eq!(recovered.condition, Condition::Complete, "{when}");
                self.detach(&DetachVolume::default());
            }
        }
        self.require_gone(&when);
        ended.steps
    }

    /// A turn without a kill, and then as many turns as necessary.
    fn sweep(&mut self, sweep: &mut KillSweep) {
        let all = self.turn(sweep, &Steps::default(), &[None; 4], false);
        let mut alone = Steps::default();
        if self.multipathd.is_some() {
            alone = self.turn(sweep, &alone, &[None; 4], true);
        }
        let mut select = |operation: &str, steps: &[String]| sweep.select(operation, steps);
        let attach = select("attach", &all.attach);
        let retake = select("retake", &all.retake);
        let resize = select("resize", &all.resize);
        let resize_alone = select("resize without multipathd", &alone.resize);
        let detach = select("detach", &all.detach);
        let resizes = resize.len() + resize_alone.len();
        let most = [attach.len(), retake.len(), resizes, detach.len()];
        for turn in 0..most.into_iter().max().unwrap_or_default() {
            let (attach, detach) = (attach.get(turn), detach.get(turn));
            let retake = retake.get(turn);
            let alone_at = turn.checked_sub(resize.len());
            if let Some(at) = alone_at.and_then(|at| resize_alone.get(at)) {
                self.turn(sweep, &alone, &[attach, retake, Some(at), detach], true);
            } else {
                let at = [attach, retake, resize.get(turn), detach];
                self.turn(sweep, &all, &at, false);
            }
        }
    }
}

fn size_of(node: &Path) -> u64 {
    let name = node.canonicalize().unwrap();
    let name = name.file_name().unwrap().to_str().unwrap().to_owned();
    let sectors = fs::read_to_string(format!("/sys/block/{name}/size")).unwrap();
    sectors.trim().parse::<u64>().unwrap() * 512
}

#[test]
fn a_scsi_volume_is_whole_or_gone_after_a_kill_at_each_step_of_this_runs_part() {
    guest::sweep_time_limit();
    let target = ScsiDebug::with_luns(2);
    let mut sweep = KillSweep::new("SCSI", &["block.", "scsi."]);
    let mut rig = Rig {
        place: Place::new(),
        sources: vec![unit(&target, 1).to_string()],
        name: None,
        data: Data::default(),
        target,
        gigabytes: 0,
        multipathd: None,
    };
    rig.begin();
    rig.sweep(&mut sweep);
    sweep.conclude(&["block", "scsi"]);
}

#[test]
fn a_multipath_volume_is_whole_or_gone_after_a_kill_at_each_step_of_this_runs_part() {
    guest::sweep_time_limit();
    let multipathd = Multipathd::start_mapping_every_disk(NoPath::Fail);
    let (target, sources) = ScsiDebug::two_paths();
    let mut sweep = KillSweep::new(
        "multipath",
        &["block.", "failed-flush.", "multipath.", "scsi."],
    );
    let mut rig = Rig {
        place: Place::new(),
        sources,
        name: None,
        data: Data::default(),
        target,
        gigabytes: 0,
        multipathd: Some(multipathd),
    };
    rig.begin();
    rig.sweep(&mut sweep);
    rig.multipathd = None;
    rig.multipathd = Some(Multipathd::start_mapping_every_disk(NoPath::Queue));
    let steps = ["multipath.to-send-message:1", "multipath.message-sent:1"];
    for step in sweep.select("abandon", &steps.map(str::to_owned)) {
        abandon_a_map_that_queues(&mut rig, &mut sweep, &step);
    }
    sweep.conclude(&["multipath"]);
}

/// No path is left, so the detach waits until it tells the map to fail.
fn abandon_a_map_that_queues(rig: &mut Rig, sweep: &mut KillSweep, step: &str) {
    let node = rig.attach().node;
    rig.data.compare(&node, step);
    for device in rig.target.devices() {
        let state = format!("/sys/bus/scsi/devices/{device}/state");
        fs::write(state, "offline\n").unwrap();
    }
    let run = Run::start(&rig.place, "abandon", &[], Some(step));
    run.wait_until_at_step();
    // A process does not end while one of its flushes waits in the kernel.
    let map = node.to_str().unwrap();
    guest::run(&["dmsetup", "message", map, "0", "fail_if_no_path"]);
    let ended = run.end();
    sweep.count("abandon", Some(step), &ended);
    assert!(ended.killed, "{ended:?}");
    sweep.recover(&rig.place, step);
    rig.require_gone(step);
}
