//! A slow network.

use std::time::Duration;

/// Delays each packet on the loopback interface. Dropping it removes the delay.
#[derive(Debug)]
pub struct SlowLoopback(());

impl SlowLoopback {
    /// Delays each packet by `delay`; a round trip takes twice as long.
    #[must_use]
    pub fn by(delay: Duration) -> Self {
        super::modprobe("sch_netem", &[]);
        let delay = format!("{}us", delay.as_micros());
        let add = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay"];
        // The default limit is 1,000 packets.
        super::run(&[&add[..], &[&delay, "limit", "100000"]].concat());
        Self(())
    }
}

impl Drop for SlowLoopback {
    fn drop(&mut self) {
        super::run(&["tc", "qdisc", "del", "dev", "lo", "root"]);
    }
}
