//! Records every kernel uevent, on a socket that is independent of the engine's.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_KOBJECT_UEVENT};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use nix::unistd::{pipe, write};
use std::os::fd::{AsFd, OwnedFd};

const KERNEL_GROUP: u32 = 1;
/// The size of udevd's own buffer, with room for some hundred thousand events.
const RECEIVE_BUFFER: usize = 128 << 20;

/// One message of the kernel group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelUevent {
    /// The kernel's sequence number.
    pub seqnum: u64,
    /// `add`, `remove`, `change`, `bind` and so on.
    pub action: String,
    /// The path below `/sys`.
    pub devpath: String,
    /// Empty if the kernel names none.
    pub subsystem: String,
    /// `disk`, `scsi_device` and so on.
    pub devtype: Option<String>,
    /// All pairs of the message, including those above.
    pub properties: BTreeMap<String, String>,
    /// The time from the counter's start to the arrival.
    pub at: Duration,
}

impl KernelUevent {
    /// The (action, subsystem, devtype or `""`), in which a minimum is counted.
    #[must_use]
    pub fn kind(&self) -> (&str, &str, &str) {
        (
            &self.action,
            &self.subsystem,
            self.devtype.as_deref().unwrap_or(""),
        )
    }

    /// Whether udevd caused the event by a write to the device's `uevent` file.
    #[must_use]
    pub fn is_udevds(&self) -> bool {
        let mark = self.properties.get("SYNTH_UUID");
        mark.is_some_and(|mark| mark == "0")
    }

    fn parse(message: &[u8], at: Duration) -> Option<Self> {
        let mut fields = message
            .split(|byte| *byte == 0)
            .map(String::from_utf8_lossy);
        // The first field is `action@devpath`; the pairs repeat both.
        fields.next()?.split_once('@')?;
        let mut event = Self {
            seqnum: 0,
            action: String::new(),
            devpath: String::new(),
            subsystem: String::new(),
            devtype: None,
            properties: BTreeMap::new(),
            at,
        };
        for field in fields {
            let Some((name, value)) = field.split_once('=') else {
                continue;
            };
            match name {
                "SEQNUM" => event.seqnum = value.parse().ok()?,
                "ACTION" => value.clone_into(&mut event.action),
                "DEVPATH" => value.clone_into(&mut event.devpath),
                "SUBSYSTEM" => value.clone_into(&mut event.subsystem),
                "DEVTYPE" => event.devtype = Some(value.to_owned()),
                _ => {}
            }
            event.properties.insert(name.to_owned(), value.to_owned());
        }
        (!event.action.is_empty() && !event.devpath.is_empty()).then_some(event)
    }
}

#[derive(Debug, Default)]
struct Record {
    events: Vec<KernelUevent>,
    overflows: usize,
    last: Option<Instant>,
}

/// Records the kernel's uevents from its start on.
#[derive(Debug)]
pub struct UeventCounter {
    record: Arc<(Mutex<Record>, Condvar)>,
    start: Instant,
    end: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl UeventCounter {
    /// Subscribed when this returns.
    #[must_use]
    pub fn start() -> Self {
        super::enter();
        let mut socket = Socket::new(NETLINK_KOBJECT_UEVENT).expect("a uevent socket");
        setsockopt(&socket, RcvBufForce, &RECEIVE_BUFFER).expect("a large receive buffer");
        socket
            .bind(&SocketAddr::new(0, KERNEL_GROUP))
            .expect("the kernel group");
        socket
            .set_non_blocking(true)
            .expect("a socket that does not block");
        let (ended, end) = pipe().expect("a pipe");
        let record = Arc::new((Mutex::new(Record::default()), Condvar::new()));
        let start = Instant::now();
        let thread = std::thread::spawn({
            let record = Arc::clone(&record);
            move || receive(&socket, &ended, &record, start)
        });
        Self {
            record,
            start,
            end: Some(end),
            thread: Some(thread),
        }
    }

    /// The events so far.
    #[must_use]
    pub fn events(&self) -> Vec<KernelUevent> {
        self.record.0.lock().unwrap().events.clone()
    }

    /// How many events have arrived so far, without a copy.
    #[must_use]
    pub fn count(&self) -> usize {
        self.record.0.lock().unwrap().events.len()
    }

    /// How often the socket itself lost events.
    #[must_use]
    pub fn overflows(&self) -> usize {
        self.record.0.lock().unwrap().overflows
    }

    /// The time since its start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Waits until nothing has arrived for `quiet`, and returns every event since the start.
    /// Panics if events were lost, because a count would be wrong.
    #[must_use]
    pub fn until_quiet(&self, quiet: Duration) -> Vec<KernelUevent> {
        let called = Instant::now();
        let (record, changed) = &*self.record;
        let mut record = record.lock().unwrap();
        loop {
            let since = record
                .last
                .map_or(called, |last| last.max(called))
                .elapsed();
            let Some(left) = quiet.checked_sub(since).filter(|left| !left.is_zero()) else {
                break;
            };
            record = changed.wait_timeout(record, left).unwrap().0;
        }
        assert_eq!(record.overflows, 0, "the counter's own socket lost uevents");
        record.events.clone()
    }

    /// Waits until an event matches `wanted`; `None` after `limit`.
    #[must_use]
    pub fn wait_for(
        &self,
        limit: Duration,
        wanted: impl Fn(&KernelUevent) -> bool,
    ) -> Option<KernelUevent> {
        let called = Instant::now();
        let (record, changed) = &*self.record;
        let mut record = record.lock().unwrap();
        loop {
            if let Some(found) = record.events.iter().find(|event| wanted(event)) {
                return Some(found.clone());
            }
            let left = limit.checked_sub(called.elapsed())?;
            record = changed.wait_timeout(record, left).unwrap().0;
        }
    }
}

impl Drop for UeventCounter {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            let _wakes_the_thread = write(&end, b".");
        }
        if let Some(thread) = self.thread.take() {
            let _panicked_already = thread.join();
        }
    }
}

fn receive(socket: &Socket, ended: &OwnedFd, record: &(Mutex<Record>, Condvar), start: Instant) {
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
        let now = Instant::now();
        let mut record_now = record.0.lock().unwrap();
        match received {
            Ok((_, sender)) if sender.port_number() == 0 => {
                if let Some(event) = KernelUevent::parse(&message, now - start) {
                    record_now.events.push(event);
                    record_now.last = Some(now);
                }
            }
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {
                record_now.overflows += 1;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => panic!("receiving uevents: {error}"),
        }
        record.1.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_message_gives_its_five_fields() {
        let message = b"add@/devices/x/block/sda\0ACTION=add\0DEVPATH=/devices/x/block/sda\0\
            SUBSYSTEM=block\0MAJOR=8\0DEVTYPE=disk\0SEQNUM=812\0";
        let event = KernelUevent::parse(message, Duration::ZERO).unwrap();
        assert_eq!(event.seqnum, 812);
        assert_eq!(event.devpath, "/devices/x/block/sda");
        assert_eq!(event.kind(), ("add", "block", "disk"));
    }

    #[test]
    fn a_message_of_udevs_own_form_is_not_taken_for_the_kernels() {
        assert!(KernelUevent::parse(b"libudev\0\xfe\xed\xca\xfe", Duration::ZERO).is_none());
    }
}
