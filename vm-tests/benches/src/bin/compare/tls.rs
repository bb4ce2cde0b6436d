//! One export without TLS, with the kernel's TLS and with nbd-client's proxy.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::Instant;

use lunbd::{AttachRequest, Engine, Source};
use nix::libc::O_DIRECT;
use vm_bench::figures::{Series, Tls, TlsLoad, TlsWay};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::certificates::Certificates;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::tls_servers::{address, source};
use vm_tests::guest::{self, udevd};

use crate::rounds::machine_cpu;

const SIZE: &str = "64M";
const MIB: usize = 1 << 20;
/// `O_DIRECT` needs memory that is aligned to a block.
const ALIGNMENT: usize = 4096;

struct Load {
    name: &'static str,
    writes: bool,
    request: usize,
    requests: usize,
}

const LOADS: [Load; 4] = [
    load("writes of 4 KiB", true, 4096, 1024),
    load("reads of 4 KiB", false, 4096, 1024),
    load("writes of 1 MiB", true, MIB, 32),
    load("reads of 1 MiB", false, MIB, 32),
];

const fn load(name: &'static str, writes: bool, request: usize, requests: usize) -> Load {
    Load {
        name,
        writes,
        request,
        requests,
    }
}

pub(crate) fn measure(rounds: usize) -> Tls {
    let _module = NbdModule::load(4);
    let certificates = Certificates::new("tls");
    let directory = format!("--tls-certificates={}", certificates.path().display());
    let plain = NbdServer::nbdkit(At::tcp(), &["memory", SIZE]);
    let secured = NbdServer::nbdkit(At::tcp(), &["--tls=require", &directory, "memory", SIZE]);
    let engine = engine();
    let by_kernel = source(address(&secured), "disk", &certificates);
    let sources = [plain.uri("disk").parse().expect("a source"), by_kernel];
    let nodes = sources.each_ref().map(|source| attach(&engine, source));
    let proxied = PathBuf::from("/dev/nbd3");
    connect_by_proxy(&secured, &certificates);
    let disks = [&nodes[0], &nodes[1], &proxied].map(|node| {
        let disk = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(O_DIRECT)
            .open(node);
        disk.expect("the device")
    });
    let mut figures = [(); 3].map(|()| [(); LOADS.len()].map(|()| (Vec::new(), Vec::new())));
    // The first round is not counted.
    for round in 0..=rounds {
        for (disk, of_way) in disks.iter().zip(&mut figures) {
            for (load, (throughput, cpu)) in LOADS.iter().zip(of_way) {
                let (mib_a_second, cpu_a_gib) = carry(disk, load);
                if round > 0 {
                    throughput.push(mib_a_second);
                    cpu.push(cpu_a_gib);
                }
            }
        }
    }
    drop(disks);
    guest::run(&["nbd-client", "-d", "/dev/nbd3"]);
    for source in sources {
        engine.detach(source, soon()).expect("a detach");
    }
    let names = [
        "without TLS, lunbd",
        "the kernel's TLS, lunbd",
        "a proxy's TLS, nbd-client",
    ];
    let ways = names.into_iter().zip(figures).map(|(way, loads)| TlsWay {
        way: way.to_owned(),
        loads: (LOADS.iter().zip(loads))
            .map(|(load, (throughput, cpu))| TlsLoad {
                load: load.name.to_owned(),
                throughput: Series::of(throughput),
                cpu: Series::of(cpu),
            })
            .collect(),
    });
    Tls {
        rounds,
        ways: ways.collect(),
    }
}

fn attach(engine: &Engine, source: &Source) -> PathBuf {
    let request = AttachRequest::new(source.clone());
    engine.attach(&request, soon()).expect("an attach").node
}

fn connect_by_proxy(server: &NbdServer, certificates: &Certificates) {
    let (address, authority) = (address(server), certificates.path().join("ca-cert.pem"));
    let (host, port) = (address.ip().to_string(), address.port().to_string());
    let authority = authority.to_str().expect("a path in ASCII");
    let named = ["nbd-client", &host, &port, "/dev/nbd3", "-N", "disk"];
    let secured = [
        "-enable-tls",
        "-cacertfile",
        authority,
        "-tlshostname",
        &host,
    ];
    guest::run(&[&named[..], &secured].concat());
    udevd::settle();
}

/// Runs the load, and returns MiB a second and seconds of processor time a GiB.
fn carry(disk: &File, load: &Load) -> (f64, f64) {
    let mut memory = vec![7; load.request + ALIGNMENT];
    let first = memory.as_ptr().align_offset(ALIGNMENT);
    let block = &mut memory[first..first + load.request];
    let (start, cpu_before) = (Instant::now(), machine_cpu());
    for number in 0..load.requests {
        let at = u64::try_from(number * load.request).expect("below the device's end");
        let done = if load.writes {
            disk.write_all_at(block, at)
        } else {
            disk.read_exact_at(block, at)
        };
        done.expect("the device serves");
    }
    let took = start.elapsed().as_secs_f64();
    let cpu = machine_cpu().saturating_sub(cpu_before).as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "some MiB")]
    let mib = (load.request * load.requests) as f64 / MIB as f64;
    (mib / took, cpu / mib * 1024.0)
}

pub(crate) fn print(tls: &Tls) {
    println!("One NBD device over TCP, one request after the other, O_DIRECT");
    for way in &tls.ways {
        for load in &way.loads {
            println!(
                "  {:<28} {:<16} {:>8.1} MiB/s, {:>7.1} s of processor time a GiB",
                way.way, load.load, load.throughput.median, load.cpu.median
            );
        }
    }
}
