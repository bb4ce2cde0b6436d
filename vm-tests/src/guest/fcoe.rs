//! Fibre Channel without hardware: `FCoE` between the two ends of a veth pair, two ports that
//! see each other (VN2VN), and LIO's target on one of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::lio::{self, Store};
use super::scsi_disk::{disk_of, have_followed, openable_disk_of};

const FABRIC: &str = "/sys/kernel/config/target/fc";
const CONTROLLERS: &str = "/sys/bus/fcoe/devices";
/// The ends of a cable; the first is the initiator's. The number of the cable is appended.
const LINKS: [&str; 2] = ["fcinit", "fctgt"];
/// The protocol itself needs some seconds for a login between the ports.
const LOGIN: Duration = Duration::from_secs(120);
/// The time in which the kernel removes the controllers.
const GONE: Duration = Duration::from_secs(120);

/// One initiator port and one target port with a cable between them. Dropping it removes
/// everything.
#[derive(Debug)]
pub struct FcFabric {
    links: [String; 2],
    controllers: [PathBuf; 2],
    host: u32,
    /// Both ports' names, as `0x2000020000000010`.
    ports: [String; 2],
    luns: BTreeMap<u64, Store>,
}

impl FcFabric {
    /// Returns when the initiator has logged in to the target, which presents no LUN yet.
    #[must_use]
    pub fn up() -> Self {
        Self::up_on(0)
    }

    /// The same on the cable with this number; each cable has its own ports.
    #[must_use]
    pub fn up_on(cable: u8) -> Self {
        super::enter();
        lio::mount_configfs();
        for module in ["veth", "fcoe", "tcm_fc"] {
            super::modprobe(module, &[]);
        }
        let links = LINKS.map(|link| format!("{link}{cable}"));
        let [initiator, target] = links.each_ref().map(String::as_str);
        let [at, to] = [0, 1].map(|end| format!("02:00:00:00:{cable:02x}:1{end}"));
        super::run(&[
            "ip", "link", "add", initiator, "address", &at, "type", "veth", "peer", "name", target,
            "address", &to,
        ]);
        let mut fabric = Self {
            links,
            controllers: [PathBuf::new(), PathBuf::new()],
            host: 0,
            ports: [String::new(), String::new()],
            luns: BTreeMap::new(),
        };
        for link in &fabric.links {
            // An FC frame is longer than an Ethernet frame.
            super::run(&["ip", "link", "set", link, "mtu", "2500", "up"]);
        }
        fabric.controllers = fabric.links.each_ref().map(|link| new_controller(link));
        let hosts = fabric
            .controllers
            .each_ref()
            .map(|controller| host_of(controller));
        fabric.host = hosts[0];
        fabric.ports = hosts.map(|host| fc_host(host, "port_name"));
        fabric.make_target();
        for controller in &fabric.controllers {
            lio::write(&controller.join("enabled"), "1");
        }
        fabric.link_up();
        fabric
    }

    /// Makes the target group and the access of the initiator.
    fn make_target(&self) {
        for dir in [self.group(), self.access()] {
            fs::create_dir_all(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        }
    }

    /// The initiator's SCSI host.
    #[must_use]
    pub fn host(&self) -> u32 {
        self.host
    }

    /// The target's port, as sysfs shows it: `0x2000020000000011`.
    #[must_use]
    pub fn target_wwpn(&self) -> &str {
        &self.ports[1]
    }

    /// The initiator's port.
    #[must_use]
    pub fn initiator_wwpn(&self) -> &str {
        &self.ports[0]
    }

    /// Presents a volume at this LUN.
    pub fn map(&mut self, lun: u64, store: &Store) {
        let unit = self.unit(lun);
        store.present_at(&unit);
        lio::present(&unit, &self.mapped(lun));
        self.luns.insert(lun, store.clone());
    }

    /// Stops presenting the LUN; the initiator is not told.
    pub fn unmap(&mut self, lun: u64) {
        let dirs = [self.mapped(lun), self.unit(lun)];
        for dir in &dirs {
            lio::present_no_more(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        }
        self.luns.remove(&lun);
    }

    /// Takes the cable's initiator end down. Returns when the rport is lost (Blocked, until
    /// `dev_loss_tmo` is over) and no device behind it runs: the kernel first reports the port,
    /// and then blocks its devices.
    pub fn link_down(&self) {
        super::run(&["ip", "link", "set", &self.links[0], "down"]);
        super::wait_until("the rport to be lost, with its devices", LOGIN, || {
            let lost = self.of_rport("port_state") != "Online";
            (lost && have_followed(self.host, true)).then_some(())
        });
    }

    /// Takes the link up. Returns when the rport is Online and a target again, and its devices
    /// run. Devices that were removed meanwhile do not come back by themselves.
    pub fn link_up(&self) {
        super::run(&["ip", "link", "set", &self.links[0], "up"]);
        super::wait_until("the rport to be Online, with its devices", LOGIN, || {
            let back = self.of_rport("port_state") == "Online"
                && self.of_rport("roles").contains("FCP Target");
            (back && have_followed(self.host, false)).then_some(())
        });
    }

    /// The rport of the target's port (`rport-0:0-1`), if there is one.
    #[must_use]
    pub fn rport(&self) -> Option<String> {
        let mut rports = super::entries("/sys/class/fc_remote_ports");
        rports.retain(|rport| {
            rport.starts_with(&format!("rport-{}:", self.host))
                && rport_attribute(rport, "port_name") == self.ports[1]
        });
        rports.pop()
    }

    /// An attribute of the target's rport, such as `port_state`; empty without an rport.
    #[must_use]
    pub fn of_rport(&self, attribute: &str) -> String {
        let rport = self.rport().unwrap_or_default();
        rport_attribute(&rport, attribute)
    }

    /// Sets an attribute of the rport, such as `dev_loss_tmo` or `fast_io_fail_tmo`.
    pub fn set_rport(&self, attribute: &str, value: &str) {
        let rport = self.rport().expect("an rport");
        let path = format!("/sys/class/fc_remote_ports/{rport}/{attribute}");
        lio::write(Path::new(&path), value);
    }

    /// Waits until the rport is in this state.
    pub fn wait_for_rport(&self, state: &str) {
        let what = format!("the rport to be {state}");
        super::wait_until(&what, LOGIN, || {
            (self.of_rport("port_state") == state).then_some(())
        });
    }

    /// The (channel, target) of the rport in the SCSI layer.
    #[must_use]
    pub fn scsi_target(&self) -> (u32, u32) {
        let rport = self.rport().expect("an rport");
        let channel = rport
            .split([':', '-'])
            .nth(2)
            .and_then(|text| text.parse().ok());
        let target = self.of_rport("scsi_target_id").parse();
        (
            channel.expect("a channel"),
            target.expect("a target's number"),
        )
    }

    /// Writes `CHANNEL TARGET LUN` to the initiator's `scan`.
    pub fn scan(&self, lun: u64) {
        let (channel, target) = self.scsi_target();
        let path = format!("/sys/class/scsi_host/host{}/scan", self.host);
        lio::write(Path::new(&path), &format!("{channel} {target} {lun}"));
    }

    /// The sysfs directory of a LUN's SCSI device.
    #[must_use]
    pub fn device_dir(&self, lun: u64) -> PathBuf {
        let (channel, target) = self.scsi_target();
        let name = format!("{}:{channel}:{target}:{lun}", self.host);
        Path::new("/sys/bus/scsi/devices").join(name)
    }

    /// The name of a LUN's disk below `/sys/block`, if it has one.
    #[must_use]
    pub fn disk(&self, lun: u64) -> Option<String> {
        disk_of(&self.device_dir(lun))
    }

    /// Scans for a LUN by hand and waits for a disk that can be opened.
    #[allow(
        clippy::must_use_candidate,
        reason = "some tests want the device and not its name"
    )]
    pub fn scanned_disk(&self, lun: u64) -> String {
        self.scan(lun);
        openable_disk_of(&self.device_dir(lun))
    }

    fn group(&self) -> PathBuf {
        let port = colons(&self.ports[1]);
        PathBuf::from(format!("{FABRIC}/{port}/tpgt_1"))
    }

    fn access(&self) -> PathBuf {
        self.group().join("acls").join(colons(&self.ports[0]))
    }

    fn unit(&self, lun: u64) -> PathBuf {
        self.group().join(format!("lun/lun_{lun}"))
    }

    fn mapped(&self, lun: u64) -> PathBuf {
        self.access().join(format!("lun_{lun}"))
    }
}

impl Drop for FcFabric {
    fn drop(&mut self) {
        // Delete the devices while the ports still communicate: the target then answers a flush
        // of a disk's cache.
        for device in super::entries("/sys/bus/scsi/devices") {
            if device.starts_with(&format!("{}:", self.host)) {
                let delete = format!("/sys/bus/scsi/devices/{device}/delete");
                let _gone_already = fs::write(delete, "1");
            }
        }
        for link in &self.links {
            let _gone_already = fs::write("/sys/bus/fcoe/ctlr_destroy", link);
        }
        let luns = std::mem::take(&mut self.luns);
        for lun in luns.keys() {
            for dir in [self.mapped(*lun), self.unit(*lun)] {
                if let Err(error) = lio::present_no_more(&dir) {
                    eprintln!("{} stays: {error}", dir.display());
                }
            }
        }
        if !self.ports[1].is_empty() {
            lio::remove_dir(&self.access());
            lio::remove_dir(&self.group());
            lio::remove_dir(self.group().parent().unwrap_or(Path::new(FABRIC)));
        }
        // The kernel removes a controller later, in a worker, which warns if the link above it
        // in sysfs went first.
        let limit = Instant::now() + GONE;
        while self.controllers.iter().any(|it| it.exists()) {
            if Instant::now() >= limit {
                assert!(
                    std::thread::panicking(),
                    "a controller of {:?} stays",
                    self.links
                );
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _gone_already = std::process::Command::new("ip")
            .args(["link", "delete", &self.links[0]])
            .status();
    }
}

/// An `FCoE` controller on `link`, not enabled yet.
fn new_controller(link: &str) -> PathBuf {
    let before = super::entries(CONTROLLERS);
    lio::write(Path::new("/sys/bus/fcoe/ctlr_create"), link);
    let mut new = super::entries(CONTROLLERS);
    new.retain(|name| name.starts_with("ctlr_") && !before.contains(name));
    assert_eq!(
        new.len(),
        1,
        "{link} made other than one controller: {new:?}"
    );
    let controller = Path::new(CONTROLLERS).join(&new[0]);
    // In capitals: later kernels refuse lower case.
    lio::write(&controller.join("mode"), "VN2VN");
    controller
}

/// The SCSI host of an `FCoE` controller.
fn host_of(controller: &Path) -> u32 {
    let mut names = super::entries(controller).into_iter();
    let host = names.find_map(|name| name.strip_prefix("host")?.parse().ok());
    host.unwrap_or_else(|| panic!("no host in {}", controller.display()))
}

fn rport_attribute(rport: &str, attribute: &str) -> String {
    read(format!("/sys/class/fc_remote_ports/{rport}/{attribute}"))
}

fn fc_host(host: u32, attribute: &str) -> String {
    read(format!("/sys/class/fc_host/host{host}/{attribute}"))
}

/// Formats `0x200002..` as `20:00:02:..`, as LIO writes it.
fn colons(port: &str) -> String {
    let digits = port.trim_start_matches("0x").as_bytes();
    let pairs = digits.chunks(2).map(String::from_utf8_lossy);
    pairs.collect::<Vec<_>>().join(":")
}

fn read(path: String) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}
