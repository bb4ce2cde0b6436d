//! Compares the wanted volumes with the attached ones, plans the steps between them, and
//! keeps both in agreement.
//!
//! ```text
//!  Desired   what is wanted: volumes by the caller's name, each with its source
//!  Actual    what stands: the journal's volumes, looked for in sysfs by identity
//!  plan      a pure function from both to steps, each with its reason
//!  apply     the steps, independent volumes beside each other, once
//!  run       the same for good: woken by the kernel's events, with a slow look at
//!            everything as the net below; the iSCSI sessions that the volumes log
//!            in to are kept, and NBD links healed
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
pub use reconciler::Reconciler;
pub use state::{AtWork, Counters};
pub use step::{Step, StepKind};
