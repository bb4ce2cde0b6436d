use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::connect::forget_last_connection;
use super::*;
use crate::engine::NbdOptions;
use crate::engine::usage::failed_flush::FailedFlush;
use crate::id::{NbdIndex, Source};
use crate::kernel::Roots;

const SOURCE: &str = "nbd://192.0.2.1/vol-7";

/// A machine on which [`SOURCE`] is connected as nbd0, writable.
fn connected() -> (tempfile::TempDir, Engine) {
    connected_from(SOURCE)
}

fn connected_from(source: &str) -> (tempfile::TempDir, Engine) {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let dir = roots.sysfs.join("block/nbd0");
    for dir in [&dir, &roots.run] {
        fs::create_dir_all(dir).unwrap();
    }
    let backend = BackendId::derived(source);
    for (attribute, text) in [
        ("dev", "43:0\n"),
        ("pid", "1\n"),
        ("ro", "0\n"),
        ("backend", backend.as_str()),
    ] {
        fs::write(dir.join(attribute), text).unwrap();
    }
    (root, Engine::start(roots).unwrap())
}

fn refusal_of(engine: &Engine, request: &AttachRequest) -> Error {
    let soon = Deadline::after(Duration::from_secs(10));
    engine.attach(request, soon).unwrap_err()
}

#[test]
fn a_device_that_is_writable_is_not_handed_out_as_read_only() {
    let (_root, engine) = connected();
    let source: Source = SOURCE.parse().unwrap();
    let request = AttachRequest::new(source).nbd(NbdOptions::default().read_only());
    let error = refusal_of(&engine, &request);
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(error.to_string().contains("nbd0"), "{error}");
}

#[test]
fn a_uri_that_the_kernel_cannot_keep_is_refused_unless_it_is_kept_elsewhere() {
    let (_root, engine) = connected();
    let long = format!("nbd://192.0.2.1/{}", "x".repeat(300));
    let source: Source = long.parse().unwrap();
    let error = refusal_of(&engine, &AttachRequest::new(source.clone()));
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.to_string().contains("255 at most"), "{error}");
    let options = NbdOptions::default().backend("short".parse().unwrap());
    let request = AttachRequest::new(source).nbd(options);
    let Source::Nbd(uri) = &request.source else {
        unreachable!("an NBD URI");
    };
    let backend = request.nbd.backend_of(&request.source);
    require_healable(uri, &backend, &request).unwrap();
}

#[test]
fn one_id_is_not_taken_for_two_sources() {
    let (_root, engine) = connected();
    let other: Source = "nbd://192.0.2.2/vol-7".parse().unwrap();
    let options = NbdOptions::default().backend(BackendId::derived(SOURCE));
    let error = refusal_of(&engine, &AttachRequest::new(other).nbd(options));
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(error.to_string().contains(SOURCE), "{error}");
}

#[test]
fn an_nbd_source_with_further_paths_is_refused_and_none_is_ignored() {
    let (_root, engine) = connected();
    let [source, path] = [SOURCE, "nbd://192.0.2.2/vol-7"].map(|s| s.parse::<Source>().unwrap());
    let error = refusal_of(&engine, &AttachRequest::new(source).path(path));
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert_eq!(error.stage(), Some(Stage::Resolve), "{error}");
}

#[test]
fn what_a_flush_lost_is_forgotten_with_its_connection_and_not_before() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let dir = roots.sysfs.join("block/nbd0");
    fs::create_dir_all(&dir).unwrap();
    for (attribute, text) in [("dev", "43:0\n"), ("diskseq", "7\n"), ("pid", "1\n")] {
        fs::write(dir.join(attribute), text).unwrap();
    }
    let index = NbdIndex::new(0).unwrap();
    let device = NbdDevice::find(&roots, index).unwrap().unwrap();
    let failures = FailedFlush::of(&roots, device.disk()).unwrap();
    failures.set(&Error::new(ErrorKind::Io, "no"));
    forget_last_connection(&roots, index).unwrap();
    assert_eq!(failures.read().unwrap().as_deref(), Some("no"));
    fs::remove_file(dir.join("pid")).unwrap();
    forget_last_connection(&roots, index).unwrap();
    assert_eq!(failures.read().unwrap(), None);
    // The process of a flush was killed before it saw the result.
    let flush = failures.clone().begin().unwrap();
    flush.mark_as_unseen().unwrap();
    std::mem::forget(flush);
    forget_last_connection(&roots, index).unwrap();
    assert_eq!(failures.begin().unwrap().unseen(), None);
}

/// How many threads of this process are in an `open` of `path`.
fn opening(path: &Path) -> usize {
    let memory = fs::File::open("/proc/self/mem").unwrap();
    let opens_it = |call: &str| {
        // The number of the call, and its arguments: the second is the path.
        let mut words = call.split_whitespace();
        let is_open = words.next() == Some(&nix::libc::SYS_openat.to_string());
        let at = words.nth(1).and_then(|at| at.strip_prefix("0x"));
        let at = at.and_then(|at| u64::from_str_radix(at, 16).ok());
        let mut opened = vec![0; path.as_os_str().len()];
        let is_read = at.is_some_and(|at| memory.read_exact_at(&mut opened, at).is_ok());
        is_open && is_read && opened == path.as_os_str().as_bytes()
    };
    let threads = fs::read_dir("/proc/self/task").unwrap();
    let calls = threads.filter_map(|thread| {
        // The thread may have ended.
        let thread = thread.ok()?.path();
        fs::read_to_string(thread.join("syscall")).ok()
    });
    calls.filter(|call| opens_it(call)).count()
}

#[test]
fn a_repeated_attach_or_heal_of_a_device_that_hangs_has_one_thread_in_its_read() {
    // No server listens there.
    const NOWHERE: &str = "nbd://127.0.0.1:1/vol-7";
    let (_root, engine) = connected_from(NOWHERE);
    fs::create_dir_all(&engine.roots().dev).unwrap();
    let node = engine.roots().dev.join("nbd0");
    // The kernel holds a process that opens it until another opens it for writing.
    nix::unistd::mkfifo(&node, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let source: Source = NOWHERE.parse().unwrap();
    let request = AttachRequest::new(source.clone());
    let attach = || engine.attach(&request, Deadline::after(Duration::from_millis(300)));
    let hangs = attach().unwrap_err();
    assert_eq!(hangs.kind(), ErrorKind::TimedOut, "{hangs}");
    let limit = Deadline::after(Duration::from_secs(60));
    while opening(&node) == 0 {
        assert!(!limit.has_passed(), "no thread reads it");
        std::thread::yield_now();
    }
    let mut said = String::new();
    for _again in 0..2 {
        let hangs = attach().unwrap_err();
        assert_eq!(hangs.stage(), Some(Stage::Probe), "{hangs}");
        said = format!("{hangs:#}");
        let soon = Deadline::after(Duration::from_millis(300));
        let healing = engine.heal_source(&source, &NbdOptions::default(), soon);
        assert!(!healing.unwrap().outcome.serves());
    }
    assert_eq!(opening(&node), 1);
    assert!(said.contains("an earlier read has not returned"), "{said}");
    // This ends the waiting open.
    let writer = fs::OpenOptions::new().read(true).write(true).open(&node);
    drop(writer.unwrap());
}

#[test]
fn a_repeated_attach_checks_the_connections_that_an_attach_without_an_end_has_left() {
    let (_root, engine) = connected();
    let roots = engine.roots();
    fs::create_dir_all(&roots.dev).unwrap();
    fs::write(roots.dev.join("nbd0"), [0; 4096]).unwrap();
    let dir = roots.sysfs.join("block/nbd0");
    fs::write(dir.join("size"), "8\n").unwrap();
    fs::create_dir_all(dir.join("mq")).unwrap();
    // One receiver runs.
    for (pid, name) in [(2, "kthreadd"), (3, "kworker/u5:2+nbd0-recv")] {
        let process = roots.proc.join(pid.to_string());
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("comm"), format!("{name}\n")).unwrap();
        let stat = format!("{pid} ({name}) I 2 0 0 0 -1 {} 0\n", 0x0020_0000);
        fs::write(process.join("stat"), stat).unwrap();
    }
    let pairs = [(); 2].map(|()| std::os::unix::net::UnixStream::pair().unwrap());
    let (ours, _peers): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let link = Link::new(
        SOURCE.parse().unwrap(),
        BackendId::derived(SOURCE),
        ours.into_iter().map(Into::into).collect(),
        nbd::NewTimeouts::default(),
        Some(1),
    );
    let index = NbdIndex::new(0).unwrap();
    engine.links.lock().insert(index, link);
    let source: Source = SOURCE.parse().unwrap();
    let error = refusal_of(&engine, &AttachRequest::new(source));
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert!(error.to_string().contains("does not receive"), "{error}");
    assert!(engine.links.lock().contains_key(&index));
}
