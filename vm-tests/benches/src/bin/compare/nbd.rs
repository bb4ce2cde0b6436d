//! One export of one server, attached by four clients.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lunbd::engine::Phase;
use lunbd::{AttachRequest, Engine, Source};
use vm_bench::figures::Row;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::{self, udevd};

use crate::rounds::{AttachMethod, Rounds};

/// The module's default number of devices.
const DEVICES: u32 = 16;
const SIZE: &str = "64M";
const SECTORS: &str = "131072";

pub(crate) fn compare(rounds: usize) -> Vec<Row> {
    let _module = NbdModule::load(DEVICES);
    let server = NbdServer::nbdkit(At::unix(), &["memory", SIZE]);
    let At::Unix(socket) = server.at() else {
        panic!("asked for a unix socket");
    };
    // qemu-nbd keeps a socket in this directory, which a package's script would have made.
    fs::create_dir_all("/var/lock").expect("/var/lock");
    let uri = server.uri("");
    Rounds::of(rounds).take(&mut [
        &mut InProcess {
            engine: engine(),
            source: uri.parse().expect("a source"),
            disk: String::new(),
        },
        &mut LunbdCommand {
            uri: uri.clone(),
            // lunbd takes the first free device, as the engine does.
            disk: "nbd0",
        },
        &mut NbdClient {
            socket: socket.clone(),
            disk: "nbd1",
        },
        &mut QemuNbd { uri, disk: "nbd2" },
    ])
}

struct InProcess {
    engine: Engine,
    source: Source,
    disk: String,
}

impl AttachMethod for InProcess {
    fn name(&self) -> &'static str {
        "lunbd, in the process"
    }

    fn attach(&mut self) -> Vec<Phase> {
        let request = AttachRequest::new(self.source.clone());
        let attachment = self.engine.attach(&request, soon()).expect("an attach");
        self.disk = attachment.nbd_index().expect("an NBD disk").name();
        attachment.phases
    }

    fn disk(&self) -> Option<String> {
        connected(&self.disk)
    }

    fn detach(&mut self) -> Vec<Phase> {
        let detachment = self.engine.detach(self.source.clone(), soon());
        detachment.expect("a detach").phases
    }

    fn is_gone(&self) -> bool {
        is_free(&self.disk)
    }
}

struct LunbdCommand {
    uri: String,
    disk: &'static str,
}

impl AttachMethod for LunbdCommand {
    fn name(&self) -> &'static str {
        "lunbd attach / detach"
    }

    fn attach(&mut self) -> Vec<Phase> {
        guest::run(&["lunbd", "attach", &self.uri]);
        Vec::new()
    }

    fn disk(&self) -> Option<String> {
        connected(self.disk)
    }

    fn detach(&mut self) -> Vec<Phase> {
        guest::run(&["lunbd", "detach", &self.uri]);
        Vec::new()
    }

    fn is_gone(&self) -> bool {
        is_free(self.disk)
    }
}

struct NbdClient {
    socket: PathBuf,
    disk: &'static str,
}

impl AttachMethod for NbdClient {
    fn name(&self) -> &'static str {
        "nbd-client; udevadm settle"
    }

    fn attach(&mut self) -> Vec<Phase> {
        let socket = self.socket.to_str().expect("a path in ASCII");
        guest::run(&["nbd-client", "-unix", socket, &node(self.disk)]);
        udevd::settle();
        Vec::new()
    }

    fn disk(&self) -> Option<String> {
        connected(self.disk)
    }

    fn detach(&mut self) -> Vec<Phase> {
        guest::run(&["nbd-client", "-d", &node(self.disk)]);
        settle_and_wait(self.disk)
    }

    fn is_gone(&self) -> bool {
        is_free(self.disk)
    }
}

struct QemuNbd {
    uri: String,
    disk: &'static str,
}

impl AttachMethod for QemuNbd {
    fn name(&self) -> &'static str {
        "qemu-nbd -c; udevadm settle"
    }

    fn attach(&mut self) -> Vec<Phase> {
        let connect = format!("--connect={}", node(self.disk));
        guest::run(&["qemu-nbd", &connect, "--format=raw", &self.uri]);
        udevd::settle();
        Vec::new()
    }

    fn disk(&self) -> Option<String> {
        connected(self.disk)
    }

    fn detach(&mut self) -> Vec<Phase> {
        guest::run(&["qemu-nbd", "--disconnect", &node(self.disk)]);
        settle_and_wait(self.disk)
    }

    fn is_gone(&self) -> bool {
        is_free(self.disk)
    }
}

/// The programs return when they have told the kernel; a caller that wants to use the device
/// again must wait until it is free.
fn settle_and_wait(disk: &str) -> Vec<Phase> {
    udevd::settle();
    // The pause is shorter than those of the guest's own waits, since it counts in the time.
    while !is_free(disk) {
        std::thread::sleep(Duration::from_millis(1));
    }
    Vec::new()
}

fn node(disk: &str) -> String {
    format!("/dev/{disk}")
}

fn attribute(disk: &str, name: &str) -> Option<String> {
    let path = Path::new("/sys/block").join(disk).join(name);
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn connected(disk: &str) -> Option<String> {
    let whole = attribute(disk, "size").as_deref() == Some(SECTORS);
    (whole && attribute(disk, "pid").is_some()).then(|| disk.to_owned())
}

pub(crate) fn is_free(disk: &str) -> bool {
    attribute(disk, "pid").is_none() && attribute(disk, "size").as_deref() == Some("0")
}
