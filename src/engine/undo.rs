//! Taking back what an attach brought in.

use super::Engine;
use super::phases::Phases;
use crate::deadline::Deadline;
use crate::error::Error;
use crate::scsi::ScsiDevice;
use crate::uevent::Watch;

/// Takes the device down and returns `error`, which says so where that failed
/// too.
pub(super) fn device(
    engine: &Engine,
    error: Error,
    device: &ScsiDevice,
    watch: &mut Watch,
    phases: &mut Phases,
    deadline: Deadline,
) -> Error {
    tracing::info!(%error, "taking the device down again");
    match engine.take_down(device, watch, phases, deadline) {
        Ok(_) => error,
        Err(failure) => {
            let stands = format!(
                "the device {} was brought in and could not be taken down again: {failure}",
                device.hctl()
            );
            error.with_last_seen(stands)
        }
    }
}
