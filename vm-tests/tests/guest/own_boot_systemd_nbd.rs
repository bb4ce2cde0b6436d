//! A machine whose pid 1 is systemd: udevd is a service of it, in a sandbox.

use std::fs;

use lunbd::uevent::{Mode, Settled};
use lunbd::{AttachRequest, Source};
use vm_tests::guest::agent::{attach, detach, engine, soon, writes_and_reads};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer};
use vm_tests::guest::{self, ScsiDebug, udevd};

fn of_udevd(file: &str) -> String {
    let pid = udevd::pid().expect("udevd runs");
    fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap()
}

/// systemd runs udevd, with only the system calls of its unit and with private mounts.
fn assert_udevd_is_a_service() {
    assert_eq!(fs::read_to_string("/proc/1/comm").unwrap(), "systemd\n");
    let active = guest::run(&["systemctl", "is-active", "systemd-udevd.service"]);
    assert_eq!(active, "active\n");
    let group = of_udevd("cgroup");
    assert!(group.contains("systemd-udevd.service"), "{group}");
    let status = of_udevd("status");
    assert!(status.contains("\nSeccomp:\t2\n"), "{status}");
    let pid = udevd::pid().unwrap();
    let mounts = |of: &str| fs::read_link(format!("/proc/{of}/ns/mnt")).unwrap();
    assert_ne!(mounts(&pid.to_string()), mounts("1"));
}

#[test]
fn under_systemd_a_lun_and_an_nbd_export_come_with_their_links_and_go() {
    guest::enter();
    let _module = NbdModule::with_backend_ids(2);
    assert_udevd_is_a_service();
    let (engine, target) = (engine(), ScsiDebug::with_luns(4));
    assert_eq!(engine.hub().mode(), Mode::Udev);
    let attachment = attach(&engine, &target, 3);
    assert_eq!(attachment.settled, Settled::UdevEvent);
    assert!(!attachment.links.is_empty());
    for link in &attachment.links {
        assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
    }
    writes_and_reads(&attachment);
    let detachment = detach(&engine, &target, 3).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(target.devices(), [] as [&str; 0]);
    for link in &attachment.links {
        assert!(link.symlink_metadata().is_err(), "{}", link.display());
    }

    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let source: Source = server.uri("").parse().unwrap();
    let request = AttachRequest::new(source.clone());
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_ne!(attachment.settled, Settled::KernelOnly);
    assert_eq!(attachment.size, 8 << 20);
    writes_and_reads(&attachment);
    let record = format!("/run/udev/data/b{}", attachment.devno);
    fs::read(record).expect("udev's record of the device");
    let detachment = engine.detach(source, soon()).unwrap();
    assert!(detachment.changed, "{detachment:?}");
    let name = attachment.node.file_name().unwrap().to_str().unwrap();
    assert!(!fs::exists(format!("/sys/block/{name}/pid")).unwrap());
    // It is the same udevd as before, and none of our actions made a unit fail.
    assert_udevd_is_a_service();
    let failed = guest::run(&[
        "systemctl",
        "list-units",
        "--failed",
        "--plain",
        "--no-legend",
    ]);
    assert!(!failed.contains("udev"), "{failed}");
}
