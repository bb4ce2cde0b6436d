use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::engine::detach::DetachTarget;
use crate::engine::detach::receipt::Receipt;
use crate::engine::detach::request::DetachRequest;
use crate::engine::detach::run::UnitCache;
use crate::engine::usage::claim::Claim;
use crate::kernel::Roots;
use crate::scsi::{Identity, ScsiDevice};

pub(in crate::engine) fn run<'a>(engine: &'a Engine, request: &'a DetachRequest) -> DetachRun<'a> {
    let map = MapReceipt {
        name: "m".to_owned(),
        uuid: "mpath-m".to_owned(),
        node: PathBuf::from("/dev/dm-0"),
        told_to_fail: false,
        flush: Some(Flush::Done),
        gone: true,
    };
    DetachRun {
        engine,
        request,
        named_devices: Vec::new(),
        map: None,
        unit: Identity::default(),
        maps: engine.hub().watch("virtual"),
        daemon: None,
        receipt: Receipt {
            map: Some(map),
            ..Receipt::default()
        },
        devices: Vec::new(),
        open_paths: Vec::new(),
        unwritten_paths: Vec::new(),
        unit_cache: UnitCache::NotShown,
        first_paths: Vec::new(),
        unproven_paths: Vec::new(),
        timed_out: false,
        map_may_have_flush: false,
        holder_vanished: false,
        replaced: Vec::new(),
    }
}

pub(in crate::engine) fn path(roots: &Roots, hctl: &str, disk: &str) -> KnownPath {
    let dir = roots.sysfs.join("devices").join(hctl);
    let block = dir.join("block").join(disk);
    fs::create_dir_all(&block).unwrap();
    fs::write(block.join("dev"), "8:16\n").unwrap();
    let bus = roots.sysfs.join("bus/scsi/devices");
    fs::create_dir_all(&bus).unwrap();
    std::os::unix::fs::symlink(&dir, bus.join(hctl)).unwrap();
    let device = ScsiDevice::find(roots, hctl.parse().unwrap());
    let device = device.unwrap().unwrap();
    KnownPath {
        disk: device.disk().unwrap(),
        device,
        identity_now: PathIdentity::Silent(Identity::default()),
        is_being_removed: false,
        timed_out: false,
    }
}

#[test]
fn what_a_path_beside_the_map_fails_to_write_back_did_not_go_through_the_map() {
    let root = tempfile::tempdir().unwrap();
    let engine = Engine::start(Roots::below(root.path())).unwrap();
    let roots = engine.roots();
    let request = DetachRequest::new("unit:naa.5000c500a1b2c3d4".parse::<DetachTarget>().unwrap());
    let mut run = run(&engine, &request);
    let paths = [("1:0:0:4", "sdb"), ("2:0:0:4", "sdc"), ("3:0:0:4", "sdd")];
    let paths = paths.map(|(hctl, disk)| path(roots, hctl, disk));
    for path in &paths {
        run.add_to_receipt(path).unwrap();
    }
    let lost = |at: usize| FailedFlush::of(roots, paths[at].disk.as_ref().unwrap()).unwrap();
    let marks = [0, 1].map(lost);
    // This flush failed before the disk came below the map.
    marks[1].set(&Error::new(ErrorKind::Io, "the write failed"));
    let below: Vec<_> = paths[..2].iter().filter_map(|it| it.disk.clone()).collect();
    run.mark_in_map(&paths, &below);
    // The file is no disk, so its flush fails.
    let held = Arc::new(File::open(root.path()).unwrap());
    let mut flushes = Vec::new();
    for path in paths {
        let in_map = run.entry(&path.device).unwrap().in_map;
        let claimed = ClaimedPath {
            watch: engine.hub().watch("1:0:0:4"),
            claim: Some(Claim::Held(Arc::clone(&held))),
            path,
            in_map,
        };
        let deadline = Deadline::after(Duration::from_secs(30));
        flushes.push(run.flush(&claimed, deadline, deadline));
    }
    assert!(
        matches!(flushes[0], Ok(Flush::ThroughMap(_))),
        "{flushes:?}"
    );
    assert_eq!(marks[0].read().unwrap(), None, "nothing was lost");
    for flush in &flushes[1..] {
        let error = flush.as_ref().unwrap_err();
        assert_eq!(error.stage(), Some(Stage::Flush), "{flushes:?}");
    }
}
