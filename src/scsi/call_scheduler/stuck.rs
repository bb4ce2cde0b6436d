//! A report about a kernel call that has not returned.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use crate::error::Stage;
use crate::id::{Hctl, HostNo};
use crate::kernel::sysfs;

/// A kernel call that has not returned, and whose caller has given up. Its host, or only
/// its device, accepts no calls until it returns.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StuckCall {
    /// The host of the device.
    pub host: HostNo,
    /// The device that the call is about.
    pub hctl: Hctl,
    /// Whether the whole host is quarantined, and not only this device.
    pub whole_host: bool,
    /// The stage of the call.
    pub stage: Stage,
    /// The event that its caller waited for.
    pub what: String,
    /// The time since its start; `seconds` when serialised.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "seconds", serialize_with = "crate::deadline::as_seconds")
    )]
    pub age: Duration,
    /// The kernel functions that its thread is in now, the innermost first; empty if the
    /// process may not read them (`CAP_SYS_ADMIN`).
    pub stack: Vec<String>,
}

impl StuckCall {
    /// The call's place in the kernel, in one line.
    pub(super) fn place(&self) -> String {
        if self.stack.is_empty() {
            return "its kernel stack may not be read".to_owned();
        }
        format!("the kernel is in {}", self.stack.join(" < "))
    }
}

impl fmt::Display for StuckCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            host,
            hctl,
            stage,
            what,
            ..
        } = self;
        if self.whole_host {
            write!(f, "host {host}")?;
        } else {
            write!(f, "device {hctl}")?;
        }
        let seconds = self.age.as_secs_f64();
        write!(
            f,
            " is quarantined: a call at stage {stage} has not returned for {seconds:.1} s ({what})"
        )
    }
}

/// The functions in a task's `stack` file; empty if the process may not read it.
pub(super) fn read_stack(file: &Path) -> Vec<String> {
    sysfs::read(file).map_or_else(|_| Vec::new(), |text| functions(&text))
}

/// The innermost functions; a line is `[<0>] scsi_execute_cmd+0x1a/0x2b [scsi_mod]`.
fn functions(text: &str) -> Vec<String> {
    /// The outer functions are only the entry from the system call.
    const INNERMOST: usize = 12;
    text.lines()
        .filter_map(|line| line.split_once("] ")?.1.split(['+', ' ']).next())
        .take(INNERMOST)
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_is_condensed_to_the_innermost_functions() {
        let text = "[<0>] blk_execute_rq+0xd4/0x1b0\n\
                    [<0>] __scsi_execute+0x10b/0x280 [scsi_mod]\n\
                    [<0>] 0xffffffffc0000000\n\
                    garbage\n";
        assert_eq!(
            functions(text),
            ["blk_execute_rq", "__scsi_execute", "0xffffffffc0000000"]
        );
        assert_eq!(functions(&"[<0>] f+0x1/0x2\n".repeat(100)).len(), 12);
    }
}
