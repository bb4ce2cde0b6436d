//! Servers that come back with the volume that the device had, or with another one.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lunbd::engine::{DetachVolume, HealOutcome, HealReport, Journal, NbdOptions};
use lunbd::id::{ContentName, VolumeId};
use lunbd::nbd::Difference;
use lunbd::reconcile::{Desired, Options, Reconciler};
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const SIZE: u64 = 16 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// Starts a server of a store, of one of two kinds.
type Serve = fn(At, &Store) -> NbdServer;

fn nbdkit(at: At, store: &Store) -> NbdServer {
    let path = store.path().to_str().unwrap();
    NbdServer::nbdkit(at, &["--export=disk", "file", path])
}

fn qemu_nbd(at: At, store: &Store) -> NbdServer {
    NbdServer::qemu_nbd(at, "disk", store.path(), &[])
}

fn format(path: &Path) {
    guest::run(&["mkfs.ext4", "-q", "-F", path.to_str().unwrap()]);
}

fn formatted() -> (Store, ContentName) {
    let store = Store::sparse(SIZE);
    format(store.path());
    let name = name_of(store.path());
    (store, name)
}

fn name_of(path: &Path) -> ContentName {
    let path = path.to_str().unwrap();
    let uuid = guest::run(&["blkid", "-p", "-s", "UUID", "-o", "value", path]);
    format!("fs.{}", uuid.trim()).parse().unwrap()
}

/// The kernel resends a request that was in flight when the link died, after its timeout.
fn patient() -> NbdOptions {
    NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(600))
}

fn attach(engine: &Engine, source: &Source) -> Attachment {
    let request = AttachRequest::new(source.clone()).nbd(patient());
    engine.attach(&request, soon()).expect("an attach")
}

fn healed(engine: &Engine) -> HealOutcome {
    let healings = engine.heal(soon()).unwrap();
    let [HealReport { outcome, .. }] = <[HealReport; 1]>::try_from(healings).expect("one device");
    outcome
}

fn source_of(at: &At) -> Source {
    at.uri("disk").parse().unwrap()
}

/// A file system in use: a writer in it waits while the server is away.
struct InUse {
    at: PathBuf,
    writer: Child,
}

impl InUse {
    fn mount(node: &Path) -> PathBuf {
        let at = PathBuf::from("/tmp/nbd-content");
        fs::create_dir_all(&at).unwrap();
        let (node, to) = (node.to_str().unwrap(), at.to_str().unwrap());
        guest::run(&["mount", "-t", "ext4", node, to]);
        at
    }

    /// Begins to write when the server is gone.
    fn write(at: PathBuf) -> Self {
        let script = format!("echo waits > {0}/file && sync {0}/file", at.display());
        let writer = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        Self { at, writer }
    }

    /// Requires that the write succeeded.
    fn end(mut self) {
        assert!(self.writer.wait().unwrap().success());
        let file = fs::read_to_string(self.at.join("file")).unwrap();
        assert_eq!(file, "waits\n");
        guest::run(&["umount", self.at.to_str().unwrap()]);
        fs::remove_dir(&self.at).unwrap();
    }
}

fn require_refused(outcome: &HealOutcome, held: &ContentName, serves: &[ContentName]) {
    let HealOutcome::GeometryChanged(differences) = outcome else {
        panic!("{outcome:?}");
    };
    let expected = Difference::Content {
        from: vec![held.clone()],
        to: serves.to_vec(),
        is_proven: true,
    };
    assert!(differences.contains(&expected), "{differences:?}");
}

fn impostors_are_refused(serve: Serve) {
    let (right, name) = formatted();
    let (other, others_name) = formatted();
    let blank = Store::sparse(SIZE);
    let (at, first) = (At::tcp(), engine());
    let mut server = serve(at.clone(), &right);
    let attachment = attach(&first, &source_of(&at));
    let mounted = InUse::mount(&attachment.node);
    // Content that udev has not read completely is not evidence.
    guest::udevd::settle();
    server.kill();
    drop(server);
    let in_use = InUse::write(mounted);
    // One engine attached the device, and the other knows it only through udev.
    for agent in [&first, &engine()] {
        for (store, serves) in [(&other, vec![others_name.clone()]), (&blank, Vec::new())] {
            let before = fs::read(store.path()).unwrap();
            let impostor = serve(at.clone(), store);
            require_refused(&healed(agent), &name, &serves);
            drop(impostor);
            assert!(
                fs::read(store.path()).unwrap() == before,
                "it was written to"
            );
        }
    }
    let _right = serve(at.clone(), &right);
    let outcome = healed(&first);
    assert!(
        matches!(&outcome, HealOutcome::Adopted(told) if told.is_empty()),
        "{outcome:?}"
    );
    in_use.end();
    assert!(first.detach(source_of(&at), soon()).unwrap().changed);
}

#[test]
fn an_impostor_of_nbdkit_of_the_same_size_is_refused_and_not_written_to() {
    let _module = NbdModule::with_backend_ids(1);
    impostors_are_refused(nbdkit);
}

#[test]
fn an_impostor_of_qemu_nbd_of_the_same_size_is_refused_and_not_written_to() {
    let _module = NbdModule::with_backend_ids(1);
    impostors_are_refused(qemu_nbd);
}

/// Kills the server as soon as `make` has returned, and starts it again with the same content.
fn is_healed_after(serve: Serve, store: &Store, make: impl FnOnce(&Path) -> Option<File>) {
    let (at, first) = (At::tcp(), engine());
    let mut server = serve(at.clone(), store);
    let attachment = attach(&first, &source_of(&at));
    let open = make(&attachment.node);
    server.kill();
    drop(server);
    let mut server = serve(at.clone(), store);
    let outcome = healed(&engine());
    assert!(matches!(outcome, HealOutcome::Adopted(_)), "{outcome:?}");
    server.kill();
    drop(server);
    let _server = serve(at.clone(), store);
    let outcome = healed(&first);
    assert!(matches!(outcome, HealOutcome::Adopted(_)), "{outcome:?}");
    drop(open);
    assert!(first.detach(source_of(&at), soon()).unwrap().changed);
}

fn formats_are_healed(serve: Serve) {
    let blank = Store::sparse(SIZE);
    let format_it = |node: &Path| {
        format(node);
        None
    };
    is_healed_after(serve, &blank, format_it);
    // The content gets another name than it had at the attach.
    is_healed_after(serve, &blank, format_it);
    // The writer still has the device open, as a virtual machine would.
    let (image, name) = formatted();
    let mut bytes = vec![0; 64 << 10];
    File::open(image.path())
        .unwrap()
        .read_exact_at(&mut bytes, 0)
        .unwrap();
    is_healed_after(serve, &blank, |node| {
        let mut disk = OpenOptions::new().write(true).open(node).unwrap();
        disk.write_all(&bytes).unwrap();
        disk.sync_all().unwrap();
        Some(disk)
    });
    assert_eq!(name_of(blank.path()), name);
}

#[test]
fn a_volume_that_is_formatted_after_the_attach_is_healed_when_nbdkit_restarts() {
    let _module = NbdModule::with_backend_ids(1);
    formats_are_healed(nbdkit);
}

#[test]
fn a_volume_that_is_formatted_after_the_attach_is_healed_when_qemu_nbd_restarts() {
    let _module = NbdModule::with_backend_ids(1);
    formats_are_healed(qemu_nbd);
}

#[test]
fn a_heal_of_an_unused_device_refuses_another_volume_unless_it_is_accepted() {
    let _module = NbdModule::with_backend_ids(1);
    let ((right, name), (other, others_name)) = (formatted(), formatted());
    let (at, engine) = (At::tcp(), engine());
    let mut server = nbdkit(at.clone(), &right);
    let source = source_of(&at);
    let attachment = attach(&engine, &source);
    server.kill();
    drop(server);
    let _other = nbdkit(at, &other);
    require_refused(&healed(&engine), &name, std::slice::from_ref(&others_name));
    let accepting = patient().accept_content();
    let healing = engine.heal_source(&source, &accepting, soon()).unwrap();
    assert!(
        matches!(healing.outcome, HealOutcome::Adopted(_)),
        "{healing:?}"
    );
    guest::wait_until("its own content to be read", LIMIT, || {
        (name_of(&attachment.node) == others_name).then_some(())
    });
    assert!(engine.detach(source, soon()).unwrap().changed);
}

#[test]
fn a_heal_requires_the_content_that_the_attach_expected_also_while_a_process_may_write() {
    let _module = NbdModule::with_backend_ids(1);
    let ((right, name), (other, others_name)) = (formatted(), formatted());
    let (at, engine) = (At::tcp(), engine());
    let mut server = nbdkit(at.clone(), &right);
    let source = source_of(&at);
    let options = patient().expect(name.clone());
    let request = AttachRequest::new(source.clone()).nbd(options);
    let node = engine.attach(&request, soon()).unwrap().node;
    let disk = OpenOptions::new().write(true).open(&node).unwrap();
    server.kill();
    drop(server);
    let impostor = nbdkit(at.clone(), &other);
    require_refused(&healed(&engine), &name, std::slice::from_ref(&others_name));
    drop(impostor);
    let _right = nbdkit(at, &right);
    let outcome = healed(&engine);
    assert!(matches!(outcome, HealOutcome::Adopted(_)), "{outcome:?}");
    drop(disk);
    assert!(engine.detach(source, soon()).unwrap().changed);
}

fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

/// The names of the volume's content in the journal.
fn kept(journal: &Journal) -> Option<Vec<ContentName>> {
    let outcome = journal.record(&volume()).unwrap().outcome.unwrap();
    outcome.content
}

/// Detaches the device, as a reset of the machine would; the journal's record stays.
fn lose_device(source: &Source) {
    assert!(engine().detach(source.clone(), soon()).unwrap().changed);
}

fn named_in_error(text: &str, names: [&ContentName; 2]) {
    for name in names {
        assert!(text.contains(&name.to_string()), "{name} is not in: {text}");
    }
}

fn another_is_refused_at_a_later_attach(serve: Serve) {
    let (blank, (other, others_name)) = (Store::sparse(SIZE), formatted());
    let (at, place) = (At::tcp(), Directory::new("content"));
    let (agent, source) = (engine(), source_of(&at));
    let journal = agent.open_journal_at(&place, soon()).unwrap();
    let request = AttachRequest::new(source.clone()).nbd(patient());
    let attach = || agent.attach_volume(&journal, &volume(), &request, soon());
    let server = serve(at.clone(), &blank);
    let node = attach().unwrap().node;
    assert_eq!(kept(&journal), Some(Vec::new()));
    format(&node);
    assert!(!attach().unwrap().changed);
    let name = name_of(blank.path());
    assert_eq!(kept(&journal).as_deref(), Some(&[name.clone()][..]));
    lose_device(&source);
    assert!(attach().unwrap().changed, "what it had is there again");
    lose_device(&source);
    drop(server);

    let _other = serve(at.clone(), &other);
    let before = fs::read(other.path()).unwrap();
    let refused = attach().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::IdentityMismatch, "{refused}");
    named_in_error(&refused.to_string(), [&name, &others_name]);
    assert!(fs::read(other.path()).unwrap() == before, "written to");
    assert_eq!(kept(&journal).as_deref(), Some(&[name.clone()][..]));
    drop(journal);

    let (uri, place) = (at.uri("disk"), place.to_str().unwrap());
    let by_command = ["attach", &uri, "--volume", "pvc-1", "--journal", place];
    let refused = guest::lunbd(&by_command);
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    named_in_error(
        &String::from_utf8_lossy(&refused.stderr),
        [&name, &others_name],
    );
    let accepted = guest::lunbd(&[&by_command[..], &["--accept-content"]].concat());
    assert!(accepted.status.success(), "{accepted:?}");
    let journal = agent.open_journal_at(Path::new(place), soon()).unwrap();
    assert_eq!(kept(&journal).as_deref(), Some(&[others_name][..]));
    let detached = agent.detach_volume(&journal, &volume(), &DetachVolume::default(), soon());
    assert!(detached.unwrap().changed);
}

#[test]
fn a_journals_volume_that_was_formatted_is_attached_again_from_nbdkit_and_another_is_refused() {
    let _module = NbdModule::with_backend_ids(1);
    another_is_refused_at_a_later_attach(nbdkit);
}

#[test]
fn a_journals_volume_that_was_formatted_is_attached_again_from_qemu_nbd_and_another_is_refused() {
    let _module = NbdModule::with_backend_ids(1);
    another_is_refused_at_a_later_attach(qemu_nbd);
}

#[test]
fn a_reconciler_records_the_new_names_of_a_formatted_volume_and_attaches_no_other_volume() {
    let _module = NbdModule::with_backend_ids(1);
    let (blank, (other, others_name)) = (Store::sparse(SIZE), formatted());
    let (at, place) = (At::tcp(), Directory::new("content"));
    let source = source_of(&at);
    let agent = Arc::new(engine());
    let journal = agent.open_journal_at(&place, soon()).unwrap();
    let reconciler = Reconciler::new(agent, journal, Options::default());
    let mut desired = Desired::default();
    let request = AttachRequest::new(source.clone()).nbd(patient());
    desired.insert(volume(), &request).unwrap();
    let server = nbdkit(at.clone(), &blank);
    reconciler.set(desired);
    let left = reconciler.apply(soon()).unwrap();
    assert!(left.is_empty(), "{left}: {:?}", reconciler.errors());
    let record = reconciler.journal().record(&volume()).unwrap();
    let node = record.outcome.unwrap().node;

    thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        // udev does not notice a writer while it handles an event of the device.
        guest::udevd::settle();
        format(&node);
        let name = name_of(blank.path());
        guest::wait_until("the new name to be written down", LIMIT, || {
            (kept(reconciler.journal()).as_deref() == Some(&[name.clone()][..])).then_some(())
        });
        reconciler.stop();
        running.join().unwrap().unwrap();
    });
    lose_device(&source);
    drop(server);
    let name = name_of(blank.path());
    drop(reconciler);

    let _other = nbdkit(at.clone(), &other);
    let agent = engine();
    let journal = agent.open_journal_at(&place, soon()).unwrap();
    let refused = agent.attach_volume(&journal, &volume(), &request, soon());
    named_in_error(&refused.unwrap_err().to_string(), [&name, &others_name]);
    // Without a device there is only the record to remove.
    let detached = agent.detach_volume(&journal, &volume(), &DetachVolume::default(), soon());
    assert!(!detached.unwrap().changed);
}
