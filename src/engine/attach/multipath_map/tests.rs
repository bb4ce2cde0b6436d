use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::*;
use crate::engine::attach::multipath_map::wait_for_map;
use crate::engine::detach::remove_paths::tests::path;
use crate::engine::telemetry::Call;
use crate::kernel::Roots;
use crate::transport::RouteKind;

/// A multipathd that answers `ok` to every command and makes no map. It closes the first
/// `closed_first` connections without an answer. Returns the commands that it receives.
fn multipathd(roots: &Roots, closed_first: usize) -> Arc<Mutex<Vec<String>>> {
    fs::create_dir_all(&roots.run).unwrap();
    let listener = UnixListener::bind(roots.run.join("multipathd.socket")).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&told);
    std::thread::spawn(move || {
        for stream in listener.incoming().skip(closed_first) {
            let mut stream = stream.unwrap();
            let mut length = [0; 8];
            if stream.read_exact(&mut length).is_err() {
                continue;
            }
            let mut text = vec![0; usize::try_from(u64::from_ne_bytes(length)).unwrap()];
            stream.read_exact(&mut text).unwrap();
            let text = String::from_utf8(text).unwrap();
            let text = text.trim_end_matches('\0').to_owned();
            let reply = if text.starts_with("show") {
                "sdb/3unit\n"
            } else {
                "ok\n"
            };
            heard.lock().push(text);
            let length = u64::try_from(reply.len() + 1).unwrap();
            let packet = [&length.to_ne_bytes()[..], reply.as_bytes(), &[0]].concat();
            let _the_client_may_have_left = stream.write_all(&packet);
        }
    });
    told
}

/// Requires the map of one path, sdb, which multipathd never makes.
fn require_map(engine: &Engine) -> Error {
    search_in_vain(engine, MapPolicy::Required, &Identity::default())
}

fn search_in_vain(engine: &Engine, wanted: MapPolicy, identity: &Identity) -> Error {
    let roots = engine.roots();
    fs::create_dir_all(roots.proc.join("self")).unwrap();
    fs::create_dir_all(roots.sysfs.join("block")).unwrap();
    let mounts = roots.proc.join("self/mountinfo");
    if !mounts.exists() {
        fs::write(mounts, "").unwrap();
    }
    let known = path(roots, "1:0:0:4", "sdb");
    let hctl = known.device.hctl();
    let paths = [ProbedPath {
        access_state: None,
        via: RouteKind::Address { hctl },
        diskseq: None,
        identity: Identity::default(),
        watch: engine.hub().watch("1:0:0:4"),
        changed: false,
        disk: known.disk.unwrap(),
        device: known.device,
    }];
    let map_waiter = MapWaiter {
        watch: engine.hub().watch("virtual"),
        daemon: Daemon::find(roots).unwrap(),
        wanted,
    };
    let soon = Deadline::after(Duration::from_secs(30));
    let mut call = CallContext::new(Call::Attach, None, soon);
    let done = wait_for_map(engine, map_waiter, &paths, identity, &mut call);
    done.unwrap_err()
}

#[test]
fn no_map_is_made_over_a_path_that_is_in_use() {
    for in_use in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        let told = multipathd(roots, 0);
        fs::create_dir_all(roots.proc.join("self")).unwrap();
        let mount = "1 1 8:16 / /mnt rw - ext4 /dev/sdb rw\n";
        let mounts = if in_use { mount } else { "" };
        fs::write(roots.proc.join("self/mountinfo"), mounts).unwrap();
        let error = require_map(&engine);
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        let told = told.lock();
        let asked = told.iter().any(|command| command.starts_with("add map"));
        assert_eq!(asked, !in_use, "{told:?}");
        let names_the_user = error.to_string().contains("sdb is in use: mounted");
        assert_eq!(names_the_user, in_use, "{error}");
    }
}

#[test]
fn the_command_is_sent_again_to_a_multipathd_that_restarts_meanwhile() {
    // `Daemon::find` opens a connection too.
    for (closed, kind) in [(2, ErrorKind::Refused), (1000, ErrorKind::Unreachable)] {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let told = multipathd(engine.roots(), closed);
        let error = require_map(&engine);
        assert_eq!(error.kind(), kind, "{error}");
        let told = told.lock();
        let asked = told.iter().any(|command| command == "add path sdb");
        assert_eq!(asked, kind == ErrorKind::Refused, "{told:?}");
    }
}

#[test]
fn a_path_is_not_returned_beside_a_map_of_its_unit_that_has_lost_all_paths() {
    for answers in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        let _told = answers.then(|| multipathd(roots, 0));
        let map = roots.sysfs.join("block/dm-0");
        for folder in ["dm", "slaves"] {
            fs::create_dir_all(map.join(folder)).unwrap();
        }
        for (file, text) in [
            ("dev", "253:0\n"),
            ("dm/uuid", "mpath-35000c500a1b2c3d4\n"),
            ("dm/name", "mpatha\n"),
        ] {
            fs::write(map.join(file), text).unwrap();
        }
        let identity = Identity::of(["naa.5000c500a1b2c3d4".parse().unwrap()]);
        let error = search_in_vain(&engine, MapPolicy::No, &identity);
        let kind = if answers {
            ErrorKind::Refused
        } else {
            ErrorKind::Unreachable
        };
        assert_eq!(error.kind(), kind, "{error}");
        let said = error.to_string();
        assert!(
            said.contains("mpatha") && said.contains("no path"),
            "{said}"
        );
    }
}
