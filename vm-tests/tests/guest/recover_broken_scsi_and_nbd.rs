//! The record of an attached volume is broken. It is set aside, and causes no act on the device.
//! The host's tests cut and flip it at every byte, on a machine made of files
//! (`tests/journal/broken_files.rs`).

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use lunbd::engine::DetachVolume;
use lunbd::{AttachRequest, Source};
use vm_tests::guest::ScsiDebug;
use vm_tests::guest::agent::{engine, soon, unit};
use vm_tests::guest::crash::{Place, volume};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MARK: &[u8] = b"what somebody has written";

/// A recovery follows each broken record, and then one the record that was written.
fn break_the_record(source: Source) {
    let (engine, place) = (engine(), Place::new());
    let journal = place.open(&engine);
    let request = AttachRequest::new(source);
    let attached = engine.attach_volume(&journal, &volume(), &request, soon());
    let node = attached.unwrap().node;
    let mut disk = OpenOptions::new().write(true).open(&node).unwrap();
    disk.write_all(MARK).unwrap();
    disk.sync_all().unwrap();
    drop((disk, journal));

    let file = place.path().join("pvc-1.json");
    let bytes = fs::read(&file).unwrap();
    let half = bytes.len() / 2;
    let mut flipped = bytes.clone();
    flipped[half] ^= 1;
    let broken: [(&str, &[u8]); 4] = [
        ("empty", &[]),
        ("cut in half", &bytes[..half]),
        ("without its last byte", &bytes[..bytes.len() - 1]),
        ("with a flipped bit", &flipped),
    ];
    for (when, broken) in broken {
        fs::write(&file, broken).unwrap();
        let journal = place.open(&engine);
        assert_eq!(journal.records(), [], "{when}");
        let [problem] = journal.problems() else {
            panic!("{when}: {:?}", journal.problems());
        };
        let recovery = engine.recover(&journal, soon()).unwrap();
        assert!(recovery.volumes.is_empty(), "{when}: {recovery:?}");
        // The device counts as foreign, and stays.
        assert_eq!(recovery.foreign.len(), 1, "{when}: {recovery:?}");
        assert_eq!(fs::read(&problem.file).unwrap(), broken, "{when}");
        assert_eq!(first_bytes(&node), MARK, "{when}");
        fs::remove_file(&problem.file).unwrap();
    }

    fs::write(&file, &bytes).unwrap();
    let journal = place.open(&engine);
    let recovery = engine.recover(&journal, soon()).unwrap();
    // A server that answers late is reconnected.
    assert!(recovery.is_whole(), "{recovery:?}");
    assert_eq!(recovery.volumes[0].node.as_deref(), Some(&*node));
    assert_eq!(first_bytes(&node), MARK);
    let detached = engine.detach_volume(&journal, &volume(), &DetachVolume::default(), soon());
    detached.unwrap();
    drop(journal);
    place.require_clean("detached");
}

fn first_bytes(node: &Path) -> Vec<u8> {
    let mut bytes = vec![0; MARK.len()];
    let mut disk = fs::File::open(node).unwrap();
    disk.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_broken_record_of_a_scsi_volume_is_set_aside_and_the_disk_stays() {
    let target = ScsiDebug::with_luns(2);
    break_the_record(unit(&target, 1));
}

#[test]
fn a_broken_record_of_an_nbd_volume_is_set_aside_and_the_device_stays() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(8 << 20);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    break_the_record(server.uri("disk").parse().unwrap());
}
