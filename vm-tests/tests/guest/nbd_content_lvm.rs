//! The names of an NBD volume's content, compared with those of `blkid`.

use std::path::Path;
use std::time::Duration;

use lunbd::engine::{HealOutcome, HealReport, NbdOptions, UnitKind};
use lunbd::id::{ContentName, VolumeId};
use lunbd::nbd::Difference;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MIB: u64 = 1 << 20;
/// The smallest XFS file system needs 300 MiB.
const SIZE: u64 = 400 * MIB;
const LIMIT: Duration = Duration::from_secs(60);

/// The kind of a name, and blkid's key for its value.
type Key = (&'static str, &'static str);

const FILE_SYSTEM: Key = ("fs", "UUID");
const BTRFS_DEVICE: Key = ("btrfs", "UUID_SUB");
const GPT: Key = ("gpt", "PTUUID");
const MBR: Key = ("mbr", "PTUUID");

/// The names, and the shell command that makes the content on the device `$0`.
const MADE: [(&[Key], &str); 9] = [
    (&[FILE_SYSTEM], "mkfs.ext4 -q $0"),
    (&[FILE_SYSTEM], "mkfs.xfs -q $0"),
    (&[FILE_SYSTEM, BTRFS_DEVICE], "mkfs.btrfs -q $0"),
    (
        &[("luks", "UUID")],
        "echo passphrase \
         | cryptsetup luksFormat -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $0",
    ),
    (&[GPT], "echo label: gpt | sfdisk --quiet $0"),
    (&[MBR], "printf 'label: dos\nsize=8M\n' | sfdisk --quiet $0"),
    // Without a partition.
    (&[MBR], "echo label: dos | sfdisk --quiet $0"),
    // A GPT without a protective MBR, as many images of installers have it.
    (
        &[MBR],
        r"echo label: gpt | sfdisk --quiet $0
        printf '\4\3\2\1' | dd of=$0 bs=1 seek=440 conv=notrunc status=none
        printf '\203' | dd of=$0 bs=1 seek=450 conv=notrunc status=none",
    ),
    (&[("lvm", "UUID")], "pvcreate -q -y $0"),
];

fn attach(engine: &Engine, source: &Source) -> Attachment {
    let request = AttachRequest::new(source.clone());
    engine.attach(&request, soon()).expect("an attach")
}

fn by_blkid(keys: &[Key], node: &Path) -> Vec<ContentName> {
    let node = node.to_str().unwrap();
    let name = |(kind, value): &Key| {
        let found = guest::run(&["blkid", "-p", "-s", value, "-o", "value", node]);
        format!("{kind}.{}", found.trim()).parse().unwrap()
    };
    keys.iter().map(name).collect()
}

/// The names in the inventory.
fn listed(engine: &Engine) -> Vec<ContentName> {
    let units = engine.inventory().unwrap().units;
    let [UnitKind::Nbd(unit)] = &units.iter().map(|u| u.kind.clone()).collect::<Vec<_>>()[..]
    else {
        panic!("{units:?}");
    };
    unit.content.clone().unwrap_or_default()
}

fn is_named_as_by_blkid(server: &NbdServer) {
    let (engine, source) = (engine(), server.uri("disk").parse::<Source>().unwrap());
    let mut attached = attach(&engine, &source);
    assert_eq!(attached.content(), Some(&[][..]));
    for (keys, tool) in MADE {
        let node = attached.node.to_str().unwrap();
        // udev does not watch a device while it reads it, and misses a close then. It reads no
        // device that is locked (<https://systemd.io/BLOCK_DEVICE_LOCKING>).
        let make = format!("set -e; wipefs --quiet --all $0; {tool}");
        guest::run(&["flock", node, "sh", "-c", &make, node]);
        let names = by_blkid(keys, &attached.node);
        // udev reads the device when the tool has closed it.
        guest::wait_until("udev to name it", LIMIT, || {
            (listed(&engine) == names).then_some(())
        });
        // An attach reads the names of an attached device too, over a connection that the
        // kernel does not have.
        let again = attach(&engine, &source);
        assert_eq!((again.changed, again.content().unwrap()), (false, &*names));
        assert!(engine.detach(source.clone(), soon()).unwrap().changed);
        // It may get another device: udev may still have the first one open.
        attached = attach(&engine, &source);
        assert_eq!(
            (attached.changed, attached.content().unwrap()),
            (true, &*names)
        );
    }
    assert!(engine.detach(source, soon()).unwrap().changed);
}

#[test]
fn the_content_that_nbdkit_serves_is_named_as_by_blkid() {
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(SIZE);
    let path = store.path().to_str().unwrap();
    is_named_as_by_blkid(&NbdServer::nbdkit(
        At::tcp(),
        &["--export=disk", "file", path],
    ));
}

#[test]
fn the_content_that_qemu_nbd_serves_is_named_as_by_blkid() {
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(SIZE);
    is_named_as_by_blkid(&NbdServer::qemu_nbd(At::unix(), "disk", store.path(), &[]));
}

#[test]
fn a_volume_whose_content_is_not_the_expected_one_is_not_connected() {
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(8 * MIB);
    guest::run(&["mkfs.ext4", "-q", store.path().to_str().unwrap()]);
    let [name] = <[ContentName; 1]>::try_from(by_blkid(&[FILE_SYSTEM], store.path())).unwrap();
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let expecting = |name: &ContentName| {
        let options = NbdOptions::default().expect(name.clone());
        AttachRequest::new(uri.parse::<Source>().unwrap()).nbd(options)
    };
    let other: ContentName = "fs.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9".parse().unwrap();
    let error = engine.attach(&expecting(&other), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    let text = error.to_string();
    assert!(
        text.contains(&name.to_string()) && text.contains(&other.to_string()),
        "{text}"
    );
    assert!(engine.inventory().unwrap().units.is_empty());

    let attachment = engine.attach(&expecting(&name), soon()).unwrap();
    assert_eq!(attachment.content().unwrap(), [name]);
    // An attach compares the content of an attached device too.
    let error = engine.attach(&expecting(&other), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    let source = uri.parse::<Source>().unwrap();
    assert!(engine.detach(source, soon()).unwrap().changed);
}

fn healed(engine: &Engine) -> HealOutcome {
    let healings = engine.heal(soon()).unwrap();
    let [HealReport { outcome, .. }] = <[HealReport; 1]>::try_from(healings).expect("one device");
    outcome
}

#[test]
fn another_device_of_the_same_btrfs_is_refused_by_a_heal_and_by_a_later_attach() {
    let _module = NbdModule::with_backend_ids(1);
    let stores = [Store::sparse(SIZE), Store::sparse(SIZE)];
    let [own, other] = [0, 1].map(|device| stores[device].path().to_str().unwrap());
    guest::run(&["mkfs.btrfs", "-q", own, other]);
    let names_of = |device: &str| by_blkid(&[FILE_SYSTEM, BTRFS_DEVICE], Path::new(device));
    let (names, others) = (names_of(own), names_of(other));
    assert_eq!(names[0], others[0]);
    let (at, place, agent) = (At::tcp(), Directory::new("btrfs"), engine());
    let serve = |device| NbdServer::nbdkit(at.clone(), &["--export=disk", "file", device]);
    let mut server = serve(own);
    let source: Source = at.uri("disk").parse().unwrap();
    let volume: VolumeId = "pvc-1".parse().unwrap();
    let journal = agent.open_journal_at(&place, soon()).unwrap();
    let request = AttachRequest::new(source.clone());
    let attach = || agent.attach_volume(&journal, &volume, &request, soon());
    let attachment = attach().unwrap();
    assert_eq!(attachment.content(), Some(&*names));
    guest::udevd::settle();
    server.kill();
    drop(server);

    let mut server = serve(other);
    let refused = Difference::Content {
        from: names.clone(),
        to: others,
        is_proven: true,
    };
    // One engine read the device itself, and the other knows it only through udev.
    for engine in [&agent, &engine()] {
        let outcome = healed(engine);
        assert!(
            matches!(&outcome, HealOutcome::GeometryChanged(told) if told.contains(&refused)),
            "{outcome:?}"
        );
    }
    server.kill();
    drop(server);
    let server = serve(own);
    let outcome = healed(&agent);
    assert!(
        matches!(&outcome, HealOutcome::Adopted(told) if told.is_empty()),
        "{outcome:?}"
    );
    // The device is lost, as in a reset of the machine; the journal's record stays.
    assert!(engine().detach(source.clone(), soon()).unwrap().changed);
    drop(server);

    let server = serve(other);
    let refused = attach().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::IdentityMismatch, "{refused}");
    drop(server);
    let _server = serve(own);
    assert!(attach().unwrap().changed);
    assert!(agent.detach(source, soon()).unwrap().changed);
}
