//! Volumes that are formatted through their device, and other volumes in their place.

use std::fs;
use std::path::Path;
use std::time::Duration;

use lunbd::engine::{HealOutcome, HealReport, NbdOptions};
use lunbd::id::ContentName;
use lunbd::nbd::Difference;
use lunbd::{AttachRequest, Engine, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const SIZE: u64 = 16 << 20;

/// A server of a store, of one of two kinds.
type Serve = fn(At, &Store) -> NbdServer;

fn nbdkit(at: At, store: &Store) -> NbdServer {
    let path = store.path().to_str().unwrap();
    NbdServer::nbdkit(at, &["--export=disk", "file", path])
}

fn qemu_nbd(at: At, store: &Store) -> NbdServer {
    NbdServer::qemu_nbd(at, "disk", store.path(), &[])
}

/// Formats the volume, and returns its new name.
fn format(path: &Path) -> ContentName {
    let path = path.to_str().unwrap();
    guest::run(&["mkfs.ext4", "-q", "-F", path]);
    // udev reads a device when the tool has closed it.
    guest::udevd::settle();
    let uuid = guest::run(&["blkid", "-p", "-s", "UUID", "-o", "value", path]);
    format!("fs.{}", uuid.trim()).parse().unwrap()
}

fn options() -> NbdOptions {
    NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(600))
}

fn healed(engine: &Engine) -> HealOutcome {
    let healings = engine.heal(soon()).unwrap();
    let [HealReport { outcome, .. }] = <[HealReport; 1]>::try_from(healings).expect("one device");
    outcome
}

fn has_this_volume_again(outcome: &HealOutcome) -> bool {
    matches!(outcome, HealOutcome::Adopted(told) if told.is_empty())
}

fn only_the_last_content_is_known(serve: Serve) {
    let (volume, blank) = (Store::sparse(SIZE), Store::sparse(SIZE));
    let (at_the_attach, earlier) = (Store::sparse(SIZE), Store::sparse(SIZE));
    let other = Store::sparse(SIZE);
    let others_name = format(other.path());
    let first_name = format(volume.path());
    fs::copy(volume.path(), at_the_attach.path()).unwrap();
    let (at, first) = (At::tcp(), engine());
    let mut server = serve(at.clone(), &volume);
    let source: Source = at.uri("disk").parse().unwrap();
    let request = AttachRequest::new(source.clone()).nbd(options());
    let node = first.attach(&request, soon()).expect("an attach").node;
    let earlier_name = format(&node);
    fs::copy(volume.path(), earlier.path()).unwrap();
    let name = format(&node);
    assert_ne!(name, earlier_name);
    server.kill();
    drop(server);
    // One engine attached the device, and the other knows it only through udev.
    for agent in [&first, &engine()] {
        for (store, serves) in [
            (&blank, vec![]),
            (&at_the_attach, vec![first_name.clone()]),
            (&earlier, vec![earlier_name.clone()]),
            (&other, vec![others_name.clone()]),
        ] {
            let before = fs::read(store.path()).unwrap();
            let impostor = serve(at.clone(), store);
            let outcome = healed(agent);
            let expected = Difference::Content {
                from: vec![name.clone()],
                to: serves,
                is_proven: true,
            };
            assert!(
                matches!(&outcome, HealOutcome::GeometryChanged(told) if told.contains(&expected)),
                "{outcome:?}"
            );
            drop(impostor);
            assert!(fs::read(store.path()).unwrap() == before, "written to");
        }
    }
    let mut server = serve(at.clone(), &volume);
    let outcome = healed(&first);
    assert!(has_this_volume_again(&outcome), "{outcome:?}");
    server.kill();
    drop(server);
    let mut server = serve(at.clone(), &other);
    let accepting = options().accept_content();
    let healing = first.heal_source(&source, &accepting, soon()).unwrap();
    assert!(
        matches!(healing.outcome, HealOutcome::Adopted(_)),
        "{healing:?}"
    );
    // udev reads the accepted content, which is the volume's from now on.
    guest::udevd::settle();
    let place = Directory::new("reformat");
    let (node, place) = (node.to_str().unwrap(), place.to_str().unwrap());
    guest::run(&["mount", "-t", "ext4", node, place]);
    for agent in [&first, &engine()] {
        server.kill();
        drop(server);
        server = serve(at.clone(), &other);
        let outcome = healed(agent);
        assert!(has_this_volume_again(&outcome), "{outcome:?}");
    }
    guest::run(&["umount", place]);
    assert!(first.detach(source, soon()).unwrap().changed);
}

#[test]
fn a_volume_of_nbdkit_that_was_formatted_twice_is_known_by_its_last_file_system_alone() {
    let _module = NbdModule::with_backend_ids(1);
    only_the_last_content_is_known(nbdkit);
}

#[test]
fn a_volume_of_qemu_nbd_that_was_formatted_twice_is_known_by_its_last_file_system_alone() {
    let _module = NbdModule::with_backend_ids(1);
    only_the_last_content_is_known(qemu_nbd);
}
