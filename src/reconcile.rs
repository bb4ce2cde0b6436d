//! Volumes that are wanted, against those that there are: a plan from one to the
//! other.
//!
//! ```text
//!  Desired   what is wanted: volumes by the caller's name, each with its source
//!  Actual    what stands: the journal's volumes, looked for in sysfs by identity
//!  plan      a pure function from both to steps, each with its reason
//! ```

mod actual;
mod desired;
mod plan;

pub use actual::Actual;
pub use desired::Desired;
pub use plan::{Plan, Step, StepKind, plan};
