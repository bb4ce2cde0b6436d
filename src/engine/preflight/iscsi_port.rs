//! The netlink port from which iSCSI sessions are made.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::preflight::Check;
use crate::error::Result;
use crate::iscsi::{self, IscsiSession};

pub(super) fn check_iscsi_port(engine: &Engine, _: Deadline) -> Result<Check> {
    const NAME: &str = "iscsi port";
    let roots = engine.roots();
    if !iscsi::has_driver(roots) {
        return Ok(Check::good(NAME, "not used: iscsi_tcp is not loaded"));
    }
    let mut elsewhere = Vec::new();
    for session in IscsiSession::all(roots)? {
        if session.is_lunbd_owned()? && session.creator()? != Some(-1) {
            elsewhere.push(session.id().to_string());
        }
    }
    let mut seen = Vec::new();
    let holder = iscsi::holder_of_port(roots);
    seen.extend(holder.map(|holder| format!("{holder} has the netlink port -1")));
    if !elsewhere.is_empty() {
        let numbers = elsewhere.join(", ");
        seen.push(format!("sessions made from another port: {numbers}"));
    }
    if seen.is_empty() {
        return Ok(Check::good(NAME, "the netlink port -1 is free"));
    }
    let remedy = "lunbd itself has the port while it creates a session: if another program has \
                  it, end that program; then detach and attach again the devices of the sessions \
                  made from another port, before an iscsid starts: it takes over such sessions";
    Ok(Check::limited(NAME, seen.join("; "), remedy))
}
