//! Notices that something may have changed: kernel events and the kernel's notices of dead
//! NBD links, both forwarded to one listener.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::error::{Result, Stage};
use crate::id::{HostNo, NbdIndex};
use crate::kernel::threads;
use crate::nbd::{DeadLinks, LinkNotice, LinkWaker, LinkWatch};
use crate::uevent::{self, Notice, Origin, Stream, UnitAttention, Waker};

/// A reason to look at the volumes again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChangeEvent {
    /// The kernel sent an event for a block device or a SCSI device.
    Device {
        /// Its path below `/sys`. A disk's path contains its SCSI address.
        devpath: String,
        /// Whether the device was removed.
        removed: bool,
    },
    /// A remote port came, went or changed, or a target reports that its logical units
    /// changed: paths may have come back.
    Transport {
        /// The SCSI host, where the event's path names one.
        host: Option<HostNo>,
    },
    /// The kernel added, removed or changed an iSCSI session or a SCSI host. A login of this
    /// process causes it too, so only sysfs shows whether a path may have come back.
    HostOrSession,
    /// A link of this NBD device has died.
    LinkDead(NbdIndex),
    /// Events may have been lost: look at everything.
    Resync,
    /// Notices of dead NBD links may have been lost: ask every server.
    LinkNoticesLost,
}

impl ChangeEvent {
    fn of(notice: &Notice) -> Option<Self> {
        let event = match notice {
            // udev sends its own event for each kernel event.
            Notice::Event(event) if event.origin == Origin::Kernel => event,
            // The kernel announces a disconnect before it removes the attributes of the
            // connection (`nbd_config_put`), so a look right after its event may come too
            // soon.
            Notice::Event(event) if is_an_nbd_disk(event) => event,
            Notice::Event(_) => return None,
            Notice::Resync => return Some(Self::Resync),
        };
        let transport = || Self::Transport {
            host: host_in(&event.devpath),
        };
        if event.sdev_ua == Some(UnitAttention::LunsChanged) {
            return Some(transport());
        }
        let starts = |subsystem: &str, of: &[&str]| of.iter().any(|of| subsystem.starts_with(of));
        match event.subsystem.as_str() {
            "block" | "scsi" => Some(Self::Device {
                devpath: event.devpath.clone(),
                removed: event.action == "remove",
            }),
            subsystem if starts(subsystem, &["fc_", "sas_"]) => Some(transport()),
            subsystem if starts(subsystem, &["iscsi_", "scsi_host"]) => Some(Self::HostOrSession),
            _ => None,
        }
    }
}

/// The SCSI host in a path below `/sys`.
fn host_in(devpath: &str) -> Option<HostNo> {
    let mut numbers = devpath
        .split('/')
        .filter_map(|part| part.strip_prefix("host"));
    numbers.find_map(|number| number.parse().ok().map(HostNo))
}

fn is_an_nbd_disk(event: &uevent::Event) -> bool {
    event.devpath.starts_with("/devices/virtual/block/nbd") && event.action == "change"
}

/// A running listener with two threads that sleep until something happens. Dropping it ends
/// them.
pub struct ChangeListener {
    end: Arc<AtomicBool>,
    events: Waker,
    link_waker: Option<LinkWaker>,
    threads: Vec<JoinHandle<()>>,
}

impl fmt::Debug for ChangeListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChangeListener").finish_non_exhaustive()
    }
}

impl Engine {
    /// Calls `listener` for every event, from now on, that may change where a volume is
    /// attached. The calls come on a private thread and must not block;
    /// [`ChangeEvent::Resync`] replaces events that `listener` does not take in time.
    ///
    /// Without the kernel's notices of dead NBD links, for example without the privilege,
    /// the listener receives all other events.
    ///
    /// # Errors
    /// `Io` where no thread can be started; `TimedOut`.
    pub fn listen(
        &self,
        listener: impl Fn(ChangeEvent) + Send + Sync + 'static,
        deadline: Deadline,
    ) -> Result<ChangeListener> {
        let (listener, end) = (Arc::new(listener), Arc::new(AtomicBool::new(false)));
        let stream = self.hub().stream();
        let events = stream.waker();
        let link_watch = match DeadLinks::listen(deadline) {
            Ok(links) => Some(links.watch(None)),
            Err(error) if error.kind().is_timeout_or_cancel() => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "lunbd gets no notice when an NBD link dies");
                None
            }
        };
        let mut listening = ChangeListener {
            end: Arc::clone(&end),
            events,
            link_waker: link_watch.as_ref().map(LinkWatch::waker),
            threads: Vec::new(),
        };
        let (uevent_listener, uevent_end) = (Arc::clone(&listener), Arc::clone(&end));
        listening.start("lunbd-uevents", move || {
            forward_uevents(stream, &uevent_end, &*uevent_listener);
        })?;
        if let Some(watch) = link_watch {
            listening.start("lunbd-nbd-dead", move || {
                forward_link_deaths(watch, &end, &*listener);
            })?;
        }
        Ok(listening)
    }
}

impl ChangeListener {
    fn start(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = threads::start(name, run).map_err(|error| error.at(Stage::Resolve))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for ChangeListener {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Release);
        self.events.wake();
        if let Some(link_waker) = &self.link_waker {
            link_waker.wake();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn forever() -> Deadline {
    Deadline::after(Duration::MAX)
}

fn forward_uevents(mut stream: Stream, end: &AtomicBool, listener: &dyn Fn(ChangeEvent)) {
    while let Some(notice) = stream.next(forever()) {
        if end.load(Ordering::Acquire) {
            return;
        }
        if let Some(change) = ChangeEvent::of(&notice) {
            listener(change);
        }
    }
}

fn forward_link_deaths(mut watch: LinkWatch, end: &AtomicBool, listener: &dyn Fn(ChangeEvent)) {
    while let Some(notice) = watch.next(forever()) {
        if end.load(Ordering::Acquire) {
            return;
        }
        listener(match notice {
            LinkNotice::Dead(index) => ChangeEvent::LinkDead(index),
            LinkNotice::Resync => ChangeEvent::LinkNoticesLost,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn cause(origin: Origin, devpath: &str) -> Option<ChangeEvent> {
        ChangeEvent::of(&Notice::Event(Arc::new(uevent::Event {
            origin,
            at: Instant::now(),
            action: "change".to_owned(),
            devpath: devpath.to_owned(),
            seqnum: 1,
            subsystem: "block".to_owned(),
            devtype: None,
            devno: None,
            diskseq: None,
            synth_uuid: None,
            sdev_ua: None,
            links: Vec::new(),
            cut: false,
        })))
    }

    #[test]
    fn the_path_of_a_remote_port_names_its_host() {
        let port =
            "/devices/pci0000:00/0000:00:05.0/host12/rport-12:0-3/fc_remote_ports/rport-12:0-3";
        assert_eq!(host_in(port), Some(HostNo(12)));
        assert_eq!(host_in("/devices/virtual/hosted/expander-1:0"), None);
    }

    #[test]
    fn udevs_word_is_a_cause_for_an_nbd_disk_alone_which_the_kernel_announces_too_soon() {
        let nbd = "/devices/virtual/block/nbd3";
        let device = |devpath: &str| {
            Some(ChangeEvent::Device {
                devpath: devpath.to_owned(),
                removed: false,
            })
        };
        assert_eq!(cause(Origin::Kernel, nbd), device(nbd));
        assert_eq!(cause(Origin::Udev, nbd), device(nbd));
        let map = "/devices/virtual/block/dm-0";
        assert_eq!(cause(Origin::Kernel, map), device(map));
        assert_eq!(cause(Origin::Udev, map), None);
    }
}
