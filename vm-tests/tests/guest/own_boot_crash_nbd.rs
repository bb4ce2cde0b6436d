//! An agent of an NBD volume that is killed at the steps of its work, one step per process, as
//! `own_boot_crash_mpath` does for SCSI.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use lunbd::Attachment;
use lunbd::engine::{Action, Condition, DetachVolume};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::crash::{Data, Place, Run, request, volume};
use vm_tests::guest::kills::{KillSweep, is_before_intent};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

/// What the next agent calls first after a kill.
#[derive(Clone, Copy, PartialEq)]
enum FirstCall {
    Recover,
    Attach,
}

/// A volume of an NBD server that can be killed.
struct NbdRig {
    place: Place,
    sources: Vec<String>,
    data: Data,
    store: Store,
    server: NbdServer,
}

impl NbdRig {
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
        for name in guest::entries("/sys/block") {
            let connected = Path::new("/sys/block").join(&name).join("pid").exists();
            assert!(!connected, "{when}: {name} is connected");
        }
        self.place.require_clean(when);
    }

    /// Requires the data, and requests that are no longer than the server accepts.
    #[track_caller]
    fn compare(&self, node: &Path, when: &str) {
        self.data.compare(node, when);
        let name = node.file_name().unwrap().to_str().unwrap();
        let most = fs::read_to_string(format!("/sys/block/{name}/queue/max_sectors_kb")).unwrap();
        assert_eq!(
            most.trim(),
            "64",
            "{when}: longer requests than the server takes"
        );
    }

    /// An attach and then a heal by the same agent, killed at the step; then a detach, killed
    /// at its own step.
    fn turn(
        &mut self,
        sweep: &mut KillSweep,
        all: [&[String]; 2],
        [attach, detach]: [Option<&str>; 2],
    ) -> [Vec<String>; 2] {
        let when = format!("attach or heal at {}", attach.unwrap_or("no step"));
        // The limit of the previous attach stays with the device.
        fs::write("/sys/block/nbd0/queue/max_sectors_kb", "128").unwrap();
        let mut run = Run::start(&self.place, "attach-and-heal", &self.sources, attach);
        let attached = run.says_attached();
        if attached {
            self.server.kill();
            self.server.start();
            run.go_on();
        }
        let healed = run.end();
        sweep.count("attach or heal", attach, &healed);
        sweep.compare_what_is_left(&self.place, "attach or heal", &healed);
        assert!(
            healed.killed || healed.status.success(),
            "{when}: {healed:?}"
        );
        if healed.killed {
            let recovered = sweep.recover(&self.place, &when);
            if let Some(node) = recovered.and_then(|recovered| recovered.node) {
                self.compare(&node, &when);
            } else {
                assert!(!attached, "{when}: it was attached");
                self.require_gone(&when);
            }
        }
        let node = self.attach().node;
        self.compare(&node, "attached");
        self.data.write_anew(&node).sync_all().unwrap();

        let when = format!("detach at {}", detach.unwrap_or("no step"));
        let ended = sweep.run(&self.place, "detach", &[], detach);
        if ended.killed {
            let recovered = sweep.recover(&self.place, &when);
            if is_before_intent(all[1], detach.unwrap_or_default()) {
                let recovered = recovered.expect("the volume");
                assert_eq!(recovered.condition, Condition::Complete, "{when}");
                self.detach();
            }
        }
        self.require_gone(&when);
        [healed.steps, ended.steps]
    }

    /// A resize by the agent that has attached the volume, killed at a step of the resize. Returns
    /// the steps of the resize.
    fn resize(
        &mut self,
        sweep: &mut KillSweep,
        step: Option<&str>,
        next: FirstCall,
    ) -> Vec<String> {
        let when = format!("resize at {}", step.unwrap_or("no step"));
        let mut run = Run::start(&self.place, "attach-and-resize", &self.sources, step);
        if !run.says_attached() {
            // A slow udev has had the attach send the event before which this kill comes.
            let step = step.filter(|step| step.contains("barrier"));
            let step = step.unwrap_or_else(|| panic!("{when}: it was not attached"));
            assert!(run.end().killed, "{when}");
            sweep.pass_by("resize", step);
            sweep.recover(&self.place, &when);
            self.detach();
            self.require_gone(&when);
            return Vec::new();
        }
        let before = run.steps().len();
        let file = File::options().write(true).open(self.store.path()).unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(length + (1 << 20)).unwrap();
        run.go_on();
        let mut ended = run.end();
        sweep.count("resize", step, &ended);
        sweep.compare_what_is_left(&self.place, "resize", &ended);
        assert!(ended.killed || ended.status.success(), "{when}: {ended:?}");
        if ended.killed {
            if next == FirstCall::Attach {
                self.attach();
            }
            let recovered = sweep.recover(&self.place, &when).expect("the volume");
            let node = recovered.node.expect("its node");
            self.compare(&node, &when);
            let mut disk = File::open(&node).unwrap();
            let last_block = disk.seek(SeekFrom::End(-4096)).unwrap();
            let has_grown = last_block + 4096 > length;
            match recovered.action {
                Action::Undone => assert!(!has_grown, "{when}"),
                Action::Finished => assert!(has_grown, "{when}"),
                // Nothing was begun, or all was done.
                action => assert!(matches!(action, Action::Nothing), "{when}: {action:?}"),
            }
            let read = disk.read_exact(&mut [0; 4096]);
            read.unwrap_or_else(|error| panic!("{when}: the block at {last_block}: {error}"));
        }
        self.detach();
        self.require_gone(&when);
        ended.steps.split_off(before)
    }
}

/// The engine sends udev another marked event if udev takes more than ten seconds, as on a
/// slow machine.
fn comes_always(step: &str) -> bool {
    let is_sent = step.contains("barrier");
    !is_sent || step.ends_with(":1")
}

#[test]
fn an_nbd_volume_is_whole_or_gone_after_a_kill_at_each_step_of_this_runs_part() {
    guest::sweep_time_limit();
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(8 << 20);
    let arguments = [
        "--filter=blocksize-policy",
        "file",
        store.path().to_str().unwrap(),
        "blocksize-minimum=1",
        "blocksize-preferred=4096",
        "blocksize-maximum=64K",
        "blocksize-error-policy=error",
    ];
    let server = NbdServer::nbdkit(At::tcp(), &arguments);
    let mut sweep = KillSweep::new("NBD", &["block.", "failed-flush.", "nbd."]);
    let mut rig = NbdRig {
        place: Place::new(),
        sources: vec![server.uri("")],
        data: Data::default(),
        store,
        server,
    };
    let node = rig.attach().node;
    rig.data.write_anew(&node).sync_all().unwrap();
    rig.detach();
    let [heal, detach] = rig.turn(&mut sweep, [&[], &[]], [None, None]);
    println!("steps of an attach and a heal: {heal:?}\nof a detach: {detach:?}");
    let heal_at = sweep.select("attach or heal", &heal);
    let detach_at: Vec<String> = detach
        .iter()
        .filter(|step| comes_always(step))
        .cloned()
        .collect();
    let detach_at = sweep.select("detach", &detach_at);
    for turn in 0..heal_at.len().max(detach_at.len()) {
        let at = [heal_at.get(turn), detach_at.get(turn)];
        let at = at.map(|step| step.map(String::as_str));
        rig.turn(&mut sweep, [&heal, &detach], at);
    }
    let resize = rig.resize(&mut sweep, None, FirstCall::Recover);
    let resize: Vec<String> = resize
        .into_iter()
        .filter(|step| comes_always(step))
        .collect();
    for step in sweep.select("resize", &resize) {
        rig.resize(&mut sweep, Some(&step), FirstCall::Recover);
    }
    // The kernel has the new size then, and the connection serves only the old one.
    rig.resize(&mut sweep, Some("nbd.reconfigured:1"), FirstCall::Attach);
    sweep.conclude(&["nbd"]);
}
