//! The kernel's events, and their listeners.

use std::fmt::Write as _;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use parking_lot::Mutex;

use super::Kernel;

/// One message, as a listener receives it.
#[derive(Debug, Clone)]
pub(crate) struct Uevent {
    /// udevd sends it after its rules ran, not the kernel.
    pub(crate) of_udev: bool,
    pub(crate) action: String,
    pub(crate) devpath: String,
    pub(crate) subsystem: String,
    pub(crate) devtype: String,
    pub(crate) seqnum: u64,
    /// All other pairs: `MAJOR`, `SYNTH_UUID`.
    pub(crate) more: Vec<(String, String)>,
}

impl Uevent {
    /// The wire format: `ACTION@DEVPATH`, and then pairs, each with a NUL after it.
    pub(crate) fn datagram(&self) -> String {
        let Self {
            action,
            devpath,
            subsystem,
            devtype,
            seqnum,
            ..
        } = self;
        let mut text = format!(
            "{action}@{devpath}\0ACTION={action}\0DEVPATH={devpath}\0SUBSYSTEM={subsystem}\0"
        );
        if !devtype.is_empty() {
            write!(text, "DEVTYPE={devtype}\0").unwrap();
        }
        for (key, value) in &self.more {
            write!(text, "{key}={value}\0").unwrap();
        }
        write!(text, "SEQNUM={seqnum}\0").unwrap();
        text
    }
}

/// The kernel's socket, and the udevd that listens to it.
pub(super) struct Uevents {
    number: AtomicU64,
    listeners: Mutex<Vec<Sender<Uevent>>>,
    to_udevd: Sender<Uevent>,
}

impl Uevents {
    pub(super) fn start(kernel: Weak<Kernel>) -> Self {
        let (to_udevd, events) = mpsc::channel();
        thread::spawn(move || super::udevd::run(&kernel, &events));
        Self {
            number: AtomicU64::new(1000),
            listeners: Mutex::default(),
            to_udevd,
        }
    }

    pub(super) fn listen(&self) -> Receiver<Uevent> {
        let (sender, receiver) = mpsc::channel();
        let mut listeners = self.listeners.lock();
        listeners.push(sender);
        receiver
    }

    pub(super) fn broadcast(&self, event: &Uevent) {
        let mut listeners = self.listeners.lock();
        listeners.retain(|listener| listener.send(event.clone()).is_ok());
    }
}

impl Kernel {
    /// Sends a kernel event. `kind` is its subsystem and its device type.
    pub(super) fn announce(
        &self,
        action: &str,
        devpath: &str,
        (subsystem, devtype): (&str, &str),
        more: &[(&str, String)],
    ) {
        let more = more
            .iter()
            .map(|(key, value)| ((*key).to_owned(), value.clone()));
        let event = Uevent {
            of_udev: false,
            action: action.to_owned(),
            devpath: devpath.to_owned(),
            subsystem: subsystem.to_owned(),
            devtype: devtype.to_owned(),
            seqnum: self.uevents.number.fetch_add(1, Ordering::Relaxed),
            more: more.collect(),
        };
        self.uevents.broadcast(&event);
        self.change(|state| state.udevd_has += 1);
        let _it_has_ended = self.uevents.to_udevd.send(event);
    }

    pub(super) fn broadcast(&self, event: &Uevent) {
        self.uevents.broadcast(event);
    }

    /// Receives all events from now on.
    pub(crate) fn listen(&self) -> Receiver<Uevent> {
        self.uevents.listen()
    }
}
