//! A network that is slow, or that loses every packet.

use std::time::Duration;

/// Treats the packets on the loopback interface. Dropping it ends that.
#[derive(Debug)]
pub struct ImpairedLoopback(());

impl ImpairedLoopback {
    /// Delays each packet by `delay`; a round trip takes twice as long.
    #[must_use]
    pub fn slow(delay: Duration) -> Self {
        let delay = format!("{}us", delay.as_micros());
        // The default limit is 1,000 packets.
        Self::with(&["delay", &delay, "limit", "100000"])
    }

    /// Loses each packet, and tells neither end.
    #[must_use]
    pub fn silent() -> Self {
        Self::with(&["loss", "100%"])
    }

    fn with(treatment: &[&str]) -> Self {
        super::enter();
        super::modprobe("sch_netem", &[]);
        let add = ["tc", "qdisc", "add", "dev", "lo", "root", "netem"];
        super::run(&[&add[..], treatment].concat());
        Self(())
    }
}

impl Drop for ImpairedLoopback {
    fn drop(&mut self) {
        super::run(&["tc", "qdisc", "del", "dev", "lo", "root"]);
    }
}
