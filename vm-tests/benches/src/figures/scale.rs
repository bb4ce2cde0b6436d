//! What one attach and one detach cost beside others that are attached.

use serde::{Deserialize, Serialize};

use super::Series;

/// One more device beside several numbers of others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Scale {
    /// How often each figure was taken.
    pub rounds: usize,
    /// Each way, with its figures beside ever more others.
    pub ways: Vec<ScaleWay>,
}

/// One way to attach one more.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ScaleWay {
    /// Its name for a reader.
    pub way: String,
    /// The fewest others first.
    pub beside: Vec<Beside>,
}

/// The figures beside one number of others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Beside {
    /// How many others are attached.
    pub others: u32,
    /// Of one attach.
    pub attach: Call,
    /// Of one detach.
    pub detach: Call,
}

/// What one call costs. The system calls are counted in rounds that are not timed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Call {
    /// From the call to its return, in milliseconds.
    pub wall_ms: Series,
    /// The calls of the process and of its children.
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
