use std::fs;
use std::time::Duration;

use super::*;
use crate::engine::telemetry::Call;
use crate::id::NbdIndex;
use crate::kernel::Roots;
use crate::nbd::{Difference, ExportFlags};

#[test]
fn a_server_that_grew_is_followed_and_one_that_shrank_is_refused_with_both_sizes() {
    let index = NbdIndex::new(3).unwrap();
    let said = |differences: &[Difference]| size_on_server(index, 4096, differences);
    assert_eq!(said(&[]).unwrap(), 4096);
    let (from, to) = (4096, 8192);
    let grown = [Difference::BecameWritable, Difference::Grown { from, to }];
    assert_eq!(said(&grown).unwrap(), 8192);
    let lost = ExportFlags::SEND_FLUSH;
    let gained = ExportFlags::empty();
    for (difference, expected) in [
        (
            Difference::Shrunk { from, to: 512 },
            "512 bytes and nbd3 has 4096",
        ),
        (
            Difference::BecameReadOnly,
            "nbd3 has another export now: read-only",
        ),
        (Difference::Flags { lost, gained }, "flags lost: SEND_FLUSH"),
    ] {
        let error = said(&[Difference::Grown { from, to }, difference]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_device_without_a_connection_a_backend_id_or_a_known_server_is_not_resized() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let dir = roots.sysfs.join("block/nbd0");
    for dir in [&dir, &roots.run] {
        fs::create_dir_all(dir).unwrap();
    }
    fs::write(dir.join("dev"), "43:0\n").unwrap();
    let engine = Engine::start(roots).unwrap();
    let index = NbdIndex::new(0).unwrap();
    let device = NbdDevice::find(engine.roots(), index).unwrap().unwrap();
    let target = DetachTarget::Device("/dev/nbd0".into());
    let request = ResizeRequest::new(target);
    let refused = || {
        let soon = Deadline::after(Duration::from_secs(10));
        let mut call = CallContext::new(Call::Resize, None, soon);
        let resized = resize_nbd_device(&engine, &device, &request, &mut call);
        resized.unwrap_err().kind()
    };
    assert_eq!(refused(), ErrorKind::NotFound);
    fs::write(dir.join("pid"), "1\n").unwrap();
    assert_eq!(refused(), ErrorKind::NotSupported);
    fs::write(dir.join("backend"), "volume\n").unwrap();
    assert_eq!(refused(), ErrorKind::InvalidInput);
}
