//! Durations as seconds, for serde's `serialize_with`.

use std::time::Duration;

use serde::{Serialize as _, Serializer};

/// Serialises a duration, or one that may be `None`.
pub(crate) fn as_seconds<S: Serializer>(
    time: &(impl Copy + Into<Option<Duration>>),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let time: Option<Duration> = (*time).into();
    time.map(|time| time.as_secs_f64()).serialize(serializer)
}
