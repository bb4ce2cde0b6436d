//! A machine that is a directory, with a journal, and records as they are on the disk.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use lunbd::engine::Journal;
use lunbd::engine::journal::Record;
use lunbd::id::VolumeId;
use lunbd::{AttachRequest, Deadline, Engine, Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::machine::Machine;

pub(crate) const NAME: &str = "naa.5000c500a1b2c3d4";
pub(crate) const OTHER_NAME: &str = "naa.5000c500a1b2c3d5";
pub(crate) const ATTACHED: &str = "scsi:0:0:0:1";

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

pub(crate) fn id(text: &str) -> VolumeId {
    text.parse().unwrap()
}

/// The record of an attached SCSI unit, as it is on the disk.
pub(crate) fn attached(volume: &str, source: &str, name: &str) -> Value {
    json!({
        "volume": volume,
        "spec": {
            "sources": [source], "expect": null, "min_paths": 1, "multipath": "prefer",
            "nbd": null,
        },
        "intent": null,
        "outcome": {
            "node": "/dev/sdb", "devno": "8:16", "diskseq": "17", "size": 1_048_576,
            "names": [name], "map": null, "nbd_index": null, "at": "2026-11-21T03:00:00Z",
        },
    })
}

/// The same, with an unfinished operation and without an outcome.
pub(crate) fn begun(volume: &str, source: &str, operation: &Value) -> Value {
    let mut record = attached(volume, source, NAME);
    record["intent"] = json!({ "operation": operation, "begun_at": "2026-11-21T03:00:00Z" });
    record["outcome"] = Value::Null;
    record
}

pub(crate) fn sealed(record: &Value) -> Vec<u8> {
    Record::seal(&serde_json::to_vec_pretty(record).unwrap())
}

/// A machine with the directory of a journal that was used before.
pub(crate) struct Node {
    pub(crate) machine: Machine,
    pub(crate) engine: Engine,
}

impl Node {
    pub(crate) fn new() -> Self {
        let machine = Machine::new();
        machine.host(0);
        machine.write("run/lunbd/journal/journal.lock", "");
        let engine = Engine::start(machine.roots()).unwrap();
        Self { machine, engine }
    }

    pub(crate) fn with(records: &[Value]) -> Self {
        let node = Self::new();
        for record in records {
            let name = format!("{}.json", record["volume"].as_str().unwrap());
            fs::write(node.file(&name), sealed(record)).unwrap();
        }
        node
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.machine.path("run/lunbd/journal").join(name)
    }

    /// The names in the journal's directory, without the lock and the records of detached
    /// volumes.
    pub(crate) fn files(&self) -> Vec<String> {
        let directory = self.machine.path("run/lunbd/journal");
        let is_detached = |name: &String| {
            let record = fs::read(directory.join(name)).map(|bytes| Record::parse(&bytes));
            record.is_ok_and(|record| record.is_ok_and(|record| record.detached.is_some()))
        };
        let entries = fs::read_dir(&directory).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "journal.lock" && !is_detached(name))
            .collect();
        names.sort();
        names
    }

    /// Creates the unit [`NAME`] at [`ATTACHED`].
    pub(crate) fn disk_named(&self) {
        self.machine.disk("0:0:0:1", "sdb");
        let device = "sys/devices/fake/0:0:0:1";
        // Page 83h with one NAA name of the unit.
        let page = b"\0\x83\0\x0c\x01\x03\0\x08\x50\0\xc5\0\xa1\xb2\xc3\xd4";
        fs::write(self.machine.path(&format!("{device}/vpd_pg83")), page).unwrap();
        for (file, text) in [("vendor", "LIO-ORG\n"), ("model", "disk\n")] {
            self.machine.write(&format!("{device}/{file}"), text);
        }
    }

    /// Opens the journal. A child that another test starts holds a journal that was just closed
    /// for a moment: until its exec it has every file that is open here.
    pub(crate) fn open(&self) -> Journal {
        self.try_open().unwrap()
    }

    pub(crate) fn try_open(&self) -> Result<Journal> {
        let limit = soon();
        loop {
            match self.engine.open_journal(soon()) {
                Err(error) if error.kind() == ErrorKind::InUse && !limit.has_passed() => {
                    std::thread::yield_now();
                }
                opened => return opened,
            }
        }
    }

    pub(crate) fn attach(&self, journal: &Journal, volume: &str, request: &AttachRequest) -> Error {
        let result = self
            .engine
            .attach_volume(journal, &id(volume), request, soon());
        result.unwrap_err()
    }

    /// Whether nothing was scanned.
    pub(crate) fn is_untouched(&self) -> bool {
        self.machine
            .read("sys/class/scsi_host/host0/scan")
            .is_empty()
    }
}

pub(crate) fn scsi(source: &str) -> AttachRequest {
    AttachRequest::new(source.parse::<lunbd::Source>().unwrap())
}
