//! The record of an attached volume, cut and flipped at every byte. It is set aside, and causes
//! no act on the device. The library's own tests show the same on a machine made of files.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use lunbd::engine::DetachVolume;
use lunbd::{AttachRequest, Source};
use vm_tests::guest::agent::{engine, soon, unit};
use vm_tests::guest::crash::{Place, volume};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, ScsiDebug};

const MARK: &[u8] = b"what somebody has written";

/// The file ends before each byte in turn, and has each byte flipped in turn. Each such file is
/// set aside. A recovery follows for one in `one_in` files. As many runs with consecutive seeds
/// cover all of them, and so does a whole sweep.
fn sweep(what: &str, source: Source, one_in: u64) {
    guest::sweep_time_limit();
    let one_in = if guest::sweeps_are_whole() { 1 } else { one_in };
    let begun = Instant::now();
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
    let (mut files, mut recoveries) = (0, 0);
    for (at, number) in (0..bytes.len()).zip(guest::seed()..) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        for (how, broken) in [("cut", &bytes[..at]), ("flipped", &flipped[..])] {
            let when = format!("{how} at byte {at}");
            fs::write(&file, broken).unwrap();
            let journal = place.open(&engine);
            assert_eq!(journal.records(), [], "{when}");
            let [problem] = journal.problems() else {
                panic!("{when}: {:?}", journal.problems());
            };
            assert_eq!(fs::read(&problem.file).unwrap(), broken, "{when}");
            if number % one_in == 0 {
                let recovery = engine.recover(&journal, soon()).unwrap();
                assert!(recovery.volumes.is_empty(), "{when}: {recovery:?}");
                // The device counts as foreign, and stays.
                assert_eq!(recovery.foreign.len(), 1, "{when}: {recovery:?}");
                assert_eq!(fs::read(&problem.file).unwrap(), broken, "{when}");
                recoveries += 1;
            }
            fs::remove_file(&problem.file).unwrap();
            files += 1;
        }
    }
    let done = format!("{files} broken files, {recoveries} recoveries");
    let points = format!("each of {} bytes", bytes.len());
    guest::tell(&format!("{what}: {done}, {points}"));
    if guest::sweeps_are_whole() {
        let sweep = format!("broken records, {what}");
        guest::tell_whole_sweep(&sweep, done, points, begun.elapsed());
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
    place.require_clean(what);
}

fn first_bytes(node: &Path) -> Vec<u8> {
    let mut bytes = vec![0; MARK.len()];
    let mut disk = fs::File::open(node).unwrap();
    disk.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_record_of_a_scsi_volume_that_is_cut_or_flipped_anywhere_is_set_aside_and_the_disk_stays() {
    let target = ScsiDebug::with_luns(2);
    sweep("SCSI", unit(&target, 1), 9);
}

#[test]
fn a_record_of_an_nbd_volume_that_is_cut_or_flipped_anywhere_is_set_aside_and_the_device_stays() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(8 << 20);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    // Each recovery also asks the kernel for its NBD devices.
    sweep("NBD", server.uri("disk").parse().unwrap(), 31);
}
