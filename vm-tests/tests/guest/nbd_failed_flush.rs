//! Failed writes and flushes that no process was there to be told of.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use lunbd::engine::{HealOutcome, NbdOptions};
use lunbd::nbd::disconnect;
use lunbd::{AttachRequest, DetachTarget, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_device::{Device, HEALING};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::udevd;
use vm_tests::guest::unwritten::{LazyWriteback, keep_unwritten};

const SIZE: u64 = 16 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// The command ends long before the kernel fails the requests.
const DEAD_AFTER: Duration = Duration::from_secs(60);

/// A command that ends at its timeout is killed while a thread of it waits in the kernel, as at
/// `kill -9`. The kernel keeps the process until it has failed the thread's requests.
#[test]
fn what_a_detach_that_timed_out_could_not_write_is_reported_by_the_next_detach() {
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(SIZE);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let engine = engine();
    let source: Source = server.uri("disk").parse().unwrap();
    let options = NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(DEAD_AFTER);
    let request = AttachRequest::new(source.clone()).nbd(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    // The last close of a device writes its pages back, so one file stays open.
    let reader = File::open(&attachment.node).unwrap();
    server.kill();
    // udevd has the kernel read the partitions again after a writer's close, and the kernel
    // then lets no process open the device until its pages are written back.
    let held = udevd::stopped();
    let writer = File::options().write(true).open(&attachment.node).unwrap();
    writer.write_all_at(&vec![0xa5; 1 << 20], 4 << 20).unwrap();
    drop(writer);
    let begun = Instant::now();
    let uri = source.to_string();
    let output = guest::lunbd(&["detach", &uri, "--timeout", "15s"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("flush"), "{said}");
    assert!(begun.elapsed() >= Duration::from_secs(25), "{said}");
    drop(held);
    server.start();
    guest::wait_until("the device to serve again", LIMIT, || {
        let healed = engine.heal(soon()).unwrap();
        matches!(healed[0].outcome, HealOutcome::Adopted(_)).then_some(())
    });
    drop(reader);
    let output = guest::lunbd(&["detach", &uri, "--json"]);
    let said = String::from_utf8_lossy(&output.stderr);
    let stored = fs::read(store.path()).unwrap();
    assert_eq!(stored[4 << 20], 0, "the server has what was written");
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("\"io\""), "{said}");
    let output = guest::lunbd(&["detach", &uri, "--abandon-unwritten"]);
    assert!(output.status.success(), "{output:?}");
}

/// The kernel keeps no error of a flush of the server's cache, and `fdatasync` on the server's
/// machine reports one once.
#[test]
fn a_detach_after_one_whose_process_ended_in_a_flush_that_failed_is_not_safe() {
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(SIZE);
    let (file, asked) = (store.path().display(), store.path().with_extension("asked"));
    let size = format!("get_size=echo {SIZE}");
    let read = format!("pread=dd if={file} skip=$4 count=$3 iflag=skip_bytes,count_bytes");
    let write = format!("pwrite=dd of={file} seek=$4 oflag=seek_bytes conv=notrunc");
    let asked = asked.display();
    let flush = format!(
        "flush=[ -e {asked} ] && exit 0; touch {asked}; sleep 25; echo EIO lost >&2; exit 1"
    );
    let can = ["can_write=exit 0", "can_flush=exit 0"];
    let arguments = [&["eval", &size, &read, &write, &flush][..], &can].concat();
    let server = NbdServer::nbdkit(At::tcp(), &arguments);
    let engine = engine();
    let source: Source = server.uri("").parse().unwrap();
    // The flush fails long before the kernel gives up its connection.
    let options = NbdOptions::default().io_timeout(Duration::from_secs(90));
    let request = AttachRequest::new(source.clone()).nbd(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    udevd::settle();
    let mut writer = File::options();
    let writer = writer.write(true).open(&attachment.node).unwrap();
    writer.write_all_at(&[0xa5; 4096], 4 << 20).unwrap();
    drop(writer);
    udevd::settle();
    let uri = source.to_string();
    let output = guest::lunbd(&["detach", &uri, "--timeout", "15s"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("flush"), "{said}");
    let output = guest::lunbd(&["detach", &uri, "--json"]);
    assert!(output.status.success(), "{output:?}");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["safe_to_unmap"], false, "{said}");
    assert!(said["flush"]["unproven"].is_string(), "{said}");
    fs::remove_file(asked.to_string()).unwrap();
}

/// Neither the number nor the sequence number of a disk changes when it is connected again.
#[test]
fn what_a_device_lost_is_no_loss_of_the_server_that_another_tool_connects_at_its_index() {
    let _lazy = LazyWriteback::start();
    let _module = NbdModule::with_backend_ids(1);
    let fails = Store::sparse(0);
    let fails_from_now = format!("error-pwrite-file={}", fails.path().display());
    let rate = "error-pwrite-rate=100%";
    fs::remove_file(fails.path()).unwrap();
    let filter = ["--filter=error", "memory", "8M"];
    let arguments = [&filter[..], &["error-pwrite=EIO", rate, &fails_from_now]].concat();
    let server = NbdServer::nbdkit(At::tcp(), &arguments);
    let engine = engine();
    let source: Source = server.uri("").parse().unwrap();
    let request = AttachRequest::new(source.clone());
    let attachment = engine.attach(&request, soon()).unwrap();
    udevd::settle();
    let reader = keep_unwritten(&attachment.node);
    let writer = File::options().write(true).open(&attachment.node).unwrap();
    writer.write_all_at(&[0xa5; 4096], 4 << 20).unwrap();
    drop(writer);
    fs::write(fails.path(), "").unwrap();
    for _ in 0..2 {
        let error = engine.detach(source.clone(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    }
    drop(reader);
    let index = attachment.nbd_index().unwrap();
    disconnect(engine.roots(), index, soon()).unwrap();
    let other = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let device = Device::connect(&other.uri(""), index.get(), HEALING);
    assert_eq!(device.node(), attachment.node);
    udevd::settle();
    let detachment = engine.detach(DetachTarget::Device(device.node()), soon());
    let detachment = detachment.unwrap();
    assert!(
        detachment.changed && detachment.safe_to_unmap,
        "{detachment:?}"
    );
}
