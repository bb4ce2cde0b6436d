//! A unit that two Fibre Channel ports serve, with multipathd.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Duration;

use lunbd::engine::{Flush, Multipath};
use lunbd::kernel::blockdev::BlockDevice;
use lunbd::multipath::Map;
use lunbd::{AttachRequest, Roots, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::fcoe::FcFabric;
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};

const MIB: u64 = 1 << 20;
const LUN: u64 = 3;
/// The limit for a round of the path checker and a login of the ports.
const LIMIT: Duration = Duration::from_secs(120);

fn scsi_devices() -> Vec<String> {
    let mut names = guest::entries("/sys/bus/scsi/devices");
    names.retain(|name| name.matches(':').count() == 3);
    names
}

#[test]
fn two_ports_are_two_paths_of_one_map_which_outlives_a_link_and_a_detach_leaves_nothing() {
    let engine = engine();
    let store = Store::file("fa1", 16 * MIB);
    let mut fabrics = [0, 1].map(FcFabric::up_on);
    for fabric in &mut fabrics {
        fabric.map(LUN, &store);
    }
    let multipathd = Multipathd::start(NoPath::Fail);
    let ports = fabrics.each_ref().map(FcFabric::target_wwpn).join(",");
    let source: Source = format!("fc://{ports}/{LUN}").parse().unwrap();

    let request = AttachRequest::new(source.clone())
        .expect(store.wwid().parse().unwrap())
        .min_paths(2)
        .multipath(Multipath::Require);
    let attachment = engine.attach(&request, soon()).unwrap();
    let name = attachment.node.file_name().unwrap().to_str().unwrap();
    assert_eq!(multipathd::maps(), [name]);
    assert_eq!(attachment.size, 16 * MIB);
    let mut vias: Vec<String> = attachment
        .paths()
        .iter()
        .map(|path| path.via.to_string())
        .collect();
    vias.sort();
    let mut rports: Vec<String> = fabrics
        .iter()
        .map(|fabric| fabric.rport().unwrap())
        .collect();
    rports.sort();
    assert_eq!(vias, rports);
    for path in attachment.paths() {
        let disk = path.node.file_name().unwrap().to_str().unwrap();
        assert_eq!(multipathd::map_of(disk).as_deref(), Some(name));
    }
    assert!(!attachment.links.is_empty());
    for link in &attachment.links {
        assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
    }

    // While each link in turn is down, the other port serves the map.
    let disk = attachment.paths()[0].node.file_name().unwrap();
    let disk = disk.to_str().unwrap();
    for fabric in &fabrics {
        fabric.link_down();
        let direct = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_DIRECT)
            .open(&attachment.node);
        let mut page = memmap2::MmapMut::map_anon(4096).unwrap();
        direct.unwrap().read_exact_at(&mut page, 0).unwrap();
        fabric.link_up();
        wait_for_both_paths(disk);
    }

    let mut disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    disk.write_all(&[0x5a; 4096]).unwrap();
    drop(disk);
    let detachment = engine.detach(source, soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    let receipt = detachment.receipt.unwrap();
    let map = receipt.map.unwrap();
    assert!(map.gone && map.flush == Some(Flush::Done), "{map:?}");
    assert_eq!(receipt.paths.len(), 2);
    for path in &receipt.paths {
        assert!(path.gone && path.forgotten == Some(true), "{path:?}");
    }
    assert_eq!(multipathd::maps(), [] as [&str; 0]);
    assert_eq!(scsi_devices(), [] as [&str; 0]);
    for path in attachment.paths() {
        let disk = path.node.file_name().unwrap().to_str().unwrap();
        assert!(!multipathd.knows(disk));
    }
    for link in &attachment.links {
        assert!(link.symlink_metadata().is_err(), "{}", link.display());
    }
    let data = fs::read(store.path().unwrap()).unwrap();
    assert!(data[..4096].iter().all(|&byte| byte == 0x5a));
}

/// Waits until the kernel uses both paths of a map.
fn wait_for_both_paths(disk: &str) {
    let link = format!("/sys/block/{disk}");
    let disk = fs::canonicalize(link).unwrap();
    let path = BlockDevice::at(&disk).unwrap().expect("a path");
    guest::wait_until("both paths to be active", LIMIT, || {
        let map = Map::of_path(&path).unwrap()?;
        let status = map.status(&Roots::default(), soon()).ok()?;
        (status.active() == 2).then_some(())
    });
}
