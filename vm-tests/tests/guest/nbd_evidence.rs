//! What a heal knows of the content of a volume whose server was away, and what it does with
//! a server of other content.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lunbd::engine::{HealOutcome, HealReport, NbdOptions};
use lunbd::id::{ContentName, VolumeId};
use lunbd::nbd::Difference;
use lunbd::reconcile::{Desired, Event, Options, Reconciler};
use lunbd::uevent::Mode;
use lunbd::{AttachRequest, Engine, Roots, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const SIZE: usize = 16 << 20;

fn serve(at: &At, store: &Store) -> NbdServer {
    let path = store.path().to_str().unwrap();
    NbdServer::nbdkit(at.clone(), &["--export=disk", "file", path])
}

fn source_of(at: &At) -> Source {
    at.uri("disk").parse().unwrap()
}

fn blank() -> Store {
    Store::sparse(SIZE as u64)
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

fn formatted() -> (Store, ContentName) {
    let store = blank();
    let name = format(store.path());
    (store, name)
}

fn request(source: &Source) -> AttachRequest {
    let options = NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(600));
    AttachRequest::new(source.clone()).nbd(options)
}

fn healed(engine: &Engine) -> HealOutcome {
    let healings = engine.heal(soon()).unwrap();
    let [HealReport { outcome, .. }] = <[HealReport; 1]>::try_from(healings).expect("one device");
    outcome
}

fn content(from: &[ContentName], to: &[ContentName], is_proven: bool) -> Difference {
    Difference::Content {
        from: from.to_vec(),
        to: to.to_vec(),
        is_proven,
    }
}

fn is_refused(outcome: &HealOutcome, difference: &Difference) -> bool {
    matches!(outcome, HealOutcome::GeometryChanged(told) if told.contains(difference))
}

fn is_taken_with(outcome: &HealOutcome, told: &[Difference]) -> bool {
    matches!(outcome, HealOutcome::Adopted(differences) if differences == told)
}

#[test]
fn an_unwritten_volume_is_refused_with_any_other_first_bytes_also_without_names() {
    let _module = NbdModule::with_backend_ids(1);
    let (volume, unnamed) = (blank(), Store::filled(SIZE, 0x5a));
    let (other, name) = formatted();
    let (at, first) = (At::tcp(), engine());
    let mut server = serve(&at, &volume);
    let source = source_of(&at);
    first.attach(&request(&source), soon()).expect("an attach");
    server.kill();
    drop(server);
    for (store, serves) in [(&other, vec![name.clone()]), (&unnamed, vec![])] {
        let impostor = serve(&at, store);
        let outcome = healed(&first);
        assert!(
            is_refused(&outcome, &content(&[], &serves, true)),
            "{outcome:?}"
        );
        drop(impostor);
    }
    let mut server = serve(&at, &volume);
    let outcome = healed(&first);
    assert!(is_taken_with(&outcome, &[]), "{outcome:?}");
    server.kill();
    drop(server);
    // Another process knows only that udev found no name, which may be one that udev lacks.
    let _other = serve(&at, &other);
    let outcome = healed(&engine());
    let told = [content(&[], &[name], false)];
    assert!(is_taken_with(&outcome, &told), "{outcome:?}");
    assert!(first.detach(source, soon()).unwrap().changed);
}

#[test]
fn a_volume_whose_writes_the_kernel_does_not_count_is_known_by_udevs_record() {
    let _module = NbdModule::with_backend_ids(1);
    let ((volume, _), (other, others_name)) = (formatted(), formatted());
    let (at, first) = (At::tcp(), engine());
    let mut server = serve(&at, &volume);
    let source = source_of(&at);
    let attached = first.attach(&request(&source), soon());
    let node = attached.expect("an attach").node;
    let counting = "/sys/block/nbd0/queue/iostats";
    fs::write(counting, "0").unwrap();
    // udev does not notice a writer while it handles an event of the device.
    guest::udevd::settle();
    let name = format(&node);
    server.kill();
    drop(server);
    let mut server = serve(&at, &volume);
    let outcome = healed(&first);
    assert!(is_taken_with(&outcome, &[]), "{outcome:?}");
    // No tool can write names to a device that is mounted.
    let place = Directory::new("evidence");
    let (node, place) = (node.to_str().unwrap(), place.to_str().unwrap());
    guest::run(&["mount", "-t", "ext4", node, place]);
    server.kill();
    drop(server);
    let impostor = serve(&at, &other);
    let outcome = healed(&first);
    assert!(
        is_refused(&outcome, &content(&[name], &[others_name], true)),
        "{outcome:?}"
    );
    drop(impostor);
    let _server = serve(&at, &volume);
    let outcome = healed(&first);
    assert!(is_taken_with(&outcome, &[]), "{outcome:?}");
    guest::run(&["umount", place]);
    fs::write(counting, "1").unwrap();
    assert!(first.detach(source, soon()).unwrap().changed);
}

fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

/// An engine that sees no event and no record of udev.
fn without_udev(run: &Directory) -> Engine {
    let run = run.to_path_buf();
    let engine = Engine::start(Roots {
        run,
        ..Roots::default()
    });
    let engine = engine.expect("an engine");
    assert_eq!(engine.hub().mode(), Mode::KernelOnly);
    engine
}

/// A process attaches the volume of a journal, and ends.
fn attach_and_end(run: &Directory, journals: &Directory, source: &Source, name: &ContentName) {
    let engine = without_udev(run);
    let journal = engine.open_journal_at(journals, soon()).unwrap();
    let attached = engine.attach_volume(&journal, &volume(), &request(source), soon());
    assert_eq!(
        attached.unwrap().content(),
        Some(std::slice::from_ref(name))
    );
}

#[test]
fn without_udev_a_later_process_compares_a_server_with_the_journals_names() {
    let _module = NbdModule::with_backend_ids(1);
    let ((right, name), (other, others_name)) = (formatted(), formatted());
    let (at, journals, run) = (At::tcp(), Directory::new("journal"), Directory::new("run"));
    let source = source_of(&at);
    let healed = || {
        let agent = without_udev(&run);
        let journal = agent.open_journal_at(&journals, soon()).unwrap();
        let record = journal.record(&volume()).unwrap();
        let mut reconnect = agent.reconnect_handle_of(&record).unwrap();
        reconnect.proceed(&agent, soon()).outcome
    };
    let mut server = serve(&at, &right);
    attach_and_end(&run, &journals, &source, &name);
    server.kill();
    drop(server);
    let mut server = serve(&at, &right);
    let outcome = healed();
    assert!(is_taken_with(&outcome, &[]), "{outcome:?}");
    server.kill();
    drop(server);
    let _other = serve(&at, &other);
    let outcome = healed();
    let told = [content(&[name], &[others_name], false)];
    assert!(is_taken_with(&outcome, &told), "{outcome:?}");
    assert!(without_udev(&run).detach(source, soon()).unwrap().changed);
}

/// Stops the reconciler, also if the test fails: otherwise its thread would block the test.
struct Stop<'a>(&'a Reconciler);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[test]
fn without_udev_a_reconciler_that_was_restarted_tells_of_other_content_with_both_names() {
    let _module = NbdModule::with_backend_ids(1);
    let ((right, name), (other, others_name)) = (formatted(), formatted());
    let (at, journals, run) = (At::tcp(), Directory::new("journal"), Directory::new("run"));
    let source = source_of(&at);
    let mut server = serve(&at, &right);
    attach_and_end(&run, &journals, &source, &name);
    server.kill();
    drop(server);
    let _other = serve(&at, &other);
    let agent = Arc::new(without_udev(&run));
    let journal = agent.open_journal_at(&journals, soon()).unwrap();
    let reconciler = Reconciler::new(agent, journal, Options::default());
    let mut events = reconciler.subscribe();
    let mut desired = Desired::default();
    desired.insert(volume(), &request(&source)).unwrap();
    reconciler.set(desired);
    thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let stop = Stop(&reconciler);
        let (from, to) = loop {
            if let Event::ContentDiffers { from, to, .. } = events.next(soon()).unwrap().event {
                break (from, to);
            }
        };
        assert_eq!((from, to), (vec![name], vec![others_name]));
        drop(stop);
        running.join().unwrap().unwrap();
    });
    assert!(without_udev(&run).detach(source, soon()).unwrap().changed);
}
