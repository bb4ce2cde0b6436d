//! The cost of one attach and one detach beside other attached devices.

use serde::{Deserialize, Serialize};

use super::Series;

/// One more device beside several numbers of other devices.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Scale {
    /// How often each figure was taken.
    pub rounds: usize,
    /// Each way, with its figures beside more and more other devices.
    pub ways: Vec<ScaleWay>,
}

/// One way to attach one more device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ScaleWay {
    /// Its name for a reader.
    pub way: String,
    /// The figures, the fewest other devices first.
    pub beside: Vec<Beside>,
}

/// The figures beside one number of other devices.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Beside {
    /// The number of other devices that are attached.
    pub others: u32,
    /// The cost of one attach.
    pub attach: Call,
    /// The cost of one detach.
    pub detach: Call,
}

/// The cost of one call. The system calls are counted in rounds that are not timed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Call {
    /// From the call to its return, in milliseconds.
    pub wall_ms: Series,
    /// The system calls of the process and of its children.
    pub syscalls: Series,
}

impl Beside {
    /// The system calls of an attach and a detach.
    #[must_use]
    pub fn syscalls(&self) -> f64 {
        self.attach.syscalls.median + self.detach.syscalls.median
    }

    /// The time of an attach and a detach.
    #[must_use]
    pub fn wall_ms(&self) -> f64 {
        self.attach.wall_ms.median + self.detach.wall_ms.median
    }
}
