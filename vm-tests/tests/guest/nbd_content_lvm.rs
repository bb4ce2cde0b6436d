//! The names of an NBD volume's content, compared with those of `blkid`.

use std::path::Path;
use std::time::Duration;

use lunbd::engine::{NbdOptions, UnitKind};
use lunbd::id::ContentName;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MIB: u64 = 1 << 20;
/// The smallest XFS file system needs 300 MiB.
const SIZE: u64 = 400 * MIB;
const LIMIT: Duration = Duration::from_secs(60);

/// The kind of each name, the shell command that makes the content on the device `$0`, and
/// blkid's key for its value.
const MADE: [(&str, &str, &str); 9] = [
    ("fs", "mkfs.ext4 -q $0", "UUID"),
    ("fs", "mkfs.xfs -q $0", "UUID"),
    ("fs", "mkfs.btrfs -q $0", "UUID"),
    (
        "luks",
        "echo passphrase \
         | cryptsetup luksFormat -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $0",
        "UUID",
    ),
    ("gpt", "echo label: gpt | sfdisk --quiet $0", "PTUUID"),
    (
        "mbr",
        "printf 'label: dos\nsize=8M\n' | sfdisk --quiet $0",
        "PTUUID",
    ),
    // Without a partition.
    ("mbr", "echo label: dos | sfdisk --quiet $0", "PTUUID"),
    // A GPT without a protective MBR, as many images of installers have it.
    (
        "mbr",
        r"echo label: gpt | sfdisk --quiet $0
        printf '\4\3\2\1' | dd of=$0 bs=1 seek=440 conv=notrunc status=none
        printf '\203' | dd of=$0 bs=1 seek=450 conv=notrunc status=none",
        "PTUUID",
    ),
    ("lvm", "pvcreate -q -y $0", "UUID"),
];

/// Loads the driver, if it keeps backend ids.
fn module() -> NbdModule {
    if guest::kernel() < (5, 14) {
        guest::skip("the kernel keeps no backend ids before 5.14");
    }
    NbdModule::load(1)
}

fn attach(engine: &Engine, source: &Source) -> Attachment {
    let request = AttachRequest::new(source.clone());
    engine.attach(&request, soon()).expect("an attach")
}

fn by_blkid(kind: &str, node: &Path, value: &str) -> ContentName {
    let node = node.to_str().unwrap();
    let found = guest::run(&["blkid", "-p", "-s", value, "-o", "value", node]);
    format!("{kind}.{}", found.trim()).parse().unwrap()
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
    let blank = attach(&engine, &source);
    assert_eq!(blank.content(), Some(&[][..]));
    for (kind, tool, value) in MADE {
        let node = blank.node.to_str().unwrap();
        // udev does not watch a device while it reads it, and misses a close then. It reads no
        // device that is locked (<https://systemd.io/BLOCK_DEVICE_LOCKING>).
        let make = format!("set -e; wipefs --quiet --all $0; {tool}");
        guest::run(&["flock", node, "sh", "-c", &make, node]);
        let name = by_blkid(kind, &blank.node, value);
        // udev reads the device when the tool has closed it.
        guest::wait_until("udev to name it", LIMIT, || {
            listed(&engine).contains(&name).then_some(())
        });
        // An attach reads the names of an attached device too, over a connection that the
        // kernel does not have.
        let again = attach(&engine, &source);
        assert_eq!(
            (again.changed, again.content().unwrap()),
            (false, &[name.clone()][..])
        );
        assert!(engine.detach(source.clone(), soon()).unwrap().changed);
        let anew = attach(&engine, &source);
        assert_eq!((anew.changed, anew.content().unwrap()), (true, &[name][..]));
    }
    assert!(engine.detach(source, soon()).unwrap().changed);
}

#[test]
fn the_content_that_nbdkit_serves_is_named_as_by_blkid() {
    let _module = module();
    let store = Store::sparse(SIZE);
    let path = store.path().to_str().unwrap();
    is_named_as_by_blkid(&NbdServer::nbdkit(
        At::tcp(),
        &["--export=disk", "file", path],
    ));
}

#[test]
fn the_content_that_qemu_nbd_serves_is_named_as_by_blkid() {
    let _module = module();
    let store = Store::sparse(SIZE);
    is_named_as_by_blkid(&NbdServer::qemu_nbd(At::unix(), "disk", store.path(), &[]));
}

#[test]
fn a_volume_whose_content_is_not_the_expected_one_is_not_connected() {
    let _module = module();
    let store = Store::sparse(8 * MIB);
    guest::run(&["mkfs.ext4", "-q", store.path().to_str().unwrap()]);
    let name = by_blkid("fs", store.path(), "UUID");
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
