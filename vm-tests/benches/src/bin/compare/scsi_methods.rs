//! The methods to attach one LUN of an existing iSCSI session.

use std::fs;
use std::path::{Path, PathBuf};

use lunbd::engine::Phase;
use lunbd::id::{Hctl, HostNo, Lun};
use lunbd::{AttachRequest, Engine, Source};
use vm_tests::guest::agent::soon;
use vm_tests::guest::iscsid::Session;
use vm_tests::guest::{self, udevd};

use crate::rounds::AttachMethod;

const DEVICES: &str = "/sys/bus/scsi/devices";

/// The engine in the process, as in an agent that links it.
pub(crate) struct InProcess<'a> {
    engine: &'a Engine,
    unit: Unit<'a>,
}

impl<'a> InProcess<'a> {
    pub(crate) fn new(engine: &'a Engine, session: &'a Session, lun: u64) -> Self {
        let unit = Unit { session, lun };
        Self { engine, unit }
    }
}

impl AttachMethod for InProcess<'_> {
    fn name(&self) -> &'static str {
        "lunbd, in the process"
    }

    fn attach(&mut self) -> Vec<Phase> {
        let request = AttachRequest::new(self.unit.source());
        let attachment = self.engine.attach(&request, soon()).expect("an attach");
        assert!(attachment.changed, "it was there already");
        attachment.phases
    }

    fn disk(&self) -> Option<String> {
        self.unit.disk()
    }

    fn detach(&mut self) -> Vec<Phase> {
        let detachment = self.engine.detach(self.unit.source(), soon());
        detachment.expect("a detach").phases
    }

    fn is_gone(&self) -> bool {
        self.unit.is_gone()
    }
}

/// Writes to sysfs by hand, without the INQUIRY, the claim and the flush that the engine adds.
pub(crate) struct ByHand<'a>(Unit<'a>);

impl<'a> ByHand<'a> {
    pub(crate) fn new(session: &'a Session, lun: u64) -> Self {
        Self(Unit { session, lun })
    }
}

impl AttachMethod for ByHand<'_> {
    fn name(&self) -> &'static str {
        "echo C T L > scan; udevadm settle"
    }

    fn attach(&mut self) -> Vec<Phase> {
        self.0.session.scan(self.0.lun);
        udevd::settle();
        Vec::new()
    }

    fn disk(&self) -> Option<String> {
        self.0.disk()
    }

    fn detach(&mut self) -> Vec<Phase> {
        delete(&self.0.session.device_dir(self.0.lun));
        udevd::settle();
        Vec::new()
    }

    fn is_gone(&self) -> bool {
        self.0.is_gone()
    }
}

/// A method that scans the whole target for its one LUN.
pub(crate) struct WholeTarget<'a> {
    name: &'static str,
    scan: fn(&Session),
    unit: Unit<'a>,
}

impl<'a> WholeTarget<'a> {
    pub(crate) fn wildcard(session: &'a Session, lun: u64) -> Self {
        let scan = |session: &Session| {
            let path = format!("/sys/class/scsi_host/host{}/scan", session.host);
            fs::write(&path, "- - -").expect(&path);
        };
        Self {
            name: "echo - - - > scan; udevadm settle",
            scan,
            unit: Unit { session, lun },
        }
    }

    /// It needs `-a`: without it the script skips a target that has no device yet.
    pub(crate) fn script(session: &'a Session, lun: u64) -> Self {
        let scan = |session: &Session| {
            let host = format!("--hosts={}", session.host);
            let target = ["-a", "--channels=0", "--ids=0"];
            guest::run(&[&["rescan-scsi-bus.sh", &host], &target[..]].concat());
        };
        Self {
            name: "rescan-scsi-bus.sh; udevadm settle",
            scan,
            unit: Unit { session, lun },
        }
    }

    pub(crate) fn iscsiadm(session: &'a Session, lun: u64) -> Self {
        let scan = |session: &Session| {
            let id = session.id.to_string();
            guest::run(&["iscsiadm", "-m", "session", "-r", &id, "--rescan"]);
        };
        Self {
            name: "iscsiadm --rescan; udevadm settle",
            scan,
            unit: Unit { session, lun },
        }
    }

    fn devices(&self) -> Vec<PathBuf> {
        let host = format!("{}:", self.unit.session.host);
        let names = guest::entries(DEVICES);
        let own = names.iter().filter(|name| name.starts_with(&host));
        own.map(|name| Path::new(DEVICES).join(name)).collect()
    }
}

impl AttachMethod for WholeTarget<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn attach(&mut self) -> Vec<Phase> {
        (self.scan)(self.unit.session);
        settle_all();
        Vec::new()
    }

    fn disk(&self) -> Option<String> {
        self.unit.disk()
    }

    fn detach(&mut self) -> Vec<Phase> {
        for device in self.devices() {
            delete(&device);
        }
        settle_all();
        Vec::new()
    }

    fn is_gone(&self) -> bool {
        self.devices().is_empty()
    }
}

/// Waits for udev, for as long as hundreds of disks may take.
fn settle_all() {
    guest::run(&["udevadm", "settle", "--timeout=900"]);
}

/// The LUN that is attached.
#[derive(Clone, Copy)]
struct Unit<'a> {
    session: &'a Session,
    lun: u64,
}

impl Unit<'_> {
    fn source(self) -> Source {
        let hctl = Hctl {
            host: HostNo(self.session.host),
            channel: 0,
            target: 0,
            lun: Lun::from_kernel(self.lun),
        };
        hctl.into()
    }

    fn disk(self) -> Option<String> {
        self.session.disk(self.lun)
    }

    fn is_gone(self) -> bool {
        !self.session.device_dir(self.lun).exists()
    }
}

fn delete(device: &Path) {
    let path = device.join("delete");
    fs::write(&path, "1").unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
