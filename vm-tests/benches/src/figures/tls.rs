//! The speed and the cost of TLS for a device.

use serde::{Deserialize, Serialize};

use super::Series;

/// One NBD device without TLS, with the kernel's TLS, and with a proxy's TLS.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tls {
    /// How often each figure was taken.
    pub rounds: usize,
    /// Each way, in the order in which a reader compares them.
    pub ways: Vec<TlsWay>,
}

/// One way to attach the device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TlsWay {
    /// Its name for a reader.
    pub way: String,
    /// Its loads.
    pub loads: Vec<TlsLoad>,
}

/// Requests of one kind and size, one after the other.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TlsLoad {
    /// Its name for a reader.
    pub load: String,
    /// In MiB a second.
    pub throughput: Series,
    /// Processor time of the whole machine for one GiB, in seconds: kernel, proxy, server
    /// and all.
    pub cpu: Series,
}
