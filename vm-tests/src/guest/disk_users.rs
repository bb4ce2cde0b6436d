//! Each kind of user that a disk can have.

use std::any::Any;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::hidden_writers::{FixedFile, Mapper, OwnTable};
use super::lio::Store;
use super::md::Array;
use super::nvmet::NvmeNamespace;
use super::queueing_map::QueueingMap;

/// The mount point for file systems.
const PLACE: &str = "/tmp/used";
const MAP: &str = "on-top";

/// A disk with the content of [`partitioned`](super::partitioned).
#[derive(Debug, Clone)]
pub struct Nodes {
    /// The disk.
    pub disk: PathBuf,
    /// Its partition with a file system.
    pub first: PathBuf,
    /// Its partition with a swap area.
    pub second: PathBuf,
}

/// A kind of user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DiskUser {
    /// A mount of a partition.
    Mount,
    /// A mount of a partition in another mount namespace.
    MountElsewhere,
    /// The swap area in a partition.
    Swap,
    /// A device-mapper device on the disk.
    Dm,
    /// A device-mapper device on a partition, as an LVM volume is.
    DmOnPartition,
    /// An md array that contains the disk.
    Md,
    /// A loop device on the disk.
    Loop,
    /// A mounted loop device on a partition.
    LoopOnPartition,
    /// A process that has the disk open for writing.
    Writer,
    /// A process that has a partition open for writing.
    WriterOfPartition,
    /// A process that has a generic node of the disk, or of one of its paths, open for writing.
    WriterOfGeneric,
    /// A process that has mapped the disk for writing and closed its descriptor.
    WriterByMapping,
    /// A process that has registered the disk with `io_uring` and closed its descriptor.
    WriterByFixedFile,
    /// A thread that has the disk open for writing in a table of descriptors of its own.
    WriterOfOwnTable,
    /// A volume of the kernel's target, which claims the disk.
    LioIblock,
    /// A volume of the kernel's target, which opens the disk as a file.
    LioFileio,
    /// A namespace of the kernel's `NVMe` target.
    Nvmet,
    /// A namespace of the kernel's `NVMe` target on a partition.
    NvmetOnPartition,
    /// A process that has a multipath map over the disk open for writing. All paths of the map
    /// are down, so the map queues what is written. If the disk is a map, it is that map.
    WriterOfQueueingMap,
    /// A process that reads the disk.
    Reader,
}

impl DiskUser {
    /// All kinds of users.
    pub const ALL: [Self; 20] = [
        Self::Mount,
        Self::MountElsewhere,
        Self::Swap,
        Self::Dm,
        Self::DmOnPartition,
        Self::Md,
        Self::Loop,
        Self::LoopOnPartition,
        Self::Writer,
        Self::WriterOfPartition,
        Self::WriterOfGeneric,
        Self::WriterByMapping,
        Self::WriterByFixedFile,
        Self::WriterOfOwnTable,
        Self::LioIblock,
        Self::LioFileio,
        Self::Nvmet,
        Self::NvmetOnPartition,
        Self::WriterOfQueueingMap,
        Self::Reader,
    ];

    /// Whether this user uses a partition.
    #[must_use]
    pub fn uses_partition(self) -> bool {
        matches!(
            self,
            Self::Mount
                | Self::MountElsewhere
                | Self::Swap
                | Self::DmOnPartition
                | Self::LoopOnPartition
                | Self::WriterOfPartition
                | Self::NvmetOnPartition
        )
    }

    /// The user's title in the guide.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Mount => "a mount of a partition",
            Self::MountElsewhere => "a mount in another mount namespace",
            Self::Swap => "a swap area in a partition",
            Self::Dm => "a device-mapper device on the disk",
            Self::DmOnPartition => "a device-mapper device (LVM) on a partition",
            Self::Md => "an md array",
            Self::Loop => "a loop device on the disk",
            Self::LoopOnPartition => "a mounted loop device on a partition",
            Self::Writer => "a process that has the disk open for writing",
            Self::WriterOfPartition => "a process that has a partition open for writing",
            Self::WriterOfGeneric => "a process that has `/dev/sg*` open for writing",
            Self::WriterByMapping => "a process that has the disk mapped for writing",
            Self::WriterByFixedFile => "a process that has the disk registered with `io_uring`",
            Self::WriterOfOwnTable => "a thread with a descriptor table of its own",
            Self::LioIblock => "LIO, as a block device (iblock)",
            Self::LioFileio => "LIO, as a file (fileio)",
            Self::Nvmet => "nvmet, on the disk",
            Self::NvmetOnPartition => "nvmet, on a partition",
            Self::WriterOfQueueingMap => "a process that writes to a map without a path",
            Self::Reader => "a process that only reads",
        }
    }

    /// Whether a refusal names this user.
    #[must_use]
    pub fn is_named_in(self, refusal: &str) -> bool {
        // A refusal for one path, and not for the unit, names the map as the user.
        let is_held = self == Self::WriterOfQueueingMap && refusal.contains("held by dm-");
        refusal.contains(self.named()) || is_held
    }

    fn named(self) -> &'static str {
        match self {
            Self::Mount => "mounted on /tmp/used",
            Self::MountElsewhere => "mounted on /tmp/used in the mount namespace of process",
            Self::Swap => "swapped on",
            Self::Dm | Self::DmOnPartition => "held by dm-",
            Self::Md => "held by md127",
            Self::Loop | Self::LoopOnPartition => "the backing file of loop",
            Self::Writer
            | Self::WriterOfPartition
            | Self::WriterOfGeneric
            | Self::WriterOfOwnTable
            | Self::WriterOfQueueingMap => "open for writing in process",
            Self::WriterByMapping => "mapped for writing in process",
            Self::WriterByFixedFile => "registered with io_uring in process",
            Self::LioIblock => "exported by the kernel's target as iblock_",
            Self::LioFileio => "exported by the kernel's target as fileio_",
            Self::Nvmet | Self::NvmetOnPartition => "exported by the kernel's target as nqn.",
            Self::Reader => "open in process",
        }
    }

    /// Starts to use the disk, until the returned value is dropped.
    #[must_use]
    pub fn begin(self, nodes: &Nodes) -> Box<dyn Any> {
        let Nodes {
            disk,
            first,
            second,
        } = nodes;
        let linear = |node: &Path| format!("0 2048 linear {} 0", node.display());
        match self {
            Self::Mount => Box::new(Mounted::on(first)),
            Self::MountElsewhere => Box::new(Elsewhere::mount(first)),
            Self::Swap => {
                let area = second.display().to_string();
                super::run(&["swapon", &area]);
                Box::new(Undo(vec![vec!["swapoff".to_owned(), area]]))
            }
            Self::Dm | Self::DmOnPartition => {
                let node = if self == Self::Dm { disk } else { first };
                super::create_map(MAP, None, &linear(node));
                let remove = ["dmsetup", "remove", "--noudevsync", "--retry", MAP];
                Box::new(Undo(vec![remove.map(str::to_owned).to_vec()]))
            }
            Self::Md => Box::new(Array::with(disk)),
            Self::Loop => Box::new(LoopDevice::on(disk)),
            Self::LoopOnPartition => {
                let device = LoopDevice::on(first);
                Box::new((Mounted::on(&device.0), device))
            }
            Self::Writer | Self::WriterOfPartition => {
                let node = if self == Self::Writer { disk } else { first };
                Box::new(OpenOptions::new().write(true).open(node).expect("a writer"))
            }
            Self::WriterOfGeneric => {
                let node = generic_node(disk);
                Box::new(OpenOptions::new().write(true).open(node).expect("a writer"))
            }
            Self::WriterByMapping => Box::new(Mapper::writing(disk)),
            Self::WriterByFixedFile => Box::new(FixedFile::of(disk)),
            Self::WriterOfOwnTable => Box::new(OwnTable::with(disk)),
            Self::LioIblock => Box::new(Store::iblock_on("1b", disk)),
            Self::LioFileio => Box::new(Store::fileio_on("f1", disk, 8 << 20)),
            Self::Nvmet => Box::new(NvmeNamespace::on(disk)),
            Self::NvmetOnPartition => Box::new(NvmeNamespace::on(first)),
            Self::WriterOfQueueingMap => {
                // udevd's probe of a new map makes paths of `scsi_debug` fail.
                let udev = super::udevd::stopped();
                let map = QueueingMap::over(std::slice::from_ref(disk));
                let writer = OpenOptions::new().write(true).open(map.node());
                map.set_paths(false);
                Box::new((writer.expect("a writer"), map, udev))
            }
            Self::Reader => Box::new(File::open(disk).expect("a reader")),
        }
    }
}

/// `/dev/sg*` of a SCSI disk, or of the first path of a map.
fn generic_node(disk: &Path) -> PathBuf {
    let directory = Path::new("/sys/block").join(disk.file_name().expect("a name"));
    let slaves = super::entries(directory.join("slaves"));
    let directory = slaves
        .first()
        .map_or(directory.clone(), |path| Path::new("/sys/block").join(path));
    let names = super::entries(directory.join("device/scsi_generic"));
    Path::new("/dev").join(names.first().expect("a generic node"))
}

/// Commands that undo a setup.
struct Undo(Vec<Vec<String>>);

impl Drop for Undo {
    fn drop(&mut self) {
        /// In this time udevd closes a device that it probes.
        const LIMIT: Duration = Duration::from_secs(60);
        for command in &self.0 {
            let (program, arguments) = command.split_first().expect("a command");
            let start = Instant::now();
            loop {
                let ended = Command::new(program).args(arguments).status();
                if ended.as_ref().is_ok_and(std::process::ExitStatus::success) {
                    break;
                }
                if start.elapsed() > LIMIT {
                    eprintln!("{command:?}: {ended:?}");
                    break;
                }
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

struct Mounted;

impl Mounted {
    fn on(node: &Path) -> Self {
        fs::create_dir_all(PLACE).expect("a mount point");
        super::run(&["mount", "-t", "ext4", &node.display().to_string(), PLACE]);
        Self
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _said = Command::new("umount").arg(PLACE).status();
        let _ = fs::remove_dir(PLACE);
    }
}

/// A process in its own mount namespace.
struct Elsewhere(Child);

impl Elsewhere {
    fn mount(node: &Path) -> Self {
        fs::create_dir_all(PLACE).expect("a mount point");
        let node = node.display();
        let script = format!("mount -t ext4 {node} {PLACE} && echo mounted && read line");
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare");
        let mut said = [0; 7];
        let output = child.stdout.as_mut().expect("its output");
        output.read_exact(&mut said).expect("a mount");
        Self(child)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ended = self.0.wait();
        let _ = fs::remove_dir(PLACE);
    }
}

/// A loop device, until it is dropped.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Makes a loop device on this device or file.
    #[must_use]
    pub fn on(node: &Path) -> Self {
        super::need_module("loop");
        let node = node.display().to_string();
        let device = super::run(&["losetup", "--find", "--show", &node]);
        Self(PathBuf::from(device.trim()))
    }

    /// Its name: `loop0`.
    #[must_use]
    pub fn name(&self) -> String {
        let name = self.0.file_name().expect("a name");
        name.to_string_lossy().into_owned()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _told = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
        let bound = Path::new("/sys/block").join(self.name()).join("loop");
        super::wait_until("the loop device to be free", LIMIT, || {
            (!bound.exists()).then_some(())
        });
    }
}

const LIMIT: Duration = Duration::from_secs(60);
