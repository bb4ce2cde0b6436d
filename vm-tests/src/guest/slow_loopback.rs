//! A network that takes its time.

use std::time::Duration;

/// The loopback interface, with each of its packets that late; dropping it makes it
/// quick again.
#[derive(Debug)]
pub struct SlowLoopback(());

impl SlowLoopback {
    /// A round trip takes twice as long as `delay`.
    #[must_use]
    pub fn by(delay: Duration) -> Self {
        super::modprobe("sch_netem", &[]);
        let delay = format!("{}us", delay.as_micros());
        let add = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay"];
        // Its own limit is 1,000 packets.
        super::run(&[&add[..], &[&delay, "limit", "100000"]].concat());
        Self(())
    }
}

impl Drop for SlowLoopback {
    fn drop(&mut self) {
        super::run(&["tc", "qdisc", "del", "dev", "lo", "root"]);
    }
}
