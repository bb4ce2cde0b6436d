//! NBD servers that are not ours, and the kernel's module for their devices.

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

    /// A unix socket that nobody uses.
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

    /// Whether somebody there greets as NBD servers do. To connect and leave
    /// would do, but for nbd-server, which dies of it.
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

/// A path below `/tmp` that was never handed out before.
fn scratch(suffix: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    PathBuf::from(format!("/tmp/nbd-{}-{number}.{suffix}", std::process::id()))
}

/// A file of zeroes in memory, for a server to serve; removed on drop.
#[derive(Debug)]
pub struct Store(PathBuf);

impl Store {
    /// Takes as much memory as is written to it.
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

    /// Where it is.
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

/// How a server shows that it takes connections.
#[derive(Debug)]
enum Ready {
    /// It greets a client.
    Greets,
    /// By a file that it writes then.
    Writes(PathBuf),
}

/// A running server; dropping it kills it.
#[derive(Debug)]
pub struct NbdServer {
    ready: Ready,
    at: At,
    command: Vec<String>,
    /// Removed with the server; the last is where a daemon writes its pid.
    files: Vec<PathBuf>,
    /// Of the server and all that it started.
    group: Option<Pid>,
}

impl NbdServer {
    /// `qemu-nbd` of a file, for any number of clients; `arguments` go before
    /// the file.
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
        // It complains of a client that only looks whether it is there.
        let listens = scratch("listens");
        command.push(format!("--pid-file={}", listens.display()));
        command.push(file.display().to_string());
        Self::start_when(Ready::Writes(listens), at, command, Vec::new())
    }

    /// `nbdkit`; `arguments` are filters, plugin and the plugin's own.
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

    /// `nbd-server` of a file, on a port of the loopback interface (on unix
    /// sockets it greets nobody here); `options` are lines of the export's
    /// section.
    #[must_use]
    pub fn of_nbd_server(export: &str, file: &Path, options: &[&str]) -> Self {
        Self::configured(export, file, "", options)
    }

    /// The same over TLS alone, with the server's certificate in the directory.
    #[must_use]
    pub fn of_nbd_server_with_tls(export: &str, file: &Path, certificates: &Path) -> Self {
        let path = |name: &str| certificates.join(name).display().to_string();
        let (authority, certificate) = (path("ca-cert.pem"), path("server-cert.pem"));
        let key = path("server-key.pem");
        let tls = format!(
            "force_tls = true\ncacertfile = {authority}\ncertfile = {certificate}\nkeyfile = {key}"
        );
        Self::configured(export, file, &tls, &[])
    }

    fn configured(export: &str, file: &Path, generic: &str, options: &[&str]) -> Self {
        let at = At::tcp();
        let At::Tcp(address) = &at else {
            unreachable!("just made");
        };
        let listen = format!(
            "listenaddr = {}\nport = {}\nallowlist = true",
            address.ip(),
            address.port()
        );
        let (file, options) = (file.display(), options.join("\n"));
        let configuration =
            format!("[generic]\n{listen}\n{generic}\n[{export}]\nexportname = {file}\n{options}\n");
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

    /// Starts it where it was before and returns when it takes connections.
    pub fn start(&mut self) {
        assert!(self.group.is_none(), "the server runs already");
        if let At::Unix(path) = &self.at {
            let _not_there = fs::remove_file(path);
        }
        if let Ready::Writes(path) = &self.ready {
            let _not_there = fs::remove_file(path);
        }
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::null());
        // Some serve each client in a process of its own.
        command.process_group(0);
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{:?}: {error}", self.command));
        let what = format!("{} to listen", self.command.join(" "));
        let group = match self.files.last() {
            // It leaves a daemon behind, which leads a group of its own.
            Some(pid_file) => {
                let status = child.wait().expect("the daemon's parent");
                assert!(status.success(), "{what}: {status}");
                super::wait_until(&what, LIMIT, || {
                    fs::read_to_string(pid_file).ok()?.trim().parse().ok()
                })
            }
            None => i32::try_from(child.id()).expect("a pid"),
        };
        self.group = Some(Pid::from_raw(group));
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

    /// Where it listens.
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
                // Of `/proc/net/unix`: the server's end bears the path, and is connected.
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

    /// Who is connected to it over TCP, in an order that stays.
    #[must_use]
    pub fn tcp_clients(&self) -> Vec<SocketAddr> {
        let At::Tcp(address) = &self.at else {
            panic!("not on TCP: {:?}", self.at);
        };
        let mut clients = tcp_reset::clients_of(*address);
        clients.sort_unstable();
        clients
    }

    /// Resets the connection of one client over TCP, as a firewall does that forgot it.
    pub fn cut(&self, client: SocketAddr) {
        let At::Tcp(address) = &self.at else {
            panic!("not on TCP: {:?}", self.at);
        };
        tcp_reset::cut_connection(client, *address);
    }

    /// Holds it and all that it started (SIGSTOP); none of them answers anybody when
    /// this returns.
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

    /// Lets it go on (SIGCONT).
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills it and all that it started, at once (SIGKILL), if it runs; none of
    /// them is left when this returns.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        if let Some(group) = self.group.take() {
            super::wait_until("the server to be gone", LIMIT, || {
                // Those that are ours; pid 1 sees to the others.
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
            // Was it the server's fault?
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
    /// With devices 0 to `devices - 1`, and udev done with them.
    #[must_use]
    pub fn load(devices: u32) -> Self {
        super::enter();
        super::modprobe("nbd", &[&format!("nbds_max={devices}")]);
        super::udevd::settle();
        Self(())
    }

    /// The same, where the driver keeps backend ids.
    #[must_use]
    pub fn with_backend_ids(devices: u32) -> Self {
        if super::kernel() < (5, 14) {
            super::skip("no backend ids before 5.14");
        }
        Self::load(devices)
    }
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
