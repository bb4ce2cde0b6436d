//! multipath-tools' daemon.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::daemon::Daemon;

const CONFIGURATION: &str = "/etc/multipath.conf";
const LIMIT: Duration = Duration::from_secs(60);
/// Its own default.
const FAST_IO_FAIL: u32 = 5;

/// What a map does with I/O while it has no path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPath {
    /// Keeps it for as long as it takes.
    Queue,
    /// Fails it at once.
    Fail,
    /// Keeps it for so many rounds of the path checker, a second each.
    Retry(u32),
}

impl fmt::Display for NoPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queue => formatter.write_str("queue"),
            Self::Fail => formatter.write_str("fail"),
            Self::Retry(rounds) => write!(formatter, "{rounds}"),
        }
    }
}

/// A running `multipathd`; dropping it ends it and takes down the maps that are
/// left.
#[derive(Debug)]
pub struct Multipathd {
    daemon: Option<Daemon>,
}

impl Multipathd {
    /// Starts it with the package's own defaults but for these: what a map does without
    /// a path, and a path checker that looks every second. A map comes of an attach that
    /// names several paths, or requires one. Returns when it answers.
    ///
    /// It sets the recovery timeout of iSCSI sessions and FC ports to its own
    /// `fast_io_fail_tmo` of 5 s, as it does everywhere.
    #[must_use]
    pub fn start(no_path: NoPath) -> Self {
        Self::start_with(no_path, FAST_IO_FAIL)
    }

    /// The same with another `fast_io_fail_tmo`, in seconds: for so long a path
    /// whose session or port was lost is blocked. `off` leaves that to others.
    #[must_use]
    pub fn start_with(no_path: NoPath, fast_io_fail: impl fmt::Display) -> Self {
        Self::start_checking("", no_path, fast_io_fail)
    }

    /// Makes a map of every SCSI disk as soon as it hears of one, for a test that scans
    /// by itself or wants a map that nobody asked for.
    #[must_use]
    pub fn start_mapping_every_disk(no_path: NoPath) -> Self {
        Self::start_checking("find_multipaths no", no_path, FAST_IO_FAIL)
    }

    /// Makes a map of every SCSI disk, and takes the WWID of a disk from this property in
    /// udev's record.
    #[must_use]
    pub fn naming_by(uid_attribute: &str) -> Self {
        let defaults = format!("find_multipaths no\n uid_attribute {uid_attribute}");
        Self::start_checking(&defaults, NoPath::Fail, FAST_IO_FAIL)
    }

    fn start_checking(defaults: &str, no_path: NoPath, fast_io_fail: impl fmt::Display) -> Self {
        // The overrides, since multipath-tools knows LIO and has its own view of
        // what to do there.
        Self::start_configured(&format!(
            "defaults {{\n {defaults}\n polling_interval 1\n max_polling_interval 1\n}}\n\
             overrides {{\n no_path_retry {no_path}\n fast_io_fail_tmo {fast_io_fail}\n}}\n"
        ))
    }

    /// Starts it as its package comes: without a configuration file, so that it makes a
    /// map only of a unit that it is told to map or has mapped before.
    #[must_use]
    pub fn start_as_packaged() -> Self {
        Self::start_configured("")
    }

    /// Starts it with this configuration file; with none where it is empty.
    #[must_use]
    pub fn start_configured(configuration: &str) -> Self {
        super::enter();
        super::modprobe("dm_multipath", &[]);
        super::modprobe("dm_service_time", &[]);
        if !configuration.is_empty() {
            fs::write(CONFIGURATION, configuration).expect(CONFIGURATION);
        }
        let mut multipathd = Self { daemon: None };
        multipathd.start_again();
        multipathd
    }

    /// Starts it with the configuration that it had.
    pub fn start_again(&mut self) {
        assert!(self.daemon.is_none(), "multipathd runs already");
        let daemon = Daemon::start(&["multipathd", "-d", "-s"], || ask("show status").is_some());
        self.daemon = Some(daemon);
    }

    /// Ends it; its maps stay.
    pub fn stop(&mut self) {
        self.daemon = None;
    }

    /// Holds it where it is (SIGSTOP).
    pub fn hold(&self) {
        self.daemon.as_ref().expect("a running multipathd").hold();
    }

    /// Lets it go on (SIGCONT).
    pub fn go_on(&self) {
        self.daemon.as_ref().expect("a running multipathd").go_on();
    }

    /// Whether it counts a disk (`sda`) among its paths, by its own word.
    #[must_use]
    pub fn knows(&self, disk: &str) -> bool {
        let paths = super::wait_until("multipathd to name its paths", LIMIT, || {
            ask("show paths raw format %d")
        });
        paths.lines().any(|path| path.trim() == disk)
    }

    /// What it says to a command such as `show maps`; nothing when it refuses.
    #[must_use]
    pub fn ask(&self, command: &str) -> Option<String> {
        ask(command)
    }
}

impl Drop for Multipathd {
    fn drop(&mut self) {
        self.stop();
        for map in maps() {
            take_down(&map);
        }
        // What it remembers makes udev's rules take such disks for its own.
        for file in [
            CONFIGURATION,
            "/etc/multipath/wwids",
            "/etc/multipath/bindings",
        ] {
            let _never_made = fs::remove_file(file);
        }
        let _never_made = fs::remove_dir_all("/dev/shm/multipath");
    }
}

/// Nothing where it refuses or does not run. One that is busy for four seconds says
/// `timeout`, whether it has done what it was told or not: it is told again.
fn ask(command: &str) -> Option<String> {
    super::wait_until("multipathd to have time", LIMIT, || {
        let output = Command::new("multipathd")
            .arg("-k".to_owned() + command)
            .output()
            .expect("multipathd is on the guest's PATH");
        let answer = String::from_utf8_lossy(&output.stdout).into_owned();
        if answer.starts_with("timeout") {
            return None;
        }
        let refused = answer.is_empty() || answer.starts_with("fail");
        Some((output.status.success() && !refused).then_some(answer))
    })
}

/// The multipath maps that the kernel has (`dm-0`), sorted.
#[must_use]
pub fn maps() -> Vec<String> {
    let mut maps = super::entries("/sys/block");
    maps.retain(|name| uuid(name).starts_with("mpath-"));
    maps.sort();
    maps
}

/// The map (`dm-0`) that has this disk (`sda`) as a path.
#[must_use]
pub fn map_of(disk: &str) -> Option<String> {
    let mut holders = super::entries(format!("/sys/block/{disk}/holders"));
    holders.retain(|name| uuid(name).starts_with("mpath-"));
    holders.pop()
}

/// Whether the map of this name keeps I/O that finds no path.
#[must_use]
pub fn queues(name: &str) -> bool {
    super::run(&["dmsetup", "table", name]).contains("queue_if_no_path")
}

/// A map of a partition, as kpartx makes it, on the map at `node`.
pub fn make_a_partition(node: &Path) {
    let map = node.canonicalize().expect("a map's node");
    let name = map.file_name().unwrap_or_default().to_string_lossy();
    let uuid = format!("part1-{}", uuid(&name).trim());
    let table = format!("0 2048 linear {} 2048", map.display());
    let made = ["dmsetup", "create", "part", "--noudevsync"];
    super::run(&[&made[..], &["--uuid", &uuid, "--table", &table]].concat());
    super::udevd::settle();
}

fn uuid(block: &str) -> String {
    fs::read_to_string(format!("/sys/block/{block}/dm/uuid")).unwrap_or_default()
}

/// As far as it goes: pid 1 sees what stays.
fn take_down(map: &str) {
    let name = fs::read_to_string(format!("/sys/block/{map}/dm/name")).unwrap_or_default();
    // Partitions of it, and whatever else is on top.
    for above in super::entries(Path::new("/sys/block").join(map).join("holders")) {
        take_down(&above);
    }
    // One that queues would wait for a path for ever.
    dmsetup(&["message", name.trim(), "0", "fail_if_no_path"]);
    // It tries for five seconds, and udev may look at the map for longer.
    let start = Instant::now();
    while !dmsetup(&["remove", "--retry", name.trim()])
        && Path::new("/sys/block").join(map).exists()
        && start.elapsed() < LIMIT
    {
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Whether it has done so; else says why not.
fn dmsetup(arguments: &[&str]) -> bool {
    match Command::new("dmsetup").args(arguments).output() {
        Ok(output) if output.status.success() => true,
        other => {
            eprintln!("dmsetup {arguments:?}: {other:?}");
            false
        }
    }
}
