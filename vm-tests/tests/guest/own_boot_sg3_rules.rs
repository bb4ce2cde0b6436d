//! Disks on a machine with Debian's package `sg3-utils-udev`: its rules run `sg_inq` for each
//! disk, and add names and links.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lunbd::uevent::Settled;
use lunbd::{AttachRequest, Deadline};
use vm_tests::guest::agent::{engine, unit};
use vm_tests::guest::{self, ScsiDebug, udevd};

const RULES: &str = "/lib/udev/rules.d/55-scsi-sg3_id.rules";
/// LUNs that appear at once: the rules delay each of them.
const LUNS: u64 = 4;

/// These rules run a dozen programs for each disk, and a busy machine emulates them.
fn patient() -> Deadline {
    Deadline::after(Duration::from_mins(4))
}

fn property(node: &Path, name: &str) -> String {
    let name = format!("--property={name}");
    let node = node.to_str().unwrap();
    let value = guest::run(&[
        "udevadm",
        "info",
        "--query=property",
        &name,
        "--value",
        node,
    ]);
    value.trim().to_owned()
}

/// The links in udev's record of a disk.
fn recorded(devno: &str) -> BTreeSet<PathBuf> {
    let record = fs::read_to_string(format!("/run/udev/data/b{devno}")).unwrap_or_default();
    let links = record.lines().filter_map(|line| line.strip_prefix("S:"));
    links.map(|link| Path::new("/dev").join(link)).collect()
}

#[test]
fn an_attach_waits_for_the_rules_of_sg3_utils_and_names_the_unit_as_the_unit_does() {
    guest::enter();
    assert!(Path::new(RULES).exists(), "{RULES}");
    let (engine, target) = (engine(), ScsiDebug::with_luns(32));
    let attachments: Vec<_> = std::thread::scope(|scope| {
        let start = |lun| {
            let (engine, target) = (&engine, &target);
            scope.spawn(move || {
                let request = AttachRequest::new(unit(target, lun));
                let attachment = engine.attach(&request, patient()).unwrap();
                // Read the record at once: an attach does not wait for what udev does later.
                let recorded = recorded(&attachment.devno.to_string());
                (lun, attachment, recorded)
            })
        };
        let threads: Vec<_> = (1..=LUNS).map(start).collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap());
        joined.collect()
    });
    udevd::settle();
    for (lun, attachment, recorded_then) in attachments {
        // If the rules are slow, a barrier settles the device.
        assert_ne!(attachment.settled, Settled::KernelOnly);
        let links: BTreeSet<PathBuf> = attachment.links.iter().cloned().collect();
        assert_eq!(links, recorded_then);
        assert_eq!(links, recorded(&attachment.devno.to_string()));
        for link in &links {
            assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
        }
        // Only these rules make one of these links: an older version from the unit's serial
        // number, a newer one from the T10 name, which ends in it.
        let serial = property(&attachment.node, "SCSI_IDENT_SERIAL");
        assert!(!serial.is_empty());
        let of_serial = ["S", "1"].map(|kind| {
            let name = format!("scsi-{kind}Linux_scsi_debug_{serial}");
            Path::new("/dev/disk/by-id").join(name)
        });
        let is_made = of_serial.iter().any(|link| links.contains(link));
        assert!(is_made, "{of_serial:?}: {links:?}");
        let identity = attachment.identity().unwrap();
        let naa = property(&attachment.node, "ID_WWN_WITH_EXTENSION");
        guest::tell(&format!(
            "identity {identity}, ID_SERIAL {}, ID_WWN_WITH_EXTENSION {naa}, links {links:?}",
            property(&attachment.node, "ID_SERIAL")
        ));
        let naa = format!("naa.{}", naa.strip_prefix("0x").unwrap());
        assert!(identity.is(&naa.parse().unwrap()), "{naa}: {identity}");

        let detachment = engine.detach(unit(&target, lun), patient()).unwrap();
        assert!(detachment.safe_to_unmap, "{detachment:?}");
        for link in &links {
            assert!(link.symlink_metadata().is_err(), "{}", link.display());
        }
    }
    assert_eq!(target.devices(), [] as [&str; 0]);
}
