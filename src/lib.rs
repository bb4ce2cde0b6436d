//! lunbd attaches and detaches block devices on Linux. It uses the kernel's own interfaces
//! (sysfs, netlink and ioctls), and multipathd's socket where multipathd runs. It connects to
//! iSCSI targets and NBD servers itself, and starts no other program.
//!
//! The [`guide`] explains each part: [concepts](guide::concepts),
//! [SCSI](guide::scsi), [iSCSI](guide::iscsi), [Fibre Channel](guide::fibre_channel),
//! [multipath](guide::multipath), [NBD](guide::nbd),
//! [journal and recovery](guide::journal), [reconciler](guide::reconciler),
//! [JSON](guide::json), [containers](guide::containers) and [troubleshooting](guide::troubleshooting).
//!
//! Every call that can wait takes a [`Deadline`], which covers the whole call. A kernel
//! call that may block runs on a thread of its own. The caller needs no async runtime,
//! and the library installs no subscriber for its `tracing` spans.
//!
//! An agent must do this from its start on:
//!
//! - call [`Engine::heal`] once, and keep an [`Engine::healer`] on a thread, for NBD;
//! - keep an [`Engine::recover_sessions`] on a thread, for iSCSI;
//! - with the feature `journal`, call `Engine::recover` once.
//!
//! A running `reconcile::Reconciler` heals and recovers the volumes of its journal. It heals no
//! NBD device that is not in its journal. It recovers lunbd's iSCSI sessions once a volume with a
//! login is wanted or is in its journal.
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

#![forbid(unsafe_code)]

mod crash;
pub mod deadline;
pub mod engine;
pub mod error;
pub mod guide;
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

#[cfg(any(fuzzing, clippy))]
#[doc(hidden)]
pub use kernel::sg::fuzz::sg_reply;

#[cfg(feature = "crash-points")]
pub use crash::Point as CrashPoint;
pub use deadline::{Cancel, Deadline};
pub use engine::{AttachRequest, Attachment, DetachRequest, DetachTarget, Detachment, Engine};
pub use error::{Error, ErrorKind, Result};
pub use id::Source;
pub use kernel::Roots;

/// The doctests compile the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
