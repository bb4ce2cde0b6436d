//! Disk images of other tools: partition tables and file systems that count in sectors of 512
//! bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lunbd::engine::NbdOptions;
use lunbd::{AttachRequest, Attachment, DetachTarget, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MIB: u64 = 1 << 20;
/// Enough for an ext4 partition and for the smallest XFS that its tool makes.
const IMAGE: u64 = 400 * MIB;
const LIMIT: Duration = Duration::from_secs(60);

/// The file system and the first sector of each partition.
const PARTITIONS: [(&str, u64); 2] = [("ext4", 2048), ("xfs", 2048 + 64 * 2048)];

fn tool(words: &[&str]) -> String {
    guest::run(words).trim().to_owned()
}

fn is_block_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

/// A directory with a file system of `device` mounted on it; unmounted on drop.
struct Mounted(PathBuf);

impl Mounted {
    fn new(device: &str, kind: &str) -> Self {
        let at = PathBuf::from(format!("/tmp/image-{kind}"));
        fs::create_dir_all(&at).unwrap();
        guest::run(&["mount", "-t", kind, device, at.to_str().unwrap()]);
        Self(at)
    }

    fn file(&self) -> PathBuf {
        self.0.join("made-with")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        guest::run(&["umount", self.0.to_str().unwrap()]);
        fs::remove_dir(&self.0).unwrap();
    }
}

/// An image with a partition table of this kind ("dos" or "gpt"). sfdisk makes the table over a
/// loop device, which has sectors of 512 bytes, and the tools of the file systems make the
/// rest.
fn image(table: &str) -> Store {
    let store = Store::sparse(IMAGE);
    let path = store.path().to_str().unwrap();
    let script = store.path().with_extension("sfdisk");
    let (first, second) = (PARTITIONS[0].1, PARTITIONS[1].1);
    let length = second - first;
    let lines = format!("label: {table}\nstart={first}, size={length}\nstart={second}\n");
    fs::write(&script, lines).unwrap();
    let sfdisk = format!("sfdisk --quiet {path} < {}", script.display());
    guest::run(&["sh", "-c", &sfdisk]);
    fs::remove_file(script).unwrap();
    guest::modprobe("loop", &[]);
    let disk = tool(&["losetup", "--find", "--show", "--partscan", path]);
    // losetup had the disk open for writing, so udevd rereads the partition table after the close.
    guest::udevd::settle();
    for (number, (kind, _)) in (1..).zip(PARTITIONS) {
        let partition = format!("{disk}p{number}");
        guest::wait_until("the partition's node", LIMIT, || {
            is_block_device(Path::new(&partition)).then_some(())
        });
        guest::run(&[&*format!("mkfs.{kind}"), "-q", &partition]);
        let mounted = Mounted::new(&partition, kind);
        fs::write(mounted.file(), table).unwrap();
    }
    guest::run(&["losetup", "--detach", &disk]);
    store
}

fn queue(attachment: &Attachment, attribute: &str) -> u64 {
    let name = attachment.node.file_name().unwrap().to_str().unwrap();
    let text = fs::read_to_string(format!("/sys/block/{name}/queue/{attribute}")).unwrap();
    text.trim().parse().unwrap()
}

/// Requires that the partitions start where the image has them, and that their file systems
/// mount.
fn shows_its_partitions(engine: &Engine, uri: &str, table: &str, server: &str) {
    let source: Source = uri.parse().unwrap();
    let request = AttachRequest::new(source);
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_eq!(queue(&attachment, "logical_block_size"), 512, "{server}");
    let node = attachment.node.to_str().unwrap();
    let name = attachment.node.file_name().unwrap().to_str().unwrap();
    for (number, (kind, start)) in (1..).zip(PARTITIONS) {
        let found = fs::read_to_string(format!("/sys/block/{name}/{name}p{number}/start"));
        let found = found.unwrap_or_else(|error| panic!("{server}, {table}: {error}"));
        assert_eq!(found.trim(), start.to_string(), "{server}, {table}");
        let mounted = Mounted::new(&format!("{node}p{number}"), kind);
        assert_eq!(fs::read_to_string(mounted.file()).unwrap(), table);
    }
    let detached = engine.detach(DetachTarget::Device(attachment.node), soon());
    assert!(detached.unwrap().changed);
}

#[test]
fn partitions_and_file_systems_of_mbr_and_gpt_images_are_where_every_server_has_them() {
    guest::enter();
    let _module = NbdModule::load(2);
    let engine = engine();
    let images = ["dos", "gpt"].map(|table| (table, image(table)));
    let of_nbd: Vec<(&str, &Path)> = images
        .iter()
        .map(|(table, it)| (*table, it.path()))
        .collect();
    let of_nbd = NbdServer::of_nbd_server(&of_nbd, &[]);
    for (table, store) in &images {
        let file = format!("file={}", store.path().display());
        let nbdkit = NbdServer::nbdkit(At::unix(), &["file", &file]);
        shows_its_partitions(&engine, &nbdkit.uri(""), table, "nbdkit");
        drop(nbdkit);
        let qemu = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
        shows_its_partitions(&engine, &qemu.uri("disk"), table, "qemu-nbd");
        drop(qemu);
        shows_its_partitions(&engine, &of_nbd.uri(table), table, "nbd-server");
    }
}

#[test]
fn a_wanted_block_size_is_read_back_and_another_one_is_refused_while_the_device_is_attached() {
    guest::enter();
    let _module = NbdModule::load(2);
    let server = NbdServer::nbdkit(At::unix(), &["memory", "8M"]);
    let engine = engine();
    let source: Source = server.uri("").parse().unwrap();
    let request =
        |bytes| AttachRequest::new(source.clone()).nbd(NbdOptions::default().block_size(bytes));
    let attachment = engine.attach(&request(4096), soon()).unwrap();
    assert_eq!(queue(&attachment, "logical_block_size"), 4096);
    if guest::kernel() >= (5, 14) {
        let error = engine.attach(&request(512), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert!(
            error.to_string().contains("blocks of 4096 bytes"),
            "{error}"
        );
        assert!(!engine.attach(&request(4096), soon()).unwrap().changed);
    }
    let detached = engine.detach(DetachTarget::Device(attachment.node), soon());
    assert!(detached.unwrap().changed);
}
