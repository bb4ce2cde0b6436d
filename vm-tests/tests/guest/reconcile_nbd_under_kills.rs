//! Many volumes that an agent keeps as wanted while it is killed again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vm_tests::guest::agent::{engine, unit};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::exports::{Exports, assert_mark, write_mark};
use vm_tests::guest::nbd_server::{NbdModule, backends};
use vm_tests::guest::{self, ScsiDebug};

/// The limit of a wait, also on a machine that is several times slower.
const LIMIT: Duration = Duration::from_secs(900);

/// A small random generator, so that a run can be repeated by its seed.
struct Chance {
    seed: u64,
    state: u64,
}

impl Chance {
    fn new() -> Self {
        let seed = guest::seed();
        println!("LUNBD_VM_SEED={seed}");
        // Consecutive seeds give distant states here, and no state is 0.
        let state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self { seed, state }
    }

    fn below(&mut self, limit: u64) -> u64 {
        // xorshift64*
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }
}

/// The wanted volumes: the source of each, and whether it is read-only.
type Wanted = BTreeMap<String, (String, bool)>;

/// The agent on its file and its journal.
struct Node {
    place: Directory,
    agent: Option<Child>,
    kills: u32,
}

impl Node {
    fn new() -> Self {
        let place = Directory::new("node");
        Self {
            place,
            agent: None,
            kills: 0,
        }
    }

    fn file(&self) -> PathBuf {
        self.place.join("desired.json")
    }

    fn journal(&self) -> PathBuf {
        self.place.join("journal")
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
        let beside = self.place.join("desired.new");
        fs::write(&beside, json!({ "volume": volumes }).to_string()).unwrap();
        fs::rename(&beside, self.file()).unwrap();
    }

    fn start(&mut self) {
        let events = self.place.join("events");
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

    /// Stops the agent as a service manager does.
    fn end(&mut self) {
        let mut agent = self.agent.take().unwrap();
        // The signal would kill an agent that has just started and does not handle it yet.
        let lock = self.journal().join("journal.lock");
        guest::wait_until("the agent to have the journal", LIMIT, || {
            let holder = fs::read_to_string(&lock).ok()?;
            (holder == agent.id().to_string()).then_some(())
        });
        let pid = nix::unistd::Pid::from_raw(agent.id().try_into().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(agent.wait().unwrap().success());
    }

    /// The records of volumes that are not detached, as they are on the disk.
    fn records(&self) -> BTreeMap<String, Value> {
        let mut records = BTreeMap::new();
        for name in guest::entries(self.journal()) {
            if Path::new(&name).extension() != Some("json".as_ref()) {
                continue;
            }
            // The record may go meanwhile.
            let Ok(text) = fs::read_to_string(self.journal().join(name)) else {
                continue;
            };
            let (_, body) = text.split_once('\n').unwrap();
            let record: Value = serde_json::from_str(body).unwrap();
            // The record of a proven detach stays.
            if !record["detached"].is_null() {
                continue;
            }
            let volume = record["volume"].as_str().unwrap().to_owned();
            records.insert(volume, record);
        }
        records
    }

    /// Whether the journal says that all volumes are as wanted.
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

    /// Kills the agent `kills` times, each time at a random moment of its work. A whole sweep
    /// continues until all volumes are as wanted. Then waits for the wanted state.
    fn converge(&mut self, wanted: &Wanted, kills: u32, chance: &mut Chance) {
        let start = Instant::now();
        self.want(wanted);
        if self.agent.is_none() {
            self.start();
        }
        let mut killed = 0;
        while killed < kills || guest::sweeps_are_whole() && !self.is_reached(wanted) {
            // Each agent gets more time: otherwise progress would only be as fast as its
            // starts.
            let most = 4000 + 200 * u64::from(killed);
            std::thread::sleep(Duration::from_millis(100 + chance.below(most)));
            self.kill();
            killed += 1;
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
            "{} volumes as they are wanted after {:.1} s and {killed} kills",
            wanted.len(),
            start.elapsed().as_secs_f64()
        );
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let events = fs::read_to_string(self.place.join("events")).unwrap_or_default();
            let lines: Vec<&str> = events.lines().collect();
            let last = lines.len().saturating_sub(60);
            println!("the agent's last words:\n{}", lines[last..].join("\n"));
        }
    }
}

fn assert_each_is_attached_once() {
    let backends = backends();
    let distinct: BTreeSet<&String> = backends.iter().collect();
    assert_eq!(distinct.len(), backends.len(), "{backends:?}");
}

/// Requires that sysfs shows the wanted devices, and nothing else.
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

#[test]
fn volumes_under_an_agent_that_is_killed_again_and_again_end_as_they_are_wanted() {
    let whole = guest::sweeps_are_whole();
    if whole {
        guest::sweep_time_limit();
    } else {
        guest::time_limit(Duration::from_secs(2400));
    }
    let mut chance = Chance::new();
    // Half of them are NBD. With fewer than 32 not each kind of change below would occur.
    let half = if whole { 100 } else { 32 };
    let kills = if whole { 5 } else { 3 };
    let _module = NbdModule::with_backend_ids(u32::try_from(half + 8).unwrap());
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

    // Half of them change: some go and their sources move to others, some swap places, some
    // move to an unused source, and some become read-only.
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
    guest::tell(&format!(
        "{} volumes, {} kills, LUNBD_VM_SEED={}",
        half * 2,
        node.kills,
        chance.seed
    ));
    node.end();
    assert_eq!(
        guest::agent::journal_files(&node.journal()),
        [] as [&str; 0]
    );
    let mut leases = guest::entries("/run/lunbd");
    leases.retain(|name| Path::new(name).extension() == Some("lock".as_ref()));
    // A lock file stays when its holder is killed, and the next agent removes it.
    assert_eq!(leases, [] as [&str; 0]);

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
