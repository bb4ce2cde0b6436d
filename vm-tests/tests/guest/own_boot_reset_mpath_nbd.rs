//! A machine that is reset at the steps of the journal's own work: the kernel's state is gone,
//! and the disk has a journal.
//!
//! The other steps of an attach and a detach leave the same journal on the disk as the
//! journal's step before them: whole sweeps of `own_boot_crash_mpath` and `own_boot_crash_nbd`
//! require that.
//!
//! A run takes the steps of its part with one kind of volume. Fifteen runs with consecutive
//! seeds take every step with every kind. A boot that the test did not
//! request fails the test: see [`reset`].

use std::any::Any;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use lunbd::Engine;
use lunbd::engine::{Action, Condition, DetachVolume};
use nix::mount::{MsFlags, mount};
use serde::{Deserialize, Serialize};
use vm_tests::guest::agent::{engine, journal_files, soon, unit};
use vm_tests::guest::crash::{Place, Run, request, volume};
use vm_tests::guest::kills::changes_journal;
use vm_tests::guest::multipathd::{Multipathd, NoPath};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store, backends};
use vm_tests::guest::rotation::{PARTS, Part};
use vm_tests::guest::{self, ScsiDebug};

const DISK: &str = "/dev/vda";
const KEPT: &str = "/mnt";
/// The file system's size. The marks of resets come after it on the disk.
const KEPT_SIZE: u64 = 60 << 20;
/// The alignment of a write past the page cache.
const BLOCK: usize = 4096;
const LIMIT: Duration = Duration::from_secs(60);

/// The kind of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    Scsi,
    Multipath,
    Nbd,
}

/// The target below a volume of one kind, the same after every boot.
struct Rig {
    sources: Vec<String>,
    target: Option<ScsiDebug>,
    /// Guards of the daemon, the server and the module; they end with the rig.
    _runs: Vec<Box<dyn Any>>,
}

impl Rig {
    fn new(kind: Kind) -> Self {
        match kind {
            Kind::Scsi => {
                let target = ScsiDebug::with_luns(2);
                Self {
                    sources: vec![unit(&target, 1).to_string()],
                    target: Some(target),
                    _runs: Vec::new(),
                }
            }
            Kind::Multipath => {
                let multipathd = Multipathd::start_mapping_every_disk(NoPath::Fail);
                let (target, sources) = ScsiDebug::two_paths();
                Self {
                    sources,
                    target: Some(target),
                    _runs: vec![Box::new(multipathd)],
                }
            }
            Kind::Nbd => {
                let module = NbdModule::load(2);
                let store = Store::sparse(1 << 20);
                let at = At::Unix("/tmp/reset.sock".into());
                let server = NbdServer::qemu_nbd(at, "disk", store.path(), &[]);
                Self {
                    sources: vec![server.uri("disk")],
                    target: None,
                    _runs: vec![Box::new(server), Box::new(store), Box::new(module)],
                }
            }
        }
    }

    #[track_caller]
    fn require_gone(&self) {
        if let Some(target) = &self.target {
            assert_eq!(target.devices(), [] as [&str; 0]);
        }
        assert_eq!(backends(), [] as [&str; 0]);
    }
}

/// A reset, and the step at which it happens.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Reset {
    kind: Kind,
    operation: String,
    step: String,
}

/// The state that is kept from one boot to the next.
#[derive(Serialize, Deserialize)]
struct Progress {
    began_at: SystemTime,
    plan: Vec<Reset>,
    /// How many resets of the plan have begun.
    begun: usize,
    /// The mark that the disk has if the reset requested last ended the boot.
    asked: String,
    /// What was found after each reset.
    found: Vec<String>,
}

impl Progress {
    fn path() -> PathBuf {
        Path::new(KEPT).join("progress.json")
    }

    fn read() -> Option<Self> {
        let text = fs::read_to_string(Self::path()).ok()?;
        Some(serde_json::from_str(&text).unwrap())
    }

    fn write(&self) {
        let beside = Self::path().with_extension("new");
        let mut file = File::create(&beside).unwrap();
        file.write_all(&serde_json::to_vec(self).unwrap()).unwrap();
        file.sync_all().unwrap();
        fs::rename(&beside, Self::path()).unwrap();
        File::open(KEPT).unwrap().sync_all().unwrap();
    }
}

/// Mounts the file system on the disk. Returns whether this made the file system, as in the
/// first boot.
fn mount_the_disk() -> bool {
    // Some kernels have the driver built in, and then no module of this name.
    if !Path::new("/sys/bus/pci/drivers/virtio-pci").exists() {
        guest::modprobe("virtio_pci", &[]);
    }
    guest::modprobe("virtio_blk", &[]);
    guest::wait_until(DISK, LIMIT, || Path::new(DISK).exists().then_some(()));
    guest::modprobe("ext4", &[]);
    // Recognise the file system by its magic number and not by a failed mount, which could lose
    // the kept state.
    let mark = guest::wait_until("the disk to be read", LIMIT, || {
        let mut mark = [0; 2];
        let read = File::open(DISK).and_then(|disk| disk.read_exact_at(&mut mark, 1080));
        read.ok().map(|()| mark)
    });
    let is_first = mark != [0x53, 0xef];
    if is_first {
        let size = format!("{}K", KEPT_SIZE >> 10);
        guest::run(&["mkfs.ext4", "-q", "-F", DISK, &size]);
    }
    let options = None::<&str>;
    mount(Some(DISK), KEPT, Some("ext4"), MsFlags::empty(), options).unwrap();
    is_first
}

/// Each step of the journal that changes the disk, or may change it.
fn plan(kind: Kind) -> Vec<Reset> {
    let rig = Rig::new(kind);
    let place = Place::new();
    let mut plan = Vec::new();
    for operation in ["attach", "resize", "detach"] {
        let sources = if operation == "attach" {
            &*rig.sources
        } else {
            &[]
        };
        let ended = Run::start(&place, operation, sources, None).end();
        assert!(ended.status.success(), "{ended:?}");
        let steps = ended.steps.into_iter().filter(|step| changes_journal(step));
        plan.extend(steps.map(|step| Reset {
            kind,
            operation: operation.to_owned(),
            step,
        }));
    }
    plan
}

/// The steps of this run's part with the kind whose turn it is; a whole sweep takes all with
/// each kind.
fn plan_of_this_run() -> Vec<Reset> {
    let mut kinds = vec![Kind::Scsi, Kind::Multipath];
    // Earlier kernels keep no backend ids.
    if guest::kernel() >= (5, 14) {
        kinds.push(Kind::Nbd);
    }
    if guest::sweeps_are_whole() {
        return kinds.into_iter().flat_map(plan).collect();
    }
    let turn = guest::seed() / PARTS % kinds.len() as u64;
    let plan = plan(kinds[usize::try_from(turn).unwrap()]);
    // A choice by the names of the points would leave one part a single step of an NBD volume.
    Part::of_this_run().each_fifth(plan)
}

/// What a reset at the step may leave, in the words of `look`.
fn expected(operation: &str, step: &str) -> &'static [&'static str] {
    const NONE: &str = "no record";
    const DETACHED: &str = "detached";
    const BEGUN: &str = "Gone, undone";
    const ATTACHED: &str = "Gone, nothing";
    const LEAVING: &str = "Gone, finished";
    let (step, pass) = step.split_once(':').unwrap();
    match (operation, step.trim_start_matches("journal."), pass) {
        // The reset before leaves nothing, or a detach that is proven.
        ("attach", "created" | "written" | "synced", "1") => &[NONE, DETACHED],
        // The directory may not be on the disk yet.
        ("attach", "renamed", "1") => &[NONE, DETACHED, BEGUN],
        ("attach", "renamed", "2") => &[BEGUN, ATTACHED],
        // An unfinished resize leaves the volume as it was attached.
        ("resize", _, _)
        | ("attach", "kept", "2")
        | ("detach", "created" | "written" | "synced", "1") => &[ATTACHED],
        ("attach", _, _) => &[BEGUN],
        ("detach", "renamed", "1") => &[ATTACHED, LEAVING],
        ("detach", "kept", "1") | ("detach", "created" | "written" | "synced", "2") => &[LEAVING],
        ("detach", "renamed", "2") => &[LEAVING, DETACHED],
        ("detach", "kept", "2") => &[DETACHED],
        _ => panic!("{operation} at {step}: not thought of"),
    }
}

/// Recovers, and returns the condition and the action.
fn look(engine: &Engine, directory: &Path, when: &str) -> String {
    let journal = engine.open_journal_at(directory, soon()).unwrap();
    assert!(journal.problems().is_empty(), "{when}: {journal:?}");
    let recovery = engine.recover(&journal, soon()).unwrap();
    assert!(recovery.foreign.is_empty(), "{when}: {recovery:?}");
    let Some(found) = recovery.volumes.first() else {
        let is_detached = journal.detached_as(&volume()).is_some();
        return if is_detached { "detached" } else { "no record" }.to_owned();
    };
    assert_eq!(found.condition, Condition::Gone, "{when}: {found:?}");
    let action = match found.action {
        Action::Nothing => "nothing",
        Action::Finished => "finished",
        Action::Undone => "undone",
        _ => panic!("{when}: {found:?}"),
    };
    format!("Gone, {action}")
}

fn attach(engine: &Engine, directory: &Path, rig: &Rig) {
    let journal = engine.open_journal_at(directory, soon()).unwrap();
    let attached = engine.attach_volume(&journal, &volume(), &request(&rig.sources), soon());
    attached.unwrap_or_else(|error| panic!("{error:#}"));
}

fn detach(engine: &Engine, directory: &Path, rig: &Rig) {
    let journal = engine.open_journal_at(directory, soon()).unwrap();
    let how = DetachVolume::default();
    let detached = engine.detach_volume(&journal, &volume(), &how, soon());
    detached.unwrap_or_else(|error| panic!("{error:#}"));
    rig.require_gone();
    assert_eq!(journal_files(directory), [] as [&str; 0]);
    assert!(journal.detached_as(&volume()).is_some());
}

/// Resets the machine without a sync of its disks. Only the mark says that the reset was
/// requested: a kernel that panics boots again as well, and leaves no mark.
fn reset(mark: &str) -> ! {
    write_mark(mark);
    fs::write("/proc/sysrq-trigger", "b").unwrap();
    loop {
        std::thread::park();
    }
}

/// Boots again, so that a volume's sources have the same names in every boot: the kernel keeps
/// counting SCSI hosts.
fn boot_again(progress: &mut Progress) -> ! {
    progress.asked = format!("again after {}", progress.begun);
    progress.write();
    reset(&progress.asked)
}

/// Writes the mark after the file system and past the page cache, so that it brings nothing of
/// the file system to the disk.
fn write_mark(mark: &str) {
    let mut buffer = vec![0; 2 * BLOCK];
    let at = buffer.as_ptr().align_offset(BLOCK);
    buffer[at..at + mark.len()].copy_from_slice(mark.as_bytes());
    let disk = File::options()
        .write(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(DISK)
        .unwrap();
    disk.write_all_at(&buffer[at..at + BLOCK], KEPT_SIZE)
        .unwrap();
}

/// Takes the mark of the last boot, and removes it from the disk.
fn take_mark() -> String {
    let mut block = [0; BLOCK];
    File::open(DISK)
        .unwrap()
        .read_exact_at(&mut block, KEPT_SIZE)
        .unwrap();
    write_mark("");
    let mark = String::from_utf8_lossy(&block);
    mark.trim_end_matches('\0').to_owned()
}

#[test]
fn a_machine_that_is_reset_at_each_step_of_this_runs_part_finds_a_journal_that_is_whole() {
    guest::sweep_time_limit();
    let is_first = mount_the_disk();
    let mark = take_mark();
    let Some(mut progress) = Progress::read() else {
        assert!(is_first, "the first boot ended before it asked for a reset");
        let mut progress = Progress {
            began_at: SystemTime::now(),
            plan: plan_of_this_run(),
            begun: 0,
            asked: String::new(),
            found: Vec::new(),
        };
        boot_again(&mut progress);
    };
    assert_eq!(mark, progress.asked, "a boot that the test did not ask for");
    let directory = Path::new(KEPT).join("journal");
    let mut standing = None;
    if progress.found.len() < progress.begun {
        let last = progress.begun - 1;
        let reset = &progress.plan[last];
        let Reset {
            kind,
            operation,
            step,
        } = reset;
        let when = format!("{kind:?}, {operation} at {step}");
        assert_eq!(
            progress.found.len(),
            last,
            "{when}: another boot than the reset's"
        );
        let rig = Rig::new(*kind);
        let engine = engine();
        let found = look(&engine, &directory, &when);
        let told = format!("{when}: {found}");
        assert!(
            expected(operation, step).contains(&found.as_str()),
            "{told}"
        );
        // Whatever was found, the volume can be attached and detached.
        attach(&engine, &directory, &rig);
        detach(&engine, &directory, &rig);
        standing = Some((*kind, rig));
        progress.found.push(told);
        progress.write();
    }
    let Some(next) = progress.plan.get(progress.begun).cloned() else {
        conclude(&progress);
        return;
    };
    let rig = match standing {
        None => Rig::new(next.kind),
        Some((kind, rig)) if kind == next.kind => rig,
        Some(_) => boot_again(&mut progress),
    };
    if next.operation != "attach" {
        attach(&engine(), &directory, &rig);
    }
    progress.begun += 1;
    progress.asked = format!(
        "{} at {}, number {}",
        next.operation, next.step, progress.begun
    );
    progress.write();
    let attaches = next.operation == "attach";
    let sources: &[String] = if attaches { &rig.sources } else { &[] };
    Run::start_to_stop(&directory, &next.operation, sources, &next.step).wait_until_stopped();
    reset(&progress.asked)
}

fn conclude(progress: &Progress) {
    let count = progress.found.len();
    guest::tell_met(&format!(
        "{count} resets of the machine ({}): {}",
        Part::of_this_run(),
        progress.found.join("; ")
    ));
    let least = if guest::sweeps_are_whole() { 55 } else { 2 };
    assert!(count >= least, "only {count}");
    if guest::sweeps_are_whole() {
        let steps: BTreeSet<String> = progress
            .plan
            .iter()
            .map(|reset| format!("{} {}", reset.operation, reset.step))
            .collect();
        guest::tell_whole_sweep(
            "resets of the machine, SCSI, multipath and NBD",
            format!("{count} resets"),
            format!("{} steps", steps.len()),
            progress.began_at.elapsed().unwrap(),
        );
    }
}
