//! The single thread that reads events for all waiters.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use super::changed_names::Naming;
use super::changes::Changes;
use super::counters::Counters;
use super::dispatch::{Dispatch, Interest};
use super::event::{Event, Origin};
use super::kernel_reader::{KernelReader, feed};
use super::message::Message;
use super::mode::Mode;
use super::socket::{self, DropCount};
use super::stream::Stream;
use super::subscription::Subscription;
use super::unit_attention_watch::UnitAttentionWatch;
use super::watch::Watch;
use crate::error::{Error, ErrorKind, Result};
use crate::kernel::Roots;
use crate::kernel::threads;

/// Options for starting a [`Hub`].
#[derive(Debug, Clone)]
pub struct HubOptions {
    receive_buffer: usize,
    fed: Option<Mode>,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self {
            receive_buffer: 16 << 20,
            fed: None,
        }
    }
}

impl HubOptions {
    /// Sets the size of each socket's receive buffer in bytes. The default of 16 MiB
    /// holds about 13,000 events. Without `CAP_NET_ADMIN` the machine's
    /// `net.core.rmem_max` limits it.
    #[must_use]
    pub fn receive_buffer(mut self, bytes: usize) -> Self {
        self.receive_buffer = bytes;
        self
    }

    /// Opens no socket: all events come through [`Hub::feed`] and [`Hub::feed_udev`],
    /// and `mode` says what waits rely on.
    #[must_use]
    pub fn fed(mut self, mode: Mode) -> Self {
        self.fed = Some(mode);
        self
    }
}

/// Reads kernel and udev events on a thread of its own and delivers each to its
/// waiters. Dropping it ends the thread.
#[derive(Debug)]
pub struct Hub {
    mode: Mode,
    dispatch: Arc<Dispatch>,
    /// The holder of the lock delivers the events, so they keep their order. `None` in
    /// [`Mode::SysfsPoll`].
    kernel: Option<Arc<Mutex<KernelReader>>>,
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    /// Opens the sockets and starts the thread. In [`Mode::SysfsPoll`], and if it is
    /// [`fed`](HubOptions::fed), it does neither.
    ///
    /// # Errors
    /// `Io` if a socket or the thread cannot be created.
    pub fn start(roots: &Roots, options: &HubOptions) -> Result<Self> {
        let mode = options.fed.unwrap_or_else(|| Mode::find(roots));
        let dispatch = Arc::<Dispatch>::default();
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| failed("eventfd", errno))?;
        let mut hub = Self {
            mode,
            dispatch: Arc::clone(&dispatch),
            kernel: None,
            stop: Arc::new(stop),
            thread: None,
        };
        if mode == Mode::SysfsPoll || options.fed.is_some() {
            return Ok(hub);
        }
        let kernel = Arc::new(Mutex::new(KernelReader::open(options.receive_buffer)?));
        hub.kernel = Some(Arc::clone(&kernel));
        let (stop, receive_buffer) = (Arc::clone(&hub.stop), options.receive_buffer);
        // libudev's handles must stay on the thread that created them.
        let (ready, opened) = mpsc::sync_channel(1);
        let run = move || match Reader::open(mode, kernel, receive_buffer, &stop) {
            Ok(reader) => {
                let _ = ready.send(Ok(()));
                reader.run(&dispatch);
                dispatch.close();
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        };
        let thread = threads::start("lunbd-uevent", run)?;
        hub.thread = Some(thread);
        match opened.recv() {
            Ok(result) => result.map(|()| hub),
            Err(_) => Err(Error::new(ErrorKind::Io, "the uevent thread died")),
        }
    }

    /// What waits rely on here.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Watches the events whose device path has `component` between two
    /// slashes: `2:0:0:3`, `nbd5`, `dm-0`. Take the watch before you act.
    #[must_use]
    pub fn watch(&self, component: &str) -> Watch {
        Watch::new(self.subscribe(Interest::Component(component.into())))
    }

    /// Watches every event of the kernel, and udev's of block devices.
    #[must_use]
    pub fn watch_all(&self) -> Watch {
        Watch::new(self.subscribe(Interest::Everything))
    }

    /// Every event, for a permanent listener.
    #[must_use]
    pub fn stream(&self) -> Stream {
        Stream::new(Subscription::new(&self.dispatch, Interest::Everything))
    }

    /// Watches what arrays report: logical units come and go, capacities change.
    /// lunbd scans nothing on such a report; the reader may.
    #[must_use]
    pub fn watch_unit_attentions(&self) -> UnitAttentionWatch {
        UnitAttentionWatch::new(self.subscribe(Interest::UnitAttentionEvent))
    }

    /// The names of the devices that have events from now on; `None` if no events
    /// come.
    pub(crate) fn changes(&self, naming: Naming) -> Option<Changes> {
        let kernel = self.kernel.as_ref()?;
        Some(Changes::new(naming, &self.dispatch, kernel))
    }

    /// Delivers an event to the watches as if it came from the kernel's socket. A
    /// process in [`Mode::SysfsPoll`] has no such socket, but another process can
    /// pass it the datagrams of one. The event is trusted.
    pub fn feed(&self, message: &Message<'_>) {
        feed(&self.dispatch, message);
    }

    /// Tells every watch that events were lost. A process that [feeds](Self::feed)
    /// the datagrams of a socket calls this when that socket's buffer was full.
    pub fn feed_overrun(&self) {
        self.dispatch.resync();
    }

    /// Like [`feed`](Self::feed), for an event that udevd has handled: with the same
    /// properties and those that udevd adds.
    pub fn feed_udev(&self, message: &Message<'_>) {
        let event = || Some(Event::of(Origin::Udev, message));
        self.dispatch.deliver(message.devpath, || false, event);
    }

    /// The current counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.dispatch.counters()
    }

    fn subscribe(&self, interest: Interest) -> Subscription {
        let subscription = Subscription::new(&self.dispatch, interest);
        match self.mode {
            Mode::SysfsPoll => subscription.polling(),
            Mode::Udev | Mode::KernelOnly => subscription,
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The write fails only if the counter is full, and then the event is
            // readable.
            let _ = self.stop.write(1);
            let _ = thread.join();
        }
    }
}

struct Reader {
    epoll: Epoll,
    kernel: Arc<Mutex<KernelReader>>,
    udev: Option<udev::MonitorSocket>,
    udev_drops: DropCount,
}

const STOP: u64 = 0;
const KERNEL: u64 = 1;
const UDEV: u64 = 2;

impl Reader {
    fn open(
        mode: Mode,
        kernel: Arc<Mutex<KernelReader>>,
        receive_buffer: usize,
        stop: &EventFd,
    ) -> Result<Self> {
        let udev = match mode {
            Mode::Udev => Some(socket::open_udev(receive_buffer)?),
            Mode::KernelOnly | Mode::SysfsPoll => None,
        };
        let register = || {
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
            let readable = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
            epoll.add(stop, readable(STOP))?;
            epoll.add(&*kernel.lock(), readable(KERNEL))?;
            if let Some(udev) = &udev {
                epoll.add(udev, readable(UDEV))?;
            }
            Ok(epoll)
        };
        Ok(Self {
            epoll: register().map_err(|errno| failed("epoll", errno))?,
            kernel,
            udev,
            udev_drops: DropCount::default(),
        })
    }

    fn run(mut self, dispatch: &Dispatch) {
        let mut ready = [EpollEvent::empty(); 3];
        loop {
            let count = match self.epoll.wait(&mut ready, EpollTimeout::NONE) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(errno) => {
                    tracing::error!(%errno, "the uevent thread ends");
                    return;
                }
            };
            for event in ready.iter().take(count) {
                match event.data() {
                    STOP => return,
                    KERNEL => self.read_kernel(dispatch),
                    _ => self.read_udev(dispatch),
                }
            }
        }
    }

    /// The most events of one read of a socket. The other socket waits no longer than
    /// that.
    const MAX_EVENTS: usize = 256;

    fn read_kernel(&mut self, dispatch: &Dispatch) {
        self.kernel.lock().read(Self::MAX_EVENTS, dispatch);
    }

    fn read_udev(&mut self, dispatch: &Dispatch) {
        let Some(udev) = &self.udev else {
            return;
        };
        for event in udev.iter().take(Self::MAX_EVENTS) {
            match event.devpath().to_str() {
                Some(devpath) => {
                    // Unit attentions come only from the kernel.
                    dispatch.deliver(devpath, || false, || Event::of_udev(&event));
                }
                None => dispatch.counts().foreign_message(),
            }
        }
        if self.udev_drops.rose(udev) == Some(true) {
            dispatch.resync();
        }
    }
}

fn failed(what: &str, errno: Errno) -> Error {
    Error::new(ErrorKind::Io, format!("{what}: {}", errno.desc()))
}
