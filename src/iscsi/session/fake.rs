//! Sessions in a sysfs that is made of files, for unit tests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use super::{IscsiSession, SessionName};
use crate::id::SessionId;
use crate::kernel::Roots;

/// A session whose host has its number.
pub(crate) struct FakeSession {
    pub(crate) session: IscsiSession,
    roots: Roots,
    device: PathBuf,
}

impl FakeSession {
    /// Adds a session that lunbd made under this name and that is logged in.
    pub(crate) fn add(roots: &Roots, id: u32, name: &SessionName) -> Self {
        let device = format!("devices/platform/host{id}/session{id}");
        let fake = Self {
            session: IscsiSession::new(roots, SessionId(id)),
            roots: roots.clone(),
            device: roots.sysfs.join(device),
        };
        for (kind, dir) in [
            ("session", fake.of_session()),
            ("connection", fake.of_connection()),
        ] {
            let class = roots.sysfs.join(format!("class/iscsi_{kind}"));
            fs::create_dir_all(&dir).unwrap();
            fs::create_dir_all(&class).unwrap();
            symlink(&dir, class.join(dir.file_name().unwrap())).unwrap();
        }
        for (attribute, value) in [
            ("state", "LOGGED_IN"),
            ("creator", "-1"),
            ("ifacename", "lunbd"),
            ("initiatorname", name.initiator.as_str()),
            ("targetname", name.target.as_str()),
            ("target_id", "0"),
        ] {
            fake.set(attribute, value);
        }
        for (attribute, value) in [
            ("state", "up"),
            ("persistent_address", &name.portal.host().to_string()),
            ("persistent_port", &name.portal.port().to_string()),
        ] {
            fake.set_connection(attribute, value);
        }
        fake
    }

    fn of_session(&self) -> PathBuf {
        let id = self.session.id();
        self.device.join(format!("iscsi_session/session{id}"))
    }

    fn of_connection(&self) -> PathBuf {
        let name = format!("connection{}:0", self.session.id());
        self.device.join(format!("{name}/iscsi_connection/{name}"))
    }

    pub(crate) fn set(&self, attribute: &str, value: &str) {
        fs::write(self.of_session().join(attribute), format!("{value}\n")).unwrap();
    }

    pub(crate) fn set_connection(&self, attribute: &str, value: &str) {
        fs::write(self.of_connection().join(attribute), format!("{value}\n")).unwrap();
    }

    /// Cuts its connection.
    pub(crate) fn lose(&self) {
        self.set_connection("state", "failed");
        self.set("state", "FAILED");
    }

    /// Adds a unit whose disk has no size, and returns the directory of its device.
    pub(crate) fn add_unit(&self, lun: u32) -> PathBuf {
        let host = self.session.id();
        let unit = self
            .device
            .join(format!("target{host}:0:0/{host}:0:0:{lun}"));
        let disk = unit.join(format!("block/sd{lun}"));
        let bus = self.roots.sysfs.join("bus/scsi/devices");
        fs::create_dir_all(disk.join("queue")).unwrap();
        fs::create_dir_all(&bus).unwrap();
        symlink(&unit, bus.join(format!("{host}:0:0:{lun}"))).unwrap();
        fs::write(unit.join("state"), "running\n").unwrap();
        fs::write(disk.join("dev"), format!("8:{lun}\n")).unwrap();
        fs::write(disk.join("size"), "0\n").unwrap();
        unit
    }
}
