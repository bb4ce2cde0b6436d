//! One attach and one detach beside more and more attached devices: the cost must not depend
//! on the other devices.

use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use lunbd::{AttachRequest, Engine, Source};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use vm_bench::figures::{Beside, Call, Scale, ScaleWay, Series};
use vm_tests::guest::agent::{engine, soon, unit};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::system_calls::SystemCalls;
use vm_tests::guest::{self, ScsiDebug, udevd};

use crate::rounds::millis;

const NBD_OTHERS: [u32; 4] = [0, 64, 256, 1000];
const SCSI_OTHERS: [u32; 3] = [0, 64, 256];
/// Rounds that are not counted: a process must have read each device once before it knows it.
const WARMING: usize = 3;
/// The system calls differ by a few from round to round, and the time by half.
const COUNTED_ROUNDS: usize = 5;
/// The most clients of one server, since each takes a descriptor.
const CLIENTS: u32 = 250;
/// The most descriptors of one message (`include/net/scm.h`, `SCM_MAX_FD`).
const PASSED_AT_ONCE: usize = 253;

pub(crate) fn measure(rounds: usize) -> Scale {
    // An engine takes a descriptor for each link.
    setrlimit(Resource::RLIMIT_NOFILE, 8192, 8192).expect("descriptors");
    let mut ways = scsi(rounds);
    ways.extend(nbd(rounds));
    Scale { rounds, ways }
}

fn scsi(rounds: usize) -> Vec<ScaleWay> {
    let most = SCSI_OTHERS.iter().max().expect("a number of others");
    let target = ScsiDebug::with_luns(most + 2);
    // The first LUN that the others leave.
    let wanted = unit(&target, u64::from(most + 1));
    let mut attached = 0;
    let own = engine();
    let ways = [
        in_the_process("SCSI", &own, &wanted),
        by_command("SCSI", &wanted),
    ];
    beside(&SCSI_OTHERS, &ways, rounds, |others| {
        for lun in attached..others {
            target.scan(&format!("0 0 {lun}"));
            target.wait_for_disk(u64::from(lun));
        }
        attached = others;
    })
}

fn nbd(rounds: usize) -> Vec<ScaleWay> {
    let module = NbdModule::load(16);
    let most = NBD_OTHERS.iter().max().expect("a number of others");
    let server = start_server();
    let wanted = source(&server, "wanted");
    let own = engine();
    let mut ways = beside(
        &[0, *most],
        &[in_the_process(
            "NBD, with connections and no other device",
            &own,
            &wanted,
        )],
        rounds,
        connections_without_devices(),
    );
    let (mut attached, mut servers) = (0, OtherServers::default());
    ways.extend(beside(
        &NBD_OTHERS,
        &[
            in_the_process("NBD", &own, &wanted),
            by_command("NBD", &wanted),
        ],
        rounds,
        |others| {
            let another = engine();
            for number in attached..others {
                let other = source(servers.of(number), &format!("v{number}"));
                attach(&another, &other);
            }
            attached = others;
        },
    ));
    // The module stays loaded until the machine ends.
    std::mem::forget(module);
    ways
}

fn start_server() -> NbdServer {
    NbdServer::nbdkit(At::unix(), &["--threads=1", "memory", "1M"])
}

fn source(server: &NbdServer, name: &str) -> Source {
    server.uri(name).parse().expect("a source")
}

/// The servers of the other devices. Each is started for its first client.
#[derive(Default)]
struct OtherServers(Vec<NbdServer>);

impl OtherServers {
    fn of(&mut self, client: u32) -> &NbdServer {
        let place = usize::try_from(client / CLIENTS).expect("a small number");
        while self.0.len() <= place {
            self.0.push(start_server());
        }
        &self.0[place]
    }
}

/// Opens as many connections to servers as so many devices have. Like those of devices, no
/// process has lunbd's ends of them open: they are in messages that no process has received.
fn connections_without_devices() -> impl FnMut(u32) {
    let (sender, receiver) = UnixStream::pair().expect("a pair of sockets");
    let mut servers = OtherServers::default();
    move |others| {
        let _stays_open = &receiver;
        let clients: Vec<u32> = (0..others).collect();
        for clients_of_one_message in clients.chunks(PASSED_AT_ONCE) {
            let connect = |client: &u32| {
                let At::Unix(socket) = servers.of(*client).at() else {
                    panic!("the servers are at unix sockets");
                };
                UnixStream::connect(socket).expect("a connection")
            };
            let connections: Vec<_> = clients_of_one_message.iter().map(connect).collect();
            let passed: Vec<_> = connections.iter().map(AsRawFd::as_raw_fd).collect();
            let passed = [ControlMessage::ScmRights(&passed)];
            let (to, text) = (sender.as_raw_fd(), [IoSlice::new(b"connections")]);
            sendmsg::<()>(to, &text, &passed, MsgFlags::MSG_DONTWAIT, None).expect("a message");
        }
    }
}

/// One way to attach and detach one more device.
struct Way<'a> {
    name: String,
    attach: Box<dyn Fn() + 'a>,
    detach: Box<dyn Fn() + 'a>,
}

fn in_the_process<'a>(kind: &str, own: &'a Engine, wanted: &'a Source) -> Way<'a> {
    Way {
        name: format!("{kind}, lunbd in the process"),
        attach: Box::new(|| attach(own, wanted)),
        detach: Box::new(|| detach(own, wanted)),
    }
}

fn by_command<'a>(kind: &str, wanted: &Source) -> Way<'a> {
    let run = |verb: &'static str| {
        let uri = wanted.to_string();
        Box::new(move || drop(guest::run(&["lunbd", verb, &uri])))
    };
    Way {
        name: format!("{kind}, lunbd attach / detach"),
        attach: run("attach"),
        detach: run("detach"),
    }
}

/// Measures each way beside each number of other devices, which `bring` has attached when it
/// returns.
fn beside(
    numbers: &[u32],
    ways: &[Way<'_>],
    rounds: usize,
    mut bring: impl FnMut(u32),
) -> Vec<ScaleWay> {
    let named = |way: &Way<'_>| ScaleWay {
        way: way.name.clone(),
        beside: Vec::new(),
    };
    let mut taken: Vec<ScaleWay> = ways.iter().map(named).collect();
    for &others in numbers {
        let begun = Instant::now();
        bring(others);
        udevd::settle();
        println!(
            "{others} others, brought in {:.1} s",
            begun.elapsed().as_secs_f64()
        );
        for (way, taken) in ways.iter().zip(&mut taken) {
            let beside = take(others, way, rounds);
            print(&taken.way, &beside);
            taken.beside.push(beside);
        }
    }
    taken
}

fn take(others: u32, way: &Way<'_>, rounds: usize) -> Beside {
    let Way { attach, detach, .. } = way;
    for _ in 0..WARMING {
        attach();
        udevd::settle();
        detach();
        udevd::settle();
    }
    let mut figures = [(); 4].map(|()| Vec::new());
    let [attach_ms, detach_ms, attach_calls, detach_calls] = &mut figures;
    for _ in 0..rounds {
        for (call, times) in [(attach, &mut *attach_ms), (detach, &mut *detach_ms)] {
            let start = Instant::now();
            call();
            times.push(millis(start.elapsed()));
            quiet();
        }
    }
    for _ in 0..rounds.min(COUNTED_ROUNDS) {
        for (call, counts) in [(attach, &mut *attach_calls), (detach, &mut *detach_calls)] {
            udevd::settle_and_end_workers();
            let syscalls = SystemCalls::of_this_process();
            let before = syscalls.count();
            call();
            #[expect(clippy::cast_precision_loss, reason = "some thousands")]
            counts.push((syscalls.count() - before) as f64);
        }
    }
    quiet();
    let [attach_ms, detach_ms, attach_calls, detach_calls] = figures.map(Series::of);
    Beside {
        others,
        attach: Call {
            wall_ms: attach_ms,
            syscalls: attach_calls,
        },
        detach: Call {
            wall_ms: detach_ms,
            syscalls: detach_calls,
        },
    }
}

/// Waits until udev is done and the hub has read its events.
fn quiet() {
    udevd::settle();
    std::thread::sleep(Duration::from_millis(50));
}

fn attach(engine: &Engine, source: &Source) {
    let request = AttachRequest::new(source.clone());
    engine.attach(&request, soon()).expect("an attach");
}

fn detach(engine: &Engine, source: &Source) {
    engine.detach(source.clone(), soon()).expect("a detach");
}

fn print(way: &str, beside: &Beside) {
    println!(
        "  {way}: attach {:.0} system calls, {:.1} ms; detach {:.0} system calls, {:.1} ms",
        beside.attach.syscalls.median,
        beside.attach.wall_ms.median,
        beside.detach.syscalls.median,
        beside.detach.wall_ms.median
    );
}
