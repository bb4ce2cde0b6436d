//! Records when udev's own events arrive, on a socket that is independent of the engine's.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_KOBJECT_UEVENT};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use nix::unistd::{pipe, write};
use std::os::fd::{AsFd, OwnedFd};

const UDEV_GROUP: u32 = 2;
const RECEIVE_BUFFER: usize = 128 << 20;
/// The place in libudev's header of the offset of the properties
/// (`sd-device/device-monitor.c`): after `libudev\0`, the magic and the header's length.
const OFFSET_AT: usize = 16;

/// An event that udevd has sent after its rules ran.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// `add`, `change` and so on.
    pub action: String,
    /// The path below `/sys`.
    pub devpath: String,
    /// The time of its reception here.
    pub at: Instant,
}

/// Records the arrival of every udev event from its start on.
#[derive(Debug)]
pub struct UdevArrivals {
    seen: Arc<Mutex<Vec<Arrival>>>,
    end: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl UdevArrivals {
    /// Subscribed when this returns.
    #[must_use]
    pub fn start() -> Self {
        super::enter();
        let mut socket = Socket::new(NETLINK_KOBJECT_UEVENT).expect("a uevent socket");
        setsockopt(&socket, RcvBufForce, &RECEIVE_BUFFER).expect("a large receive buffer");
        let group = SocketAddr::new(0, UDEV_GROUP);
        socket.bind(&group).expect("udev's group");
        socket
            .set_non_blocking(true)
            .expect("a socket that does not block");
        let (ended, end) = pipe().expect("a pipe");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let thread = std::thread::spawn({
            let seen = Arc::clone(&seen);
            move || receive(&socket, &ended, &seen)
        });
        Self {
            seen,
            end: Some(end),
            thread: Some(thread),
        }
    }

    /// The first event with this action of the block device with this name.
    #[must_use]
    pub fn first_of(&self, disk: &str, action: &str) -> Option<Arrival> {
        let ending = format!("/block/{disk}");
        let seen = self.seen.lock().unwrap();
        let mut seen = seen.iter();
        seen.find(|event| event.action == action && event.devpath.ends_with(&ending))
            .cloned()
    }
}

impl Drop for UdevArrivals {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            let _wakes_the_thread = write(&end, b".");
        }
        if let Some(thread) = self.thread.take() {
            let _panicked_already = thread.join();
        }
    }
}

fn receive(socket: &Socket, ended: &OwnedFd, seen: &Mutex<Vec<Arrival>>) {
    loop {
        let mut ready = [
            PollFd::new(socket.as_fd(), PollFlags::POLLIN),
            PollFd::new(ended.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut ready, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            Err(errno) => panic!("poll: {errno}"),
            Ok(_) => {}
        }
        if ready[1].any().unwrap_or(true) {
            return;
        }
        let mut message = Vec::with_capacity(16 << 10);
        let received = socket.recv_from(&mut message, 0);
        let at = Instant::now();
        match received {
            Ok(_) => seen.lock().unwrap().extend(parse(&message, at)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => panic!("receiving udev's events: {error}"),
        }
    }
}

fn parse(message: &[u8], at: Instant) -> Option<Arrival> {
    let rest = message.strip_prefix(b"libudev\0")?;
    let offset = rest.get(OFFSET_AT - 8..)?.first_chunk()?;
    let offset = usize::try_from(u32::from_ne_bytes(*offset)).ok()?;
    let properties = message.get(offset..)?;
    let value_of = |name: &str| {
        let mut fields = properties.split(|byte| *byte == 0);
        fields.find_map(|field| {
            let field = std::str::from_utf8(field).ok()?;
            let value = field.strip_prefix(name)?.strip_prefix('=')?;
            Some(value.to_owned())
        })
    };
    Some(Arrival {
        action: value_of("ACTION")?,
        devpath: value_of("DEVPATH")?,
        at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_properties_are_where_the_header_says() {
        let mut message = b"libudev\0".to_vec();
        message.extend(0xfeed_cafe_u32.to_be_bytes());
        message.extend(40_u32.to_ne_bytes());
        message.extend(40_u32.to_ne_bytes());
        message.resize(40, 0);
        message.extend(b"ACTION=add\0DEVPATH=/devices/x/block/sda\0SEQNUM=7\0");
        let arrival = parse(&message, Instant::now()).unwrap();
        assert_eq!(arrival.action, "add");
        assert_eq!(arrival.devpath, "/devices/x/block/sda");
        assert!(parse(&message[..20], Instant::now()).is_none());
        assert!(parse(b"add@/devices/x\0ACTION=add\0", Instant::now()).is_none());
    }
}
