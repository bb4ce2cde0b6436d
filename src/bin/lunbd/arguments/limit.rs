//! How long a command may take, as the user writes it.

use std::time::Duration;

pub(super) fn limit(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{error}: expected a number and a unit, as in 500ms, 30s or 2m"))
}
