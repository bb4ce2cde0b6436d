//! Attaches and detaches many NBD volumes: one after the other, and as a reconciler does it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Options, Reconciler};
use lunbd::{AttachRequest, Deadline, Engine, Source};
use vm_bench::figures::{Cost, Volumes, VolumesRow};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::system_calls::SystemCalls;
use vm_tests::guest::{self, udevd};

use crate::at_once::cpu;
use crate::nbd::is_free;
use crate::rounds::millis;

const VOLUMES: u32 = 200;
/// Enough that no volume has to wait for the detach of another.
const DEVICES: u32 = 208;

/// Runs each way twice: timed, and then with its system calls counted, which costs time.
pub(crate) fn measure() -> Volumes {
    let _module = NbdModule::load(DEVICES);
    // One thread for each client, since the server is not measured.
    let server = NbdServer::nbdkit(At::unix(), &["--threads=1", "memory", "1M"]);
    let engine = Arc::new(engine());
    let sources: Vec<Source> = (0..VOLUMES)
        .map(|n| server.uri(&format!("v{n}")).parse().expect("a source"))
        .collect();
    let At::Unix(socket) = server.at() else {
        panic!("asked for a unix socket");
    };
    let rows = vec![
        take(&mut Reconciled::new(&engine, &sources)),
        take(&mut OneByOne {
            engine: &engine,
            sources: &sources,
        }),
        take(&mut NbdClient { socket }),
    ];
    Volumes {
        volumes: VOLUMES,
        rows,
    }
}

trait VolumesMethod {
    fn name(&self) -> &'static str;
    fn attach(&mut self);
    fn detach(&mut self);
}

fn take(way: &mut impl VolumesMethod) -> VolumesRow {
    let [mut attach, mut detach] = round(way, None);
    let syscalls = SystemCalls::of_this_process();
    let counted = round(way, Some(&syscalls));
    attach.syscalls = counted[0].syscalls;
    detach.syscalls = counted[1].syscalls;
    let way = way.name().to_owned();
    VolumesRow {
        way,
        attach,
        detach,
    }
}

fn round(way: &mut impl VolumesMethod, syscalls: Option<&SystemCalls>) -> [Cost; 2] {
    let attach = cost(syscalls, || way.attach());
    assert_eq!(connected(), VOLUMES, "{}", way.name());
    let detach = cost(syscalls, || way.detach());
    assert_eq!(connected(), 0, "{}", way.name());
    [attach, detach]
}

fn cost(syscalls: Option<&SystemCalls>, work: impl FnOnce()) -> Cost {
    udevd::settle();
    let count = || syscalls.map_or(0, SystemCalls::count);
    let (calls, hub, used, start) = (count(), hub_cpu(), cpu(), Instant::now());
    work();
    Cost {
        wall_ms: millis(start.elapsed()),
        cpu_ms: millis(cpu().saturating_sub(used)),
        hub_cpu_ms: millis(hub_cpu().saturating_sub(hub)),
        syscalls: count() - calls,
    }
}

struct Reconciled {
    reconciler: Reconciler,
    desired: Desired,
    journal: PathBuf,
}

impl Reconciled {
    fn new(engine: &Arc<Engine>, sources: &[Source]) -> Self {
        let journal = PathBuf::from("/tmp/volumes-journal");
        let opened = engine.open_journal_at(&journal, soon());
        let opened = opened.expect("a journal");
        let mut desired = Desired::default();
        for (number, source) in sources.iter().enumerate() {
            let id: VolumeId = format!("pvc-{number}").parse().expect("an id");
            let request = AttachRequest::new(source.clone());
            desired.insert(id, &request).expect("a volume");
        }
        Self {
            reconciler: Reconciler::new(Arc::clone(engine), opened, Options::default()),
            desired,
            journal,
        }
    }

    fn apply(&self, desired: Desired) {
        self.reconciler.set(desired);
        // Longer than it takes, also while system calls are counted.
        let limit = Deadline::after(Duration::from_secs(600));
        let left = self.reconciler.apply(limit).expect("an apply");
        assert!(left.is_empty(), "{left}");
    }
}

impl VolumesMethod for Reconciled {
    fn name(&self) -> &'static str {
        "lunbd, a reconciler with its journal"
    }

    fn attach(&mut self) {
        self.apply(self.desired.clone());
    }

    fn detach(&mut self) {
        self.apply(Desired::default());
    }
}

impl Drop for Reconciled {
    fn drop(&mut self) {
        let _gone_already = fs::remove_dir_all(&self.journal);
    }
}

struct OneByOne<'a> {
    engine: &'a Engine,
    sources: &'a [Source],
}

impl VolumesMethod for OneByOne<'_> {
    fn name(&self) -> &'static str {
        "lunbd, one after the other"
    }

    fn attach(&mut self) {
        for source in self.sources {
            let request = AttachRequest::new(source.clone());
            self.engine.attach(&request, soon()).expect("an attach");
        }
    }

    fn detach(&mut self) {
        for source in self.sources {
            let detachment = self.engine.detach(source.clone(), soon());
            detachment.expect("a detach");
        }
    }
}

struct NbdClient<'a> {
    socket: &'a Path,
}

impl VolumesMethod for NbdClient<'_> {
    fn name(&self) -> &'static str {
        "nbd-client; udevadm settle, one after the other"
    }

    fn attach(&mut self) {
        let socket = self.socket.to_str().expect("a path in ASCII");
        for number in 0..VOLUMES {
            let (name, node) = (format!("v{number}"), format!("/dev/nbd{number}"));
            guest::run(&["nbd-client", "-unix", socket, "-name", &name, &node]);
            udevd::settle();
        }
    }

    fn detach(&mut self) {
        for number in 0..VOLUMES {
            guest::run(&["nbd-client", "-d", &format!("/dev/nbd{number}")]);
            udevd::settle();
        }
        // The program returns when it has told the kernel.
        while connected() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn connected() -> u32 {
    let busy = (0..DEVICES).filter(|number| !is_free(&format!("nbd{number}")));
    u32::try_from(busy.count()).unwrap_or(u32::MAX)
}

/// The processor time of the thread that reads uevents (`schedstat`, its first number, ns).
fn hub_cpu() -> Duration {
    let tasks = guest::entries("/proc/self/task");
    let used = tasks.iter().filter_map(|task| {
        let task = Path::new("/proc/self/task").join(task);
        let name = fs::read_to_string(task.join("comm")).ok()?;
        let used = fs::read_to_string(task.join("schedstat")).ok()?;
        let used: u64 = used.split_whitespace().next()?.parse().ok()?;
        name.starts_with("lunbd-uevent").then_some(used)
    });
    Duration::from_nanos(used.sum())
}

pub(crate) fn print(volumes: &Volumes) {
    println!(
        "{:<52} {:>9} {:>9} {:>9} {:>10}",
        format!("NBD, {} volumes", volumes.volumes),
        "wall",
        "CPU",
        "hub CPU",
        "syscalls"
    );
    for row in &volumes.rows {
        for (verb, cost) in [("attach", &row.attach), ("detach", &row.detach)] {
            println!(
                "  {:<50} {:>6.0} ms {:>6.0} ms {:>6.0} ms {:>10}",
                format!("{}: {verb}", row.way),
                cost.wall_ms,
                cost.cpu_ms,
                cost.hub_cpu_ms,
                cost.syscalls
            );
        }
    }
    println!();
}
