//! Operations on one SCSI logical unit. Each makes one attempt and verifies it by reading
//! back.

mod access_state;
mod ask;
mod cached;
mod call_scheduler;
mod delete;
mod designators;
mod device;
mod facts;
mod hosts;
mod identity;
mod probe;
mod rescan;
mod running;
mod scan;
mod size;
mod state;
mod units;

pub use access_state::AccessState;
pub(crate) use ask::{
    access_state_of_open, ask_presence, read_access_state, read_capacity, read_identity,
    report_luns,
};
pub(crate) use call_scheduler::CallScheduler;
pub use call_scheduler::StuckCall;
pub(crate) use delete::delete;
pub use device::ScsiDevice;
pub(crate) use facts::DiskFacts;
#[cfg(feature = "journal")]
pub(crate) use hosts::hosts_without_driver;
pub(crate) use hosts::require_host;
pub use identity::{Comparison, Contradiction, Identity, Strength};
pub(crate) use probe::{ScannedBy, describe_qualifier, wait_for_disk};
pub(crate) use rescan::rescan;
pub(crate) use running::set_running;
pub(crate) use scan::scan;
pub(crate) use size::{reread_size, shows_no_size};
pub use state::State;
pub(crate) use units::Units;
