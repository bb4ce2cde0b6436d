//! An NBD device whose server is killed while a process reads the device.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

use crate::show;

const MIB: usize = 1 << 20;

/// Attaches the device, reads it in a loop, and kills and restarts the server: the loop goes
/// on.
pub(crate) fn survives_its_server() {
    println!("\nAn NBD export of qemu-nbd, and a server that dies.\n");
    let _module = NbdModule::load(2);
    let store = random_store(8 * MIB);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let uri = server.uri("disk");
    show(&["attach", &uri, "--io-timeout", "2s"]);
    let node = PathBuf::from("/dev/nbd0");

    println!("\n$ lunbd heal --watch &");
    let mut healer = Command::new("lunbd")
        .args(["heal", "--watch", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("lunbd");
    let mut news = BufReader::new(healer.stdout.take().expect("its output")).lines();
    let mut next = || -> Value {
        let line = news.next().expect("the healer goes on").expect("a line");
        serde_json::from_str(&line).expect("its JSON")
    };
    assert_eq!(next()["outcome"], "healthy");

    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| read_until(&stop, &node));
        thread::sleep(Duration::from_secs(2));
        println!("  a loop reads all of it and adds it up, again and again");
        println!("\n$ kill -9 (qemu-nbd)");
        server.kill();
        println!("  nbd0: {}", next()["outcome"].as_str().unwrap_or("?"));
        thread::sleep(Duration::from_secs(2));
        println!("\n$ qemu-nbd ... &");
        server.start();
        let outcome = loop {
            let told = next();
            if told["outcome"] != "failed" {
                break told["outcome"].as_str().unwrap_or("?").to_owned();
            }
        };
        println!("  nbd0: {outcome}");
        thread::sleep(Duration::from_secs(4));
        stop.store(true, Ordering::Relaxed);
        let loops = reader.join().expect("the reader");
        println!(
            "  the loop ended after {} rounds without an error and with one sum, {:016x};\n  its longest wait was {:.1} s\n",
            loops.rounds,
            loops.sum,
            loops.longest.as_secs_f64()
        );
    });
    healer.kill().expect("ending the healer");
    healer.wait().expect("the healer's end");
    show(&["detach", &uri]);
}

fn random_store(length: usize) -> Store {
    let mut data = vec![0; length];
    File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut data))
        .expect("random bytes");
    let store = Store::sparse(0);
    std::fs::write(store.path(), &data).expect("the store");
    store
}

struct Loops {
    rounds: usize,
    sum: u64,
    longest: Duration,
}

/// Reads the whole device past the page cache, and adds up its words.
fn read_until(stop: &AtomicBool, node: &PathBuf) -> Loops {
    let mut page = memmap2::MmapMut::map_anon(MIB).expect("memory");
    let disk = File::options()
        .read(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(node)
        .expect("the device");
    let mut loops = Loops {
        rounds: 0,
        sum: 0,
        longest: Duration::ZERO,
    };
    while !stop.load(Ordering::Relaxed) {
        let mut sum = 0_u64;
        for part in 0..8 {
            let start = Instant::now();
            disk.read_exact_at(&mut page, (part * MIB) as u64)
                .expect("a read without an error");
            loops.longest = loops.longest.max(start.elapsed());
            let (words, _) = page.as_chunks::<8>();
            sum = words
                .iter()
                .fold(sum, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
        }
        assert!(loops.rounds == 0 || sum == loops.sum, "another sum");
        loops.sum = sum;
        loops.rounds += 1;
    }
    loops
}
