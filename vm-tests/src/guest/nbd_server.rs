//! NBD servers of other projects, and the kernel's module for their devices.

use std::fs::{self, File};
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::kmod::{DeleteModuleFlags, delete_module};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, getpgid};

use super::daemon::stands;
use super::tcp_reset;

const LIMIT: Duration = Duration::from_secs(60);

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum At {
    /// On the loopback interface.
    Tcp(SocketAddr),
    /// On a unix socket.
    Unix(PathBuf),
}

impl At {
    /// A free port of the loopback interface.
    #[must_use]
    pub fn tcp() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        Self::Tcp(listener.local_addr().expect("the port's number"))
    }

    /// A unix socket that no server uses.
    #[must_use]
    pub fn unix() -> Self {
        Self::Unix(scratch("sock"))
    }

    /// The URI of an export there.
    #[must_use]
    pub fn uri(&self, export: &str) -> String {
        match self {
            Self::Tcp(address) => format!("nbd://{address}/{export}"),
            Self::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
        }
    }

    /// Whether an NBD server sends its greeting there. To connect and disconnect would be
    /// enough, except for nbd-server, which dies of it.
    fn greets(&self) -> bool {
        let mut greeting = [0; 18];
        let read = match self {
            Self::Tcp(address) => {
                TcpStream::connect(address).and_then(|mut link| link.read_exact(&mut greeting))
            }
            Self::Unix(path) => {
                UnixStream::connect(path).and_then(|mut link| link.read_exact(&mut greeting))
            }
        };
        read.is_ok() && greeting.starts_with(b"NBDMAGIC")
    }
}

/// A path below `/tmp` that was not returned before.
fn scratch(suffix: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    PathBuf::from(format!("/tmp/nbd-{}-{number}.{suffix}", std::process::id()))
}

/// A file of zeroes in memory, for a server to serve; removed on drop.
#[derive(Debug)]
pub struct Store(PathBuf);

impl Store {
    /// The file takes only as much memory as is written to it.
    #[must_use]
    pub fn sparse(bytes: u64) -> Self {
        super::enter();
        let path = scratch("img");
        let file = File::create(&path).expect("a store");
        file.set_len(bytes).expect("the store's size");
        Self(path)
    }

    /// Filled with one byte.
    #[must_use]
    pub fn filled(bytes: usize, with: u8) -> Self {
        let store = Self::sparse(0);
        fs::write(&store.0, vec![with; bytes]).expect("filling the store");
        store
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _gone_already = fs::remove_file(&self.0);
    }
}

/// How a server shows that it accepts connections.
#[derive(Debug)]
enum Ready {
    /// It greets a client.
    Greets,
    /// It then writes this file.
    Writes(PathBuf),
}

/// A running server; dropping it kills it.
#[derive(Debug)]
pub struct NbdServer {
    ready: Ready,
    at: At,
    command: Vec<String>,
    /// These are removed with the server. The last one has a daemon's pid.
    files: Vec<PathBuf>,
    /// The process group of the server and of everything that it started.
    group: Option<Pid>,
}

impl NbdServer {
    /// `qemu-nbd` of a file, for any number of clients. `arguments` come before the file.
    #[must_use]
    pub fn qemu_nbd(at: At, export: &str, file: &Path, arguments: &[&str]) -> Self {
        let mut command = words(&["qemu-nbd", "--persistent", "--shared=0", "--format=raw"]);
        command.push(format!("--export-name={export}"));
        match &at {
            At::Tcp(address) => {
                command.push(format!("--bind={}", address.ip()));
                command.push(format!("--port={}", address.port()));
            }
            At::Unix(path) => command.push(format!("--socket={}", path.display())),
        }
        command.extend(words(arguments));
        // qemu-nbd complains of a client that only checks whether it listens.
        let listens = scratch("listens");
        command.push(format!("--pid-file={}", listens.display()));
        command.push(file.display().to_string());
        Self::start_when(Ready::Writes(listens), at, command, Vec::new())
    }

    /// `nbdkit`. `arguments` are filters, the plugin and the plugin's own arguments.
    #[must_use]
    pub fn nbdkit(at: At, arguments: &[&str]) -> Self {
        let mut command = words(&["nbdkit", "--foreground"]);
        match &at {
            At::Tcp(address) => {
                command.push(format!("--ipaddr={}", address.ip()));
                command.push(format!("--port={}", address.port()));
            }
            At::Unix(path) => command.push(format!("--unix={}", path.display())),
        }
        command.extend(words(arguments));
        Self::start_new(at, command, Vec::new())
    }

    /// `nbd-server` of files, each under a name, on a port of the loopback interface (on unix
    /// sockets it sends no greeting here). `options` are lines of each export's section. It looks
    /// for a prime number as it starts, which takes up to ten seconds under emulation.
    #[must_use]
    pub fn of_nbd_server(exports: &[(&str, &Path)], options: &[&str]) -> Self {
        Self::configured(exports, "", options)
    }

    /// The same over TLS only, with the server's certificate in this directory.
    #[must_use]
    pub fn of_nbd_server_with_tls(exports: &[(&str, &Path)], certificates: &Path) -> Self {
        let path = |name: &str| certificates.join(name).display().to_string();
        let (authority, certificate) = (path("ca-cert.pem"), path("server-cert.pem"));
        let key = path("server-key.pem");
        let tls = format!(
            "force_tls = true\ncacertfile = {authority}\ncertfile = {certificate}\nkeyfile = {key}"
        );
        Self::configured(exports, &tls, &["flush = true"])
    }

    fn configured(exports: &[(&str, &Path)], generic: &str, options: &[&str]) -> Self {
        let at = At::tcp();
        let At::Tcp(address) = &at else {
            unreachable!("just made");
        };
        let listen = format!(
            "listenaddr = {}\nport = {}\nallowlist = true",
            address.ip(),
            address.port()
        );
        let options = options.join("\n");
        let sections = exports.iter().map(|(export, file)| {
            let file = file.display();
            format!("[{export}]\nexportname = {file}\n{options}\n")
        });
        let sections: String = sections.collect();
        let configuration = format!("[generic]\n{listen}\n{generic}\n{sections}");
        let path = scratch("conf");
        fs::write(&path, configuration).expect("nbd-server's configuration");
        let pid_file = scratch("pid");
        let mut command = words(&["nbd-server", "-C"]);
        command.push(path.display().to_string());
        command.push("-p".to_owned());
        command.push(pid_file.display().to_string());
        Self::start_new(at, command, vec![path, pid_file])
    }

    fn start_new(at: At, command: Vec<String>, files: Vec<PathBuf>) -> Self {
        Self::start_when(Ready::Greets, at, command, files)
    }

    fn start_when(ready: Ready, at: At, command: Vec<String>, files: Vec<PathBuf>) -> Self {
        super::enter();
        let mut server = Self {
            ready,
            at,
            command,
            files,
            group: None,
        };
        server.start();
        server
    }

    /// Starts the server at its previous address and returns when it accepts connections.
    pub fn start(&mut self) {
        assert!(self.group.is_none(), "the server runs already");
        if let At::Unix(path) = &self.at {
            let _not_there = fs::remove_file(path);
        }
        if let Ready::Writes(path) = &self.ready {
            let _not_there = fs::remove_file(path);
        }
        if let Some(pid_file) = self.files.last() {
            // It may have the pid of the daemon that was killed.
            let _not_there = fs::remove_file(pid_file);
        }
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::null());
        // Some servers have a process for each client.
        command.process_group(0);
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{:?}: {error}", self.command));
        let what = format!("{} to listen", self.command.join(" "));
        let group = match self.files.last() {
            // It leaves a daemon behind, in a process group of its own. A newer nbd-server does
            // not lead that group.
            Some(pid_file) => {
                let status = child.wait().expect("the daemon's parent");
                assert!(status.success(), "{what}: {status}");
                super::wait_until(&what, LIMIT, || {
                    let pid = fs::read_to_string(pid_file).ok()?.trim().parse().ok()?;
                    getpgid(Some(Pid::from_raw(pid))).ok()
                })
            }
            None => Pid::from_raw(i32::try_from(child.id()).expect("a pid")),
        };
        self.group = Some(group);
        super::wait_until(&what, LIMIT, || {
            if let Ok(Some(status)) = child.try_wait() {
                assert!(!self.files.is_empty(), "{what}: {status}");
            }
            self.is_ready().then_some(())
        });
    }

    fn is_ready(&self) -> bool {
        match &self.ready {
            Ready::Greets => self.at.greets(),
            Ready::Writes(path) => path.exists(),
        }
    }

    /// The server's address.
    #[must_use]
    pub fn at(&self) -> &At {
        &self.at
    }

    /// The URI of one of its exports.
    #[must_use]
    pub fn uri(&self, export: &str) -> String {
        self.at.uri(export)
    }

    /// How many connections to it are established.
    #[must_use]
    pub fn connections(&self) -> usize {
        match &self.at {
            At::Tcp(address) => tcp_reset::clients_of(*address).len(),
            At::Unix(path) => {
                // In `/proc/net/unix` the server's end has the path, and is connected.
                let table = fs::read_to_string("/proc/net/unix").expect("the unix sockets");
                let path = path.to_str();
                let is_connected = |line: &&str| {
                    let fields: Vec<&str> = line.split_whitespace().collect();
                    fields.get(5) == Some(&"03") && fields.get(7).copied() == path
                };
                table.lines().filter(is_connected).count()
            }
        }
    }

    /// The clients that are connected over TCP, in a stable order.
    #[must_use]
    pub fn tcp_clients(&self) -> Vec<SocketAddr> {
        let At::Tcp(address) = &self.at else {
            panic!("not on TCP: {:?}", self.at);
        };
        let mut clients = tcp_reset::clients_of(*address);
        clients.sort_unstable();
        clients
    }

    /// Resets the TCP connection of one client, as a firewall does that lost its state.
    pub fn cut(&self, client: SocketAddr) {
        let At::Tcp(address) = &self.at else {
            panic!("not on TCP: {:?}", self.at);
        };
        tcp_reset::cut_connection(client, *address);
    }

    /// Stops the server and everything that it started (SIGSTOP). None of them answers any more
    /// when this returns.
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let Some(group) = self.group else {
            return;
        };
        let is_ours = |pid: &i32| getpgid(Some(Pid::from_raw(*pid))) == Ok(group);
        super::wait_until("the server to stand", LIMIT, || {
            let names = super::entries("/proc").into_iter();
            let mut pids = names.filter_map(|name| name.parse().ok()).filter(is_ours);
            pids.all(stands).then_some(())
        });
    }

    /// Lets it continue (SIGCONT).
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills the server and everything that it started, at once (SIGKILL), if it runs. None of
    /// them is left when this returns.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        if let Some(group) = self.group.take() {
            super::wait_until("the server to be gone", LIMIT, || {
                // Reap our own children; pid 1 reaps the others.
                let _none_of_ours =
                    waitpid(Pid::from_raw(-group.as_raw()), Some(WaitPidFlag::WNOHANG));
                killpg(group, None).err()
            });
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            let _ended_already = killpg(group, signal);
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(group) = self.group
        {
            // Show whether the server has ended.
            let ended = waitpid(group, Some(WaitPidFlag::WNOHANG));
            eprintln!("{:?}: {ended:?}", self.command);
        }
        self.kill();
        if let At::Unix(path) = &self.at {
            let _gone_already = fs::remove_file(path);
        }
        for file in &self.files {
            let _gone_already = fs::remove_file(file);
        }
        if let Ready::Writes(path) = &self.ready {
            let _gone_already = fs::remove_file(path);
        }
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The loaded `nbd` module; dropping it unloads it.
#[derive(Debug)]
pub struct NbdModule(());

impl NbdModule {
    /// Loads it with devices 0 to `devices - 1`, and waits until udev has finished with them.
    #[must_use]
    pub fn load(devices: u32) -> Self {
        super::enter();
        super::modprobe("nbd", &[&format!("nbds_max={devices}")]);
        super::udevd::settle();
        Self(())
    }

    /// The same if the driver keeps backend ids.
    #[must_use]
    pub fn with_backend_ids(devices: u32) -> Self {
        if super::kernel() < (5, 14) {
            super::skip("no backend ids before 5.14");
        }
        Self::load(devices)
    }
}

/// How many requests the kernel has for the device.
#[must_use]
pub fn in_flight(node: &Path) -> u64 {
    let name = node.file_name().and_then(|name| name.to_str());
    let name = name.expect("a device node");
    let counts = fs::read_to_string(format!("/sys/block/{name}/inflight"));
    let counts = counts.expect("the device's requests");
    let counts = counts.split_whitespace();
    counts
        .map(|count| count.parse::<u64>().expect("a count"))
        .sum()
}

/// The backend ids of the connected NBD devices.
#[must_use]
pub fn backends() -> Vec<String> {
    let mut backends = Vec::new();
    for name in super::entries("/sys/block") {
        let dir = Path::new("/sys/block").join(&name);
        if !name.starts_with("nbd") {
            continue;
        }
        // A disconnect removes the id after the pid. So a device that disconnects during the
        // read does not count as one without an id.
        let backend = fs::read_to_string(dir.join("backend")).unwrap_or_default();
        if dir.join("pid").exists() {
            backends.push(backend.trim_end().to_owned());
        }
    }
    backends.sort();
    backends
}

impl Drop for NbdModule {
    fn drop(&mut self) {
        // udevd's probe may have a device open for a moment.
        let start = std::time::Instant::now();
        while let Err(errno) = delete_module(c"nbd", DeleteModuleFlags::O_NONBLOCK) {
            if errno == nix::errno::Errno::ENOENT {
                return;
            }
            if start.elapsed() > LIMIT {
                eprintln!("nbd stays loaded: {errno}");
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
