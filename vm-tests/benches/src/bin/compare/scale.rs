//! One attach and one detach beside more and more attached devices: the cost must not depend
//! on the other devices.

use std::time::{Duration, Instant};

use lunbd::{AttachRequest, Engine, Source};
use nix::sys::resource::{Resource, setrlimit};
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
/// The most clients of one server, since each takes a descriptor.
const CLIENTS: u32 = 250;

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
    beside("SCSI", &SCSI_OTHERS, &wanted, rounds, |others| {
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
    let servers: Vec<NbdServer> = (0..=most.div_ceil(CLIENTS))
        .map(|_| NbdServer::nbdkit(At::unix(), &["--threads=1", "memory", "1M"]))
        .collect();
    let source = |server: u32, name: &str| -> Source {
        let server = &servers[usize::try_from(server).expect("a small number")];
        server.uri(name).parse().expect("a source")
    };
    let wanted = source(most.div_ceil(CLIENTS), "wanted");
    let mut attached = 0;
    let ways = beside("NBD", &NBD_OTHERS, &wanted, rounds, |others| {
        let another = engine();
        for number in attached..others {
            let other = source(number / CLIENTS, &format!("v{number}"));
            attach(&another, &other);
        }
        attached = others;
    });
    // The module stays loaded until the machine ends.
    std::mem::forget(module);
    ways
}

/// Measures each way beside each number of other devices, which `bring` has attached when it
/// returns.
fn beside(
    kind: &str,
    numbers: &[u32],
    wanted: &Source,
    rounds: usize,
    mut bring: impl FnMut(u32),
) -> Vec<ScaleWay> {
    let own = engine();
    let named = |way: &str| ScaleWay {
        way: format!("{kind}, {way}"),
        beside: Vec::new(),
    };
    let mut ways = [
        named("lunbd in the process"),
        named("lunbd attach / detach"),
    ];
    for &others in numbers {
        let begun = Instant::now();
        bring(others);
        udevd::settle();
        println!(
            "{kind}: {others} others, brought in {:.1} s",
            begun.elapsed().as_secs_f64()
        );
        let in_the_process: AttachAndDetach<'_> =
            (&|| attach(&own, wanted), &|| detach(&own, wanted));
        let uri = wanted.to_string();
        let run = |verb: &str| drop(guest::run(&["lunbd", verb, &uri]));
        let by_command: AttachAndDetach<'_> = (&|| run("attach"), &|| run("detach"));
        for (way, taken) in [in_the_process, by_command].into_iter().zip(&mut ways) {
            let beside = take(others, way, rounds);
            print(&taken.way, &beside);
            taken.beside.push(beside);
        }
    }
    ways.into()
}

type AttachAndDetach<'a> = (&'a dyn Fn(), &'a dyn Fn());

fn take(others: u32, (attach, detach): AttachAndDetach<'_>, rounds: usize) -> Beside {
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
    let syscalls = SystemCalls::of_this_process();
    for _ in 0..rounds {
        for (call, counts) in [(attach, &mut *attach_calls), (detach, &mut *detach_calls)] {
            let before = syscalls.count();
            call();
            #[expect(clippy::cast_precision_loss, reason = "some thousands")]
            counts.push((syscalls.count() - before) as f64);
            quiet();
        }
    }
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
