//! An address that `scsi_debug` gives to another unit under the kernel's device.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test panics to fail"
)]

use std::fs;
use std::path::PathBuf;

use lunbd::engine::Flush;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::{self, ScsiDebug};

/// A LUN of the second host, whose units go by the host's number or not.
struct Remapped {
    engine: Engine,
    target: ScsiDebug,
    source: Source,
}

impl Remapped {
    fn new() -> Self {
        let engine = engine();
        let target = ScsiDebug::options().luns(4).hosts(2).size_mib(16).load();
        target.set("vpd_use_hostno", 1);
        let source = format!("scsi:{}:0:0:3", target.hosts()[1]).parse().unwrap();
        Self {
            engine,
            target,
            source,
        }
    }

    fn attach(&self) -> lunbd::error::Result<Attachment> {
        let request = AttachRequest::new(self.source.clone());
        self.engine.attach(&request, soon())
    }

    /// From now on another unit answers.
    fn remap(&self) {
        self.target.set("vpd_use_hostno", 0);
    }
}

#[test]
fn a_stale_device_that_nobody_uses_is_replaced_and_its_links_are_the_new_units() {
    let lab = Remapped::new();
    let old = lab.attach().unwrap();
    guest::udevd::settle();
    lab.remap();
    let new = lab.attach().unwrap();
    assert!(new.changed);
    let (was, is) = (old.identity().unwrap(), new.identity().unwrap());
    assert!(was.contradicts(is), "{was} and {is}");
    if guest::kernel() >= (5, 15) {
        assert_ne!(new.diskseq, old.diskseq);
    }
    let by_id = |attachment: &Attachment| -> Vec<PathBuf> {
        let links = attachment.links.iter().filter(|link| {
            let link = link.to_string_lossy();
            link.contains("/by-id/")
        });
        links.cloned().collect()
    };
    assert!(!by_id(&new).is_empty());
    for link in by_id(&new) {
        assert_eq!(fs::canonicalize(&link).unwrap(), new.node);
    }
    for link in by_id(&old) {
        assert!(fs::symlink_metadata(&link).is_err(), "{}", link.display());
    }
    assert_eq!(lab.target.devices().len(), 1);
    let detachment = lab.engine.detach(lab.source.clone(), soon()).unwrap();
    assert_eq!(detachment.flush, Some(Flush::Done));
}

#[test]
fn a_stale_device_that_is_mounted_is_refused_with_its_mount_and_left() {
    let lab = Remapped::new();
    let old = lab.attach().unwrap();
    let node = old.node.to_str().unwrap();
    guest::run(&["mkfs.ext4", "-q", "-F", node]);
    fs::create_dir_all("/tmp/stale").unwrap();
    guest::run(&["mount", node, "/tmp/stale"]);
    lab.remap();
    let attached = lab.attach();
    let detached = lab.engine.detach(lab.source.clone(), soon());
    let stands = lab.target.devices();
    guest::run(&["umount", "/tmp/stale"]);
    fs::remove_dir("/tmp/stale").unwrap();

    let error = attached.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let text = error.to_string();
    assert!(text.contains("mounted on /tmp/stale"), "{text}");
    let was = old.identity().unwrap().wwid().unwrap().to_string();
    assert!(text.contains(&was), "{text}");
    let failure = detached.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    assert!(failure.to_string().contains("mounted on /tmp/stale"));
    assert_eq!(stands.len(), 1);

    // Idle now: not a byte of the old unit's is written to the new one.
    let detachment = lab.engine.detach(lab.source.clone(), soon()).unwrap();
    assert!(
        matches!(detachment.flush, Some(Flush::Replaced(_))),
        "{detachment:?}"
    );
    assert!(!detachment.safe_to_unmap);
    assert_eq!(lab.target.devices(), [] as [&str; 0]);
}
