//! Attach and detach block devices on Linux by talking to the kernel alone:
//! sysfs, netlink and ioctls. No other program is started.
//!
//! # One attach, step by step
//!
//! ```text
//!  resolve   iSCSI sessions and Fibre Channel ports, as sysfs shows them, say at
//!            which host, channel and target each path is; what is down is missing
//!  lock      one process at a time works on an address, and on a unit
//!  (watch)   subscribed to the unit's events, before anything is done
//!  scan      "channel target lun" to the host's scan file: one unit, no other
//!  probe     the disk driver brings the block device, on a thread of its own
//!  identify  INQUIRY, sent to the unit itself on every path: page 83h, page 80h;
//!            all must be one unit; a device left from another one is replaced
//!  settle    udev's own event for the kernel's event, or its answer to a barrier
//!  map       multipathd is told of the paths; its map is what is handed out
//! ```
//!
//! The scan's success proves nothing (it succeeds when nothing is there), nor
//! does a node, a link or a database record (each may be left from the device's
//! previous life), nor a quiet queue. What is returned was read back.
//!
//! # One detach, step by step
//!
//! ```text
//!  lock        as above
//!  identify    whose devices these are; all paths of that unit are found by it,
//!              those that come in the middle too
//!  claim       an exclusive open: the kernel's own word that nobody mounts, maps,
//!              swaps on or claims the device or a partition of it
//!  flush       the map first: fsync, which reaches the unit's cache; then the
//!              pages are dropped. A flush that fails ends the detach here
//!  remove_map  by multipathd, or device-mapper's ioctls where it does not run
//!  delete      after all paths are claimed and flushed: each one's delete file;
//!              its return, not the node's disappearance
//!  confirm     sysfs shows this life of the devices no more
//!  settle      udev has handled the removal: no link is left, nothing comes late
//!  forget      multipathd says itself that it knows none of the paths
//! ```
//!
//! The [`Receipt`](engine::Receipt) says of each step whether it was read back;
//! its [`safe_to_unmap`](engine::Receipt::safe_to_unmap) is `true` only if all
//! were. A detach that fails has one too: see
//! [`DetachFailure`](engine::DetachFailure).
//!
//! # When the kernel does not come back
//!
//! A scan or a delete holds its whole SCSI host in the kernel, so these wait in
//! one queue a host; hosts do not wait for each other. A call that is not back
//! at its caller's deadline quarantines its host (a scan, a delete) or its device
//! (an open, an INQUIRY, a flush): what comes after is refused at once with
//! [`Quarantined`](ErrorKind::Quarantined), and
//! [`Engine::stuck_calls`] shows it with its kernel stack. The return of the call
//! ends it.
//!
//! # iSCSI without a daemon
//!
//! [`iscsi::discover`] asks a portal for its targets, with CHAP in either or both
//! directions where that is wanted, on a socket of its own: no daemon, no database,
//! and nothing of the kernel's iSCSI. What a target says is untrusted.
//!
//! An attach with [`log_in`](AttachRequest::log_in) makes the sessions that its
//! source lacks, through all portals at once:
//!
//! ```text
//!  find        a session of this initiator with this target through this portal,
//!              whoever made it, is used as it is
//!  dial, login on a socket of our own: what fails here the kernel never hears of
//!  hand over   the kernel makes the session of the socket: all that was agreed is
//!              set, it is started, and LOGGED_IN is read back
//!  attach      as above: that one LUN is scanned, and no other
//! ```
//!
//! A process that is killed in the hand over leaves a session that carries nothing.
//! One with its names the next attach, detach or recovery of the volume finds by
//! them. One without is ended by the next login or recovery, with proof: the lock of
//! a login is left whose holder died, and nobody makes sessions right now, which the
//! kernel lets one socket of the machine do at a time.
//!
//! The session then needs no process: the kernel carries the I/O and answers the
//! target's pings. Its `creator` is -1 and its interface `lunbd`, in sysfs: by the
//! first an iscsid that starts leaves it alone, by both it is known for ours. The
//! detach of the last device on it logs it out
//! ([`keep_sessions`](DetachRequest::keep_sessions) leaves it): the target is taken
//! away, the target is told, the connection is ended, and session and host are gone
//! when it returns. A session of iscsid's, or of anybody else's, is never ended.
//!
//! Needs the module `iscsi_tcp`, root, and the initial network namespace. A lost
//! session blocks its devices for the recovery timeout, 5 s where a multipath map
//! is required, or is preferred and multipathd runs, and 120 s else, and then fails
//! their I/O.
//!
//! **What an agent must do:** keep an [`Engine::keep_sessions`] on a thread, from its
//! start on; a `reconcile::Reconciler` that runs does it by itself. The kernel never
//! dials; this does, with growing pauses, and gives the session another connection:
//! what waits goes on without an error, and after the recovery timeout devices run
//! again.
//!
//! ```text
//!  hear     the kernel says that a connection is lost; sysfs is looked at every 10 s
//!           for what it did not say
//!  dial     as long as the target takes no connection, nothing is done
//!  halt     the kernel lets go of the lost connection, and numbers a login request
//!           into a connection of this machine with itself: the number of the next
//!           command, which the login must have, or I/O hangs
//!  login    on a socket of our own, with the session's own ISID: the target ends what
//!           it still has of it
//!  resume   the kernel takes the socket: all that was agreed is set, it is started,
//!           and LOGGED_IN is read back
//! ```
//!
//! The ISID is made of the session's names, which sysfs has, so the next process can
//! do all of this for the sessions of one that died. What the kernel does not keep, the
//! secrets of CHAP and after a loss the digests, its
//! [`KeepOptions`](engine::KeepOptions) say.
//!
//! # NBD that survives
//!
//! An NBD device outlives the process that attached it, and with the defaults
//! it outlives its server too: nothing above it sees an error while the server
//! restarts.
//!
//! | setting | default | what it means |
//! |---|---|---|
//! | [`io_timeout`](engine::NbdOptions::io_timeout) | 30 s | one request waits this long; then its connection is taken for dead, and the request goes out over another, or waits for a new one where the device has no other. A server that hangs is noticed by this alone, and a request that was in flight when a link died is sent again only then: so long I/O may stand still after a heal |
//! | [`dead_connection_timeout`](engine::NbdOptions::dead_connection_timeout) | 300 s | requests wait this long, from the first that waits, for a new connection; then they fail with `EIO`. The device stays, and a later heal revives it |
//! | `TCP_USER_TIMEOUT`, keepalive | 30 s; of an NBD connection its `io_timeout` | a peer that vanished without a word is noticed, also on an idle link |
//!
//! Only with both timeouts above zero does a server that hangs cause no I/O
//! error; with a dead-connection timeout of a day, a server that is gone for
//! good leaves processes in uninterruptible sleep for a day.
//!
//! **What an agent must do at its start:** call [`Engine::heal`] once. Links may
//! have died while no process was there to see it; devices are found again by
//! the backend id that the kernel keeps with them (Linux 5.14), which is the
//! source's URI unless the agent gave its own: for those, call
//! [`Engine::heal_source`] with each. **While it runs:** keep an
//! [`Engine::healer`] on a thread; it hears the kernel's `LINK_DEAD` and dials
//! until the server is back. The kernel itself never dials.
//!
//! A server that comes back is measured before it is given to the kernel: one
//! whose export has shrunk, has become read-only, or takes fewer kinds of
//! requests is refused and reported, and not a byte is written to it. The
//! kernel drops a socket in silence where it does not know the old link for
//! dead; so the old link is ended first, and a read that comes back is the
//! proof.
//!
//! # After a crash
//!
//! With the feature `journal` an agent names its volumes: `Engine::attach_volume`
//! and `Engine::detach_volume` write down what they are about to do before they
//! do it, and `Engine::recover`, called once at the next start, finds every
//! volume by its identity and finishes or undoes what was begun. The journal
//! holds intent; what stands is read from the kernel.
//!
//! # What the array took away
//!
//! [`Engine::reap`] finds the devices that the kernel keeps of LUNs which their
//! target has no more, proves it by the target's own word, and takes away those
//! that nobody uses.
//!
//! # Waiting
//!
//! Every call that can wait takes a [`Deadline`], which covers the whole call. A
//! kernel call that may block runs on a thread of its own: when the deadline
//! passes, the caller gets an [`Error`] that names the stage, how long was
//! waited and what was last seen, and the thread stays until the kernel lets go
//! of it. There is no async runtime to bring and no subscriber is installed for
//! the `tracing` spans.
//!
//! # What is measured
//!
//! Spans of the `tracing` facade name the call, the volume, the path and the
//! stage. With the feature `metrics` the durations of calls and stages, and
//! counts, go to whichever recorder of that facade the process has installed:
//! `Engine::publish_metrics` and `Reconciler::publish_metrics` list them.
//!
//! # Example
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use lunbd::{AttachRequest, Deadline, Engine, Roots, Source};
//!
//! # fn main() -> lunbd::Result<()> {
//! let engine = Engine::start(Roots::default())?;
//! let source: Source = "scsi:2:0:0:7".parse()?;
//! let request = AttachRequest::new(source.clone())
//!     .expect("naa.6001405a1b2c3d4e5f60718293a4b5c6".parse()?);
//! let disk = engine.attach(&request, Deadline::after(Duration::from_secs(30)))?;
//! println!("{} holds {} bytes", disk.node.display(), disk.size);
//! engine.detach(source, Deadline::after(Duration::from_secs(60)))?;
//! # Ok(())
//! # }
//! ```
//!
//! # The house
//!
//! A room uses its own floor and those below: [`error`], [`id`] and
//! [`deadline`] are values; [`kernel`] and [`uevent`] are the doors to the
//! kernel; [`scsi`], [`nbd`], [`iscsi`], [`transport`] and [`multipath`] are domains;
//! [`engine`] puts them together; `reconcile` (feature `journal`) stands above it
//! and keeps volumes as they are wanted. A test holds that.

#![forbid(unsafe_code)]

mod crash;
pub mod deadline;
pub mod engine;
pub mod error;
pub mod id;
pub mod iscsi;
pub mod kernel;
pub mod multipath;
pub mod nbd;
#[cfg(feature = "journal")]
pub mod reconcile;
pub mod scsi;
pub mod transport;
pub mod uevent;

#[cfg(fuzzing)]
#[doc(hidden)]
pub use kernel::sg::fuzz::sg_reply;

#[cfg(feature = "crash-points")]
pub use crash::Point as CrashPoint;
pub use deadline::Deadline;
pub use engine::{AttachRequest, Attachment, DetachRequest, DetachTarget, Detachment, Engine};
pub use error::{Error, ErrorKind, Result};
pub use id::Source;
pub use kernel::Roots;

/// The README's example is compiled with the other doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
