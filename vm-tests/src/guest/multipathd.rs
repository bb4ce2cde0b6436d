//! The daemon of multipath-tools.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::daemon::Daemon;

const CONFIGURATION: &str = "/etc/multipath.conf";
const LIMIT: Duration = Duration::from_secs(60);
/// multipathd's own default.
const FAST_IO_FAIL: u32 = 5;

/// What a map does with I/O while it has no path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPath {
    /// Queues it without a limit.
    Queue,
    /// Fails it at once.
    Fail,
    /// Queues it for this number of rounds of the path checker, one second each.
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

/// A running `multipathd`. Dropping it ends it and removes the maps that are left.
#[derive(Debug)]
pub struct Multipathd {
    daemon: Option<Daemon>,
}

impl Multipathd {
    /// Starts it with the package's defaults, except what a map does without a path, and a path
    /// checker that looks every second. multipathd makes a map only for an attach that names
    /// several paths or requires a map. Returns when it answers.
    ///
    /// As everywhere, it sets the recovery timeout of iSCSI sessions and FC ports to its own
    /// `fast_io_fail_tmo` of 5 s.
    #[must_use]
    pub fn start(no_path: NoPath) -> Self {
        Self::start_with(no_path, FAST_IO_FAIL)
    }

    /// The same with another `fast_io_fail_tmo`, in seconds: a path is blocked this long after
    /// its session or port was lost. `off` leaves the timeout to others.
    #[must_use]
    pub fn start_with(no_path: NoPath, fast_io_fail: impl fmt::Display) -> Self {
        Self::start_checking("", no_path, fast_io_fail)
    }

    /// Makes a map of every SCSI disk as soon as multipathd sees it, for a test that scans
    /// itself or wants a map that no attach requested.
    #[must_use]
    pub fn start_mapping_every_disk(no_path: NoPath) -> Self {
        Self::start_checking("find_multipaths no", no_path, FAST_IO_FAIL)
    }

    /// Makes a map of every SCSI disk, and takes a disk's WWID from this property in udev's
    /// record.
    #[must_use]
    pub fn naming_by(uid_attribute: &str) -> Self {
        let defaults = format!("find_multipaths no\n uid_attribute {uid_attribute}");
        Self::start_checking(&defaults, NoPath::Fail, FAST_IO_FAIL)
    }

    fn start_checking(defaults: &str, no_path: NoPath, fast_io_fail: impl fmt::Display) -> Self {
        // The values are overrides, because multipath-tools has its own settings for LIO.
        Self::start_configured(&format!(
            "defaults {{\n {defaults}\n polling_interval 1\n max_polling_interval 1\n}}\n\
             overrides {{\n no_path_retry {no_path}\n fast_io_fail_tmo {fast_io_fail}\n}}\n"
        ))
    }

    /// Starts it as packaged: without a configuration file, it maps only a unit that it is told
    /// to map or has mapped before.
    #[must_use]
    pub fn start_as_packaged() -> Self {
        Self::start_configured("")
    }

    /// Starts it with this configuration file, or with none if it is empty.
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

    /// Starts it with its previous configuration.
    pub fn start_again(&mut self) {
        assert!(self.daemon.is_none(), "multipathd runs already");
        let daemon = Daemon::start(&["multipathd", "-d", "-s"], || ask("show status").is_some());
        self.daemon = Some(daemon);
    }

    /// Ends it; its maps stay.
    pub fn stop(&mut self) {
        self.daemon = None;
    }

    /// Stops it (SIGSTOP).
    pub fn hold(&self) {
        self.daemon.as_ref().expect("a running multipathd").hold();
    }

    /// Lets it continue (SIGCONT).
    pub fn go_on(&self) {
        self.daemon.as_ref().expect("a running multipathd").go_on();
    }

    /// Whether it reports a disk (`sda`) among its paths.
    #[must_use]
    pub fn knows(&self, disk: &str) -> bool {
        let paths = super::wait_until("multipathd to name its paths", LIMIT, || {
            ask("show paths raw format %d")
        });
        paths.lines().any(|path| path.trim() == disk)
    }

    /// Its answer to a command such as `show maps`; `None` if it refuses.
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
        // Because of what it remembers, udev's rules would treat such disks as multipath's.
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

/// `None` if it refuses or does not run. A multipathd that is busy for four seconds says
/// `timeout`, whether it has carried out the command or not, so the command is sent again.
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

/// The kernel's multipath maps (`dm-0`), sorted.
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

/// Whether the map with this name queues I/O without a path.
#[must_use]
pub fn queues(name: &str) -> bool {
    super::run(&["dmsetup", "table", name]).contains("queue_if_no_path")
}

/// Makes a map of a partition on the map at `node`, as kpartx does.
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

/// Removes a map if possible; pid 1 sees what stays.
fn take_down(map: &str) {
    let name = fs::read_to_string(format!("/sys/block/{map}/dm/name")).unwrap_or_default();
    // Its partitions, and other maps above it.
    for above in super::entries(Path::new("/sys/block").join(map).join("holders")) {
        take_down(&above);
    }
    // A map that queues would wait for a path forever.
    dmsetup(&["message", name.trim(), "0", "fail_if_no_path"]);
    // dmsetup tries for five seconds, and udev may look at the map for longer.
    let start = Instant::now();
    while !dmsetup(&["remove", "--retry", name.trim()])
        && Path::new("/sys/block").join(map).exists()
        && start.elapsed() < LIMIT
    {
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Whether dmsetup succeeded; prints its error if not.
fn dmsetup(arguments: &[&str]) -> bool {
    match Command::new("dmsetup").args(arguments).output() {
        Ok(output) if output.status.success() => true,
        other => {
            eprintln!("dmsetup {arguments:?}: {other:?}");
            false
        }
    }
}
