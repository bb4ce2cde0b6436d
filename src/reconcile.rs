//! Compares the wanted volumes with the attached ones, plans the steps between them, and
//! keeps both in agreement.
//!
//! ```text
//!  Desired   the wanted volumes: each has the caller's name, and a source
//!  Actual    the attached volumes: those of the journal, found in sysfs by identity
//!  plan      a pure function from both to steps, each with its reason
//!  apply     does the steps once, of independent volumes at the same time
//!  run       does the steps until it is stopped: the kernel's events wake it, and it
//!            also refreshes all volumes now and then, in case an event is lost; it
//!            recovers the iSCSI sessions that the volumes log in to, and heals NBD links
//! ```
//!
//! A volume is [in use](Reconciler::in_use) from the moment it is wanted until its detach
//! is proven. The journal keeps what is known of that, so it survives the process. A
//! volume that fails waits for its own retry, and delays only the volumes that want what it
//! holds.
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use lunbd::reconcile::{Desired, Options, Reconciler};
//! use lunbd::{AttachRequest, Deadline, Engine, Roots, Source};
//!
//! # fn main() -> lunbd::Result<()> {
//! let engine = Arc::new(Engine::start(Roots::default())?);
//! let journal = engine.open_journal(Deadline::after(Duration::from_secs(10)))?;
//! let reconciler = Reconciler::new(engine, journal, Options::default());
//!
//! let mut desired = Desired::default();
//! let source: Source = "nbd://192.0.2.1/vol-7".parse()?;
//! desired.insert("pvc-7".parse()?, &AttachRequest::new(source))?;
//! reconciler.set(desired);
//! std::thread::scope(|scope| {
//!     let running = scope.spawn(|| reconciler.run());
//!     let limit = Deadline::after(Duration::from_secs(60));
//!     let volume = reconciler.wait_attached(&"pvc-7".parse()?, limit)?;
//!     println!("{:?}", volume.node);
//!     reconciler.stop();
//!     running.join().unwrap_or(Ok(()))
//! })
//! # }
//! ```

mod actual;
mod component_index;
mod desired;
mod event;
mod failure;
mod failure_publisher;
mod followers;
mod job;
mod options;
mod plan;
mod progress;
mod reconciler;
mod refresh;
mod resource;
mod run;
mod run_loop;
mod schedule;
mod session_recovery;
mod shared;
mod state;
mod step;
#[cfg(feature = "metrics")]
mod telemetry;
mod tracked;
mod transports;
mod work;
mod workers;

pub use actual::Actual;
pub use desired::{Desired, DesiredFile};
pub use event::Event;
pub use followers::{Events, SequencedEvent};
pub use options::Options;
pub use plan::{Plan, plan};
pub use progress::{Counters, RunningStep};
pub use reconciler::Reconciler;
pub use step::{Step, StepKind};
