//! The engine's side of the socket.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lunbd::id::DevNo;
use lunbd::kernel::devices::{Completion, Info, NumberedDevice};
use lunbd::kernel::{DeviceAccess, Devices, OpenMode};
use lunbd::uevent::{HubOptions, Message, Mode};
use lunbd::{Engine, Roots};
use nix::errno::Errno;

use super::wire::{Heard, Reply, Request, SOCKET, ask, hear, say};

/// The roots of the machine below this directory.
pub(crate) fn roots(root: &Path) -> Roots {
    Roots {
        devices: Devices::Other(Arc::new(FakeAccess(root.to_owned()))),
        ..Roots::below(root)
    }
}

/// An engine on the machine that receives the events of its kernel and its udevd.
pub(crate) fn engine(root: &Path) -> Arc<Engine> {
    let options = HubOptions::default().fed(Mode::Udev);
    let engine = Arc::new(Engine::with_options(roots(root), &options).unwrap());
    let mut stream = UnixStream::connect(root.join(SOCKET)).unwrap();
    say(&mut stream, &Request::Listen).unwrap();
    let mut events = BufReader::new(stream);
    let Reply::Done = hear(&mut events).unwrap() else {
        panic!("the kernel does not tell its events");
    };
    let own = Arc::downgrade(&engine);
    thread::spawn(move || {
        while let Ok(heard) = hear::<Heard>(&mut events) {
            let Some(engine) = own.upgrade() else {
                return;
            };
            let message = Message::parse(heard.datagram.as_bytes()).unwrap();
            if heard.of_udev {
                engine.hub().feed_udev(&message);
            } else {
                engine.hub().feed(&message);
            }
        }
    });
    engine
}

/// How an engine reaches the machine below this directory.
///
/// A node is a file that names a disk and its instance. A claim is a file lock on the node, so
/// the real kernel releases it when a process dies.
#[derive(Debug)]
pub(crate) struct FakeAccess(PathBuf);

impl FakeAccess {
    fn ask(&self, request: &Request) -> io::Result<Reply> {
        match ask(&self.0, request)? {
            Reply::Refused(errno) => Err(io::Error::from_raw_os_error(errno)),
            reply => Ok(reply),
        }
    }
}

/// The device number and the instance in a node; `None` if the file is not a node.
fn read_node(file: &File) -> Option<(DevNo, u64)> {
    let mut text = [0; 64];
    let length = file.read_at(&mut text, 0).ok()?;
    let text = String::from_utf8_lossy(text.get(..length)?).into_owned();
    let mut words = text.split_whitespace();
    if words.next() != Some("block") {
        return None;
    }
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

fn life_of(disk: &File) -> io::Result<u64> {
    let node = read_node(disk);
    node.map(|(_, life)| life)
        .ok_or_else(|| Errno::ENOTTY.into())
}

impl DeviceAccess for FakeAccess {
    fn write_attribute(
        &self,
        attribute: &Path,
        text: &str,
        is_still_ours: &dyn Fn() -> bool,
    ) -> io::Result<bool> {
        let open = OpenOptions::new().write(true).open(attribute)?;
        if !is_still_ours() {
            return Ok(false);
        }
        let request = Request::Write {
            path: attribute.to_owned(),
            inode: open.metadata()?.ino(),
            text: text.to_owned(),
        };
        self.ask(&request).map(|_| true)
    }

    fn open(&self, node: &Path, mode: OpenMode) -> io::Result<(File, Option<DevNo>)> {
        let file = File::open(node)?;
        let Some((devno, life)) = read_node(&file) else {
            return Ok((file, None));
        };
        self.ask(&Request::Open { life })?;
        if mode == OpenMode::Exclusive {
            file.try_lock().map_err(|_| Errno::EBUSY)?;
        }
        Ok((file, Some(devno)))
    }

    fn device_at(&self, path: &Path) -> io::Result<Option<NumberedDevice>> {
        if !fs::metadata(path)?.is_file() {
            return Ok(None);
        }
        let node = read_node(&File::open(path)?);
        Ok(node.map(|(devno, _)| NumberedDevice::Block(devno)))
    }

    fn disk_sequence(&self, disk: &File) -> io::Result<u64> {
        life_of(disk)
    }

    fn sync(&self, disk: &File) -> io::Result<()> {
        let life = life_of(disk)?;
        self.ask(&Request::Sync { life }).map(drop)
    }

    fn write_pages(&self, disk: &File) -> io::Result<()> {
        let life = life_of(disk)?;
        self.ask(&Request::WritePages { life }).map(drop)
    }

    fn drop_pages(&self, disk: &File) -> io::Result<()> {
        let life = life_of(disk)?;
        self.ask(&Request::DropPages { life }).map(drop)
    }

    fn scsi_read(
        &self,
        disk: &File,
        cdb: &[u8],
        buffer: &mut [u8],
        _timeout: Duration,
    ) -> io::Result<Completion> {
        let request = Request::Command {
            life: life_of(disk)?,
            cdb: cdb.to_vec(),
            length: buffer.len(),
        };
        let Reply::Answered(answer) = self.ask(&request)? else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        buffer[..answer.data.len()].copy_from_slice(&answer.data);
        let mut info = Info::empty();
        info.set(Info::CHECK, !answer.is_good());
        Ok(Completion {
            transferred: answer.data.len(),
            status: answer.status,
            host_status: answer.host_status,
            driver_status: 0,
            info,
            sense: answer.sense,
        })
    }
}
