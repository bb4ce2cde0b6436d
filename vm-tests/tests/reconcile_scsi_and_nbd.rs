//! Volumes that an agent keeps as they are wanted: two hundred of them while it
//! is killed again and again, servers that go away, paths that come back.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test panics to fail, and prints what it saw"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lunbd::engine::NbdOptions;
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Event, Events, Options, Reconciler, StepKind};
use lunbd::{AttachRequest, Deadline, Engine, Source};
use serde_json::{Value, json};
use vm_tests::guest::agent::{engine, soon, unit};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, ScsiDebug};

/// More than anything takes here, on a machine that is several times slower too.
const LIMIT: Duration = Duration::from_secs(900);

/// The driver, where it keeps backend ids.
fn module(devices: u32) -> NbdModule {
    if guest::kernel() < (5, 14) {
        guest::skip("no backend ids before 5.14");
    }
    NbdModule::load(devices)
}

/// A small generator, so that a run can be repeated by its seed.
struct Chance(u64);

impl Chance {
    fn new() -> Self {
        let seed = guest::seed();
        println!("LUNBD_VM_SEED={seed}");
        Self(seed | 1)
    }

    fn below(&mut self, limit: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }
}

/// A directory of one test; removed on drop.
struct Place(PathBuf);

impl Place {
    fn new(what: &str) -> Self {
        guest::enter();
        let path = PathBuf::from(format!("/tmp/{what}-{}", std::process::id()));
        let _not_there = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _gone_already = fs::remove_dir_all(&self.0);
    }
}

/// What is wanted: the source of each volume, and whether it is read-only.
type Wanted = BTreeMap<String, (String, bool)>;

/// The agent on its file and its journal.
struct Node {
    place: Place,
    agent: Option<Child>,
    kills: u32,
}

impl Node {
    fn new() -> Self {
        let place = Place::new("node");
        Self {
            place,
            agent: None,
            kills: 0,
        }
    }

    fn file(&self) -> PathBuf {
        self.place.0.join("desired.json")
    }

    fn journal(&self) -> PathBuf {
        self.place.0.join("journal")
    }

    /// Replaces the file, as a careful writer does.
    fn want(&self, wanted: &Wanted) {
        let volumes: Vec<Value> = wanted
            .iter()
            .map(|(id, (source, read_only))| {
                if *read_only {
                    json!({ "id": id, "source": source, "nbd": { "read_only": true } })
                } else {
                    json!({ "id": id, "source": source })
                }
            })
            .collect();
        let beside = self.place.0.join("desired.new");
        fs::write(&beside, json!({ "volume": volumes }).to_string()).unwrap();
        fs::rename(&beside, self.file()).unwrap();
    }

    fn start(&mut self) {
        let events = self.place.0.join("events");
        let out = File::options()
            .append(true)
            .create(true)
            .open(events)
            .unwrap();
        let child = Command::new("agent")
            .args([self.file(), self.journal()])
            .stdin(Stdio::null())
            .stdout(out.try_clone().unwrap())
            .stderr(out)
            .spawn()
            .unwrap();
        self.agent = Some(child);
    }

    fn kill(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            agent.kill().unwrap();
            agent.wait().unwrap();
            self.kills += 1;
        }
    }

    /// Ends it as a service manager does.
    fn end(&mut self) {
        let mut agent = self.agent.take().unwrap();
        // One that was just started is ended by the signal before it hears it.
        let lock = self.journal().join("journal.lock");
        guest::wait_until("the agent to have the journal", LIMIT, || {
            let holder = fs::read_to_string(&lock).ok()?;
            (holder == agent.id().to_string()).then_some(())
        });
        let pid = nix::unistd::Pid::from_raw(agent.id().try_into().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(agent.wait().unwrap().success());
    }

    /// The records, as they are on the disk.
    fn records(&self) -> BTreeMap<String, Value> {
        let mut records = BTreeMap::new();
        for name in guest::entries(self.journal()) {
            if Path::new(&name).extension() != Some("json".as_ref()) {
                continue;
            }
            // It may go while we look.
            let Ok(text) = fs::read_to_string(self.journal().join(name)) else {
                continue;
            };
            let (_, body) = text.split_once('\n').unwrap();
            let record: Value = serde_json::from_str(body).unwrap();
            let volume = record["volume"].as_str().unwrap().to_owned();
            records.insert(volume, record);
        }
        records
    }

    /// Whether the journal says that all is as it is wanted.
    fn is_reached(&self, wanted: &Wanted) -> bool {
        let records = self.records();
        records.len() == wanted.len()
            && wanted.iter().all(|(id, (source, read_only))| {
                records.get(id).is_some_and(|record| {
                    let nbd = &record["spec"]["nbd"];
                    record["intent"].is_null()
                        && !record["outcome"].is_null()
                        && record["spec"]["sources"][0] == *source
                        && (nbd.is_null() || nbd["read_only"] == *read_only)
                })
            })
    }

    /// Kills it this often, each time in the middle of something or of nothing,
    /// and waits until all is as it is wanted.
    fn converge(&mut self, wanted: &Wanted, kills: u32, chance: &mut Chance) {
        let start = Instant::now();
        self.want(wanted);
        if self.agent.is_none() {
            self.start();
        }
        for _ in 0..kills {
            std::thread::sleep(Duration::from_millis(100 + chance.below(4000)));
            self.kill();
            assert_each_is_attached_once();
            self.start();
        }
        let mut told = Instant::now();
        guest::wait_until("all to be as it is wanted", LIMIT, || {
            if told.elapsed() > Duration::from_secs(20) {
                told = Instant::now();
                println!("{} of {} are known", self.records().len(), wanted.len());
            }
            self.is_reached(wanted).then_some(())
        });
        assert_each_is_attached_once();
        println!(
            "{} volumes as they are wanted after {:.1} s and {kills} kills",
            wanted.len(),
            start.elapsed().as_secs_f64()
        );
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let events = fs::read_to_string(self.place.0.join("events")).unwrap_or_default();
            let lines: Vec<&str> = events.lines().collect();
            let last = lines.len().saturating_sub(60);
            println!("the agent's last words:\n{}", lines[last..].join("\n"));
        }
    }
}

/// The backend ids of the connected NBD devices.
fn backends() -> Vec<String> {
    let mut backends = Vec::new();
    for name in guest::entries("/sys/block") {
        let dir = Path::new("/sys/block").join(&name);
        if !name.starts_with("nbd") {
            continue;
        }
        // A disconnect takes the id away after the pid: one that goes while we look
        // is not taken for one without an id.
        let backend = fs::read_to_string(dir.join("backend")).unwrap_or_default();
        if dir.join("pid").exists() {
            backends.push(backend.trim_end().to_owned());
        }
    }
    backends.sort();
    backends
}

fn assert_each_is_attached_once() {
    let backends = backends();
    let distinct: BTreeSet<&String> = backends.iter().collect();
    assert_eq!(distinct.len(), backends.len(), "{backends:?}");
}

/// What sysfs shows is what is wanted, and nothing else.
fn assert_stands(wanted: &Wanted, target: &ScsiDebug) {
    let of = |scheme: &str| -> Vec<String> {
        let sources = wanted.values().map(|(source, _)| source.clone());
        let mut sources: Vec<String> = sources.filter(|s| s.starts_with(scheme)).collect();
        sources.sort();
        sources
    };
    assert_eq!(backends(), of("nbd"));
    let mut units: Vec<String> = target
        .devices()
        .into_iter()
        .map(|hctl| format!("scsi:{hctl}"))
        .collect();
    units.sort();
    assert_eq!(units, of("scsi"));
}

const MARK: usize = 512;

/// What is written to a source, in a place that is its own also where the units
/// of a target share one store.
fn mark_of(source: &str, round: u32) -> (u64, [u8; MARK]) {
    let mut mark = [0; MARK];
    let text = format!("{round} {source}");
    mark[..text.len()].copy_from_slice(text.as_bytes());
    let lun = source
        .strip_prefix("scsi:")
        .and_then(|hctl| hctl.rsplit(':').next());
    let place = lun.map_or(0, |lun| lun.parse::<u64>().unwrap() * 4096);
    (place, mark)
}

fn write_mark(node: &Path, source: &str, round: u32) {
    let (place, mark) = mark_of(source, round);
    let mut disk = OpenOptions::new().write(true).open(node).unwrap();
    disk.seek(SeekFrom::Start(place)).unwrap();
    // No fsync: what is not on the server yet is for the detach to bring there.
    disk.write_all(&mark).unwrap();
}

#[track_caller]
fn assert_mark(node: &Path, source: &str, round: u32) {
    let (place, _) = mark_of(source, round);
    let mut disk = File::open(node).unwrap();
    disk.seek(SeekFrom::Start(place)).unwrap();
    let mut found = [0; MARK];
    disk.read_exact(&mut found).unwrap();
    let found = String::from_utf8_lossy(&found);
    let found = found.trim_end_matches('\0');
    assert_eq!(found, format!("{round} {source}"), "{}", node.display());
}

/// One server with many exports, each a file.
struct Exports {
    server: NbdServer,
    stores: Place,
}

impl Exports {
    fn new(count: u64) -> Self {
        let stores = Place::new("stores");
        for number in 0..count {
            let file = File::create(stores.0.join(format!("v{number}"))).unwrap();
            file.set_len(1 << 20).unwrap();
        }
        let directory = format!("dir={}", stores.0.display());
        let server = NbdServer::nbdkit(At::unix(), &["file", &directory]);
        Self { server, stores }
    }

    fn source(&self, number: u64) -> String {
        // As the journal and the kernel's backend id spell it.
        let source: Source = self.server.uri(&format!("v{number}")).parse().unwrap();
        source.to_string()
    }

    /// What the server has, past all caches of the kernel's.
    fn assert_mark(&self, number: u64, round: u32) {
        assert_mark(
            &self.stores.0.join(format!("v{number}")),
            &self.source(number),
            round,
        );
    }
}

#[test]
fn two_hundred_volumes_under_an_agent_that_is_killed_all_the_way_end_as_they_are_wanted() {
    guest::time_limit(Duration::from_secs(2400));
    let mut chance = Chance::new();
    // Half of them NBD. The newest kernel has the same with fewer, for the time.
    let half = if guest::series() == "6.1" { 100 } else { 25 };
    let kills = 5;
    let _module = module(u32::try_from(half + 8).unwrap());
    let target = ScsiDebug::with_luns(u32::try_from(half * 2).unwrap());
    let exports = Exports::new(half * 2);
    let lun = |number: u64| unit(&target, number).to_string();
    let mut node = Node::new();

    let mut wanted = Wanted::new();
    for number in 0..half {
        wanted.insert(format!("nbd-{number}"), (exports.source(number), false));
        wanted.insert(format!("scsi-{number}"), (lun(number), false));
    }
    node.converge(&wanted, kills, &mut chance);
    assert_stands(&wanted, &target);
    let records = node.records();
    for (volume, (source, _)) in &wanted {
        let device = PathBuf::from(records[volume]["outcome"]["node"].as_str().unwrap());
        write_mark(&device, source, 1);
    }

    // Half of them change: some go and their sources become others', some change
    // places, some move to what nobody had, some become read-only.
    for number in 0..half / 2 {
        let next = (number / 4 * 4) + (number + 1) % 4;
        for kind in ["nbd", "scsi"] {
            let source = |number| {
                if kind == "nbd" {
                    exports.source(number)
                } else {
                    lun(number)
                }
            };
            let name = format!("{kind}-{number}");
            match number / 4 % 4 {
                0 => {
                    let (was, _) = wanted.remove(&name).unwrap();
                    wanted.insert(format!("../heir of {name}"), (was, false));
                }
                1 => drop(wanted.insert(name, (source(next), false))),
                2 => drop(wanted.insert(name, (source(half + number), false))),
                _ if kind == "nbd" => drop(wanted.insert(name, (source(number), true))),
                _ => drop(wanted.remove(&name)),
            }
        }
    }
    node.converge(&wanted, kills, &mut chance);
    assert_stands(&wanted, &target);
    let records = node.records();
    let fresh =
        |source: &str| (half..half * 2).any(|n| exports.source(n) == source || lun(n) == source);
    for (volume, (source, read_only)) in &wanted {
        let device = PathBuf::from(records[volume]["outcome"]["node"].as_str().unwrap());
        if !fresh(source) {
            assert_mark(&device, source, 1);
        }
        if !read_only {
            write_mark(&device, source, 2);
        }
    }

    let nothing = Wanted::new();
    node.converge(&nothing, kills, &mut chance);
    assert_stands(&nothing, &target);
    println!("{} kills in all", node.kills);
    node.end();
    assert_eq!(guest::entries(node.journal()), ["journal.lock"]);
    let mut leases = guest::entries("/run/lunbd");
    leases.retain(|name| Path::new(name).extension() == Some("lock".as_ref()));
    // A lease's file stays when its holder is killed, and is nobody's.
    println!("{} lease files are left by the killed", leases.len());
    for name in leases {
        let _gone_already = fs::remove_file(Path::new("/run/lunbd").join(name));
    }

    let engine = engine();
    for (source, read_only) in wanted.values() {
        let round = if *read_only { 1 } else { 2 };
        if let Some(number) = (0..half * 2).find(|&n| exports.source(n) == *source) {
            exports.assert_mark(number, round);
        }
    }
    let attached = guest::agent::attach(&engine, &target, 0);
    for (source, _) in wanted
        .values()
        .filter(|(source, _)| source.starts_with("scsi"))
    {
        assert_mark(&attached.node, source, 2);
    }
    guest::agent::detach(&engine, &target, 0).unwrap();
}

fn id(text: &str) -> VolumeId {
    text.parse().unwrap()
}

fn request(source: &str) -> AttachRequest {
    AttachRequest::new(source.parse::<Source>().unwrap())
}

/// A reconciler in this process, running; all is detached when the test is over.
fn while_running(
    place: &Place,
    options: Options,
    test: impl FnOnce(&Arc<Engine>, &Reconciler, &mut Events),
) {
    struct Stop<'a>(&'a Reconciler);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    let engine = Arc::new(engine());
    let journal = engine
        .open_journal_at(&place.0.join("journal"), soon())
        .unwrap();
    let reconciler = Reconciler::new(Arc::clone(&engine), journal, options);
    let mut events = reconciler.subscribe();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let stop = Stop(&reconciler);
        test(&engine, &reconciler, &mut events);
        reconciler.set(Desired::default());
        guest::wait_until("all to be detached", LIMIT, || {
            reconciler.in_use().is_empty().then_some(())
        });
        drop(stop);
        running.join().unwrap().unwrap();
    });
}

fn next(events: &mut Events, what: &str, is: impl Fn(&Event) -> bool) -> Event {
    let limit = Deadline::after(LIMIT);
    loop {
        let event = events.next(limit).unwrap_or_else(|| panic!("no {what}"));
        println!("{event}");
        if is(&event) {
            return event;
        }
    }
}

#[test]
fn a_server_that_comes_back_is_healed_and_one_that_hangs_holds_up_nobody() {
    const HUNG: u32 = 5;
    let _module = module(4);
    let store = Store::sparse(1 << 20);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let hung = NbdServer::nbdkit(At::unix(), &["memory", "1M"]);
    let exports = Exports::new(8);
    let place = Place::new("heal");
    while_running(&place, Options::default(), |_, reconciler, events| {
        let mut desired = Desired::default();
        desired
            .insert(id("pvc-1"), &request(&server.uri("disk")))
            .unwrap();
        hung.stop();
        // More than half of the threads, and each for as long as a step may take.
        for number in 0..HUNG {
            let options = NbdOptions::default();
            let backend = format!("hung-{number}").parse().unwrap();
            let source: Source = hung.uri(&format!("x{number}")).parse().unwrap();
            let request = AttachRequest::new(source).nbd(options.backend(backend));
            desired
                .insert(id(&format!("hung-{number}")), &request)
                .unwrap();
        }
        for number in 0..8 {
            let request = request(&exports.source(number));
            desired
                .insert(id(&format!("well-{number}")), &request)
                .unwrap();
        }
        reconciler.set(desired.clone());
        for number in 0..8 {
            let volume = id(&format!("well-{number}"));
            reconciler
                .wait_attached(&volume, Deadline::after(LIMIT))
                .unwrap();
        }
        let there = reconciler
            .wait_attached(&id("pvc-1"), Deadline::after(LIMIT))
            .unwrap();
        for number in 0..HUNG {
            desired.remove(&id(&format!("hung-{number}")));
        }
        reconciler.set(desired);
        hung.cont();
        let device = there.node.unwrap();
        write_mark(&device, "nbd", 1);
        nix::unistd::sync();
        for round in 0..2 {
            server.kill();
            let lost = next(
                events,
                "loss",
                |event| matches!(event, Event::Lost { volume, .. } if *volume == id("pvc-1")),
            );
            let Event::Lost { budget_left, .. } = lost else {
                unreachable!("just matched");
            };
            assert!(budget_left.is_some(), "{round}");
            server.start();
            next(
                events,
                "healing",
                |event| matches!(event, Event::Healed { volume } if *volume == id("pvc-1")),
            );
            assert_mark(&device, "nbd", 1);
        }
    });
    assert!(backends().is_empty());
}

#[test]
fn a_path_that_is_lost_and_comes_back_is_taken_in_again() {
    let target = ScsiDebug::options().luns(2).paths(2).load();
    let paths: Vec<String> = target
        .hosts()
        .iter()
        .map(|host| format!("{host}:0:0:1"))
        .collect();
    let place = Place::new("paths");
    while_running(&place, Options::default(), |_, reconciler, events| {
        let source = |path: &String| -> Source { format!("scsi:{path}").parse().unwrap() };
        let both = AttachRequest::new(source(&paths[0])).path(source(&paths[1]));
        let mut desired = Desired::default();
        desired.insert(id("pvc-1"), &both).unwrap();
        reconciler.set(desired);
        let there = reconciler
            .wait_attached(&id("pvc-1"), Deadline::after(LIMIT))
            .unwrap();
        assert_eq!(there.paths.len(), 2, "{there:?}");
        let is_whole = || {
            let there = reconciler.wait_attached(&id("pvc-1"), soon()).unwrap();
            let whole = there.paths.len() == 2 && there.missing.is_empty();
            (whole && target.devices().len() == 2).then_some(there)
        };
        // The second time in the middle of its coming back.
        for _ in 0..2 {
            fs::write(format!("/sys/bus/scsi/devices/{}/delete", paths[1]), "1").unwrap();
            guest::wait_until("the path to be back", LIMIT, || {
                target.devices().contains(&paths[1]).then_some(())
            });
        }
        next(events, "change", |event| {
            matches!(event, Event::Changed { paths: 2, .. })
        });
        let whole = guest::wait_until("both paths to be known", LIMIT, is_whole);
        assert_eq!(whole.node, there.node);
        // The path that was handed out: what comes back is another device.
        fs::write(format!("/sys/bus/scsi/devices/{}/delete", paths[0]), "1").unwrap();
        next(events, "change", |event| {
            matches!(event, Event::Lost { .. } | Event::Changed { .. })
        });
        guest::wait_until("it to be whole again", LIMIT, is_whole);
    });
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn a_unit_that_the_array_grows_is_grown_and_until_then_it_holds_up_nobody() {
    const GIB: u64 = 1 << 30;
    let target = ScsiDebug::options().luns(4).load();
    let place = Place::new("grow");
    let retry = Options::default().retry(Duration::from_millis(50), Duration::from_secs(1));
    let lun = |number| request(&unit(&target, number).to_string());
    while_running(&place, retry, |_, reconciler, events| {
        let grows = id("grows");
        let mut desired = Desired::default();
        desired.insert(grows.clone(), &lun(1)).unwrap();
        desired.set_min_size(&grows, Some(GIB)).unwrap();
        reconciler.set(desired.clone());
        let failed = next(events, "failure", |event| {
            matches!(
                event,
                Event::Failed {
                    step: StepKind::Resize,
                    ..
                }
            )
        });
        let Event::Failed { next_try, .. } = &failed else {
            unreachable!("just matched");
        };
        assert!(next_try.is_some(), "{failed}");
        desired.insert(id("well"), &lun(2)).unwrap();
        reconciler.set(desired.clone());
        let limit = Deadline::after(LIMIT);
        reconciler.wait_attached(&id("well"), limit).unwrap();
        let passed = Deadline::after(Duration::ZERO);
        let small = reconciler.wait_attached(&grows, passed).unwrap_err();
        let last = small.last_seen().unwrap_or_default();
        println!("{small}: {last}");
        assert!(last.contains(&GIB.to_string()), "{last}");

        target.set("virtual_gb", 1);
        let there = reconciler.wait_attached(&grows, limit).unwrap();
        assert_eq!(there.size, Some(GIB));
        let disk = there
            .node
            .as_ref()
            .and_then(|node| node.file_name())
            .unwrap();
        let sectors = Path::new("/sys/block").join(disk).join("size");
        let sectors = fs::read_to_string(sectors).unwrap();
        assert_eq!(sectors.trim().parse::<u64>().unwrap() * 512, GIB);
        next(
            events,
            "growth",
            |event| matches!(event, Event::Resized { size: GIB, old_size, .. } if *old_size < GIB),
        );
        // What is larger than it is wanted stays as it is.
        desired.set_min_size(&grows, Some(1)).unwrap();
        reconciler.set(desired);
        let there = reconciler.wait_attached(&grows, limit).unwrap();
        assert_eq!(there.size, Some(GIB));
        assert!(reconciler.plan().is_empty(), "{}", reconciler.plan());
    });
    assert_eq!(target.devices(), [] as [&str; 0]);
}
