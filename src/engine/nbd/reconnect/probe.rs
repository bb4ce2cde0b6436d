//! Whether a device serves I/O, and whether it is still connected.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::nbd::reconnect::{NbdReconnect, ProbeResult};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::nbd::{NewTimeouts, Reconfigure, Refusal};

impl NbdReconnect {
    /// Refuses a device that was disconnected while a process has it open. It stays
    /// configured until the last close, and the kernel takes no more connections for it
    /// (`drivers/block/nbd.c`, `nbd_disconnect_and_put`). Kernels before 6.14, and stable
    /// kernels without that fix, would take them.
    pub(super) fn require_configured(&self, engine: &Engine, deadline: Deadline) -> Result<()> {
        let asked = Reconfigure::new(self.index(), NewTimeouts::default())
            .backend(self.backend.clone())
            .send(engine.roots(), deadline);
        match asked {
            Err(error) if Refusal::of(&error) == Some(Refusal::GoingDown) => {
                let message = format!(
                    "nbd{} was disconnected and disappears when the last process closes it: it \
                     cannot be healed",
                    self.index()
                );
                let going = Error::new(ErrorKind::Vanished, message).at(Stage::Reconfigure);
                Err(going.caused_by(error))
            }
            asked => asked,
        }
    }

    pub(super) fn probe_io(&mut self, engine: &Engine, deadline: Deadline) -> Result<ProbeResult> {
        let probe = if let Some(probe) = self.probe.take() {
            probe
        } else {
            self.own_connections_had_ended = self.link_state(engine)?.is_dead();
            let begun = engine.nbd_reads.start(
                &self.device,
                engine.roots(),
                deadline,
                BlockDevice::read_first_block,
            )?;
            // The read of another caller waits as this one would.
            let Some(begun) = begun else {
                return Ok(ProbeResult::Waits);
            };
            begun
        };
        match probe.wait(deadline) {
            Some(Ok(())) => Ok(ProbeResult::Answers),
            Some(Err(error)) => {
                tracing::debug!(%error, "a read failed");
                self.require_connected()?;
                Ok(ProbeResult::Fails)
            }
            None => {
                self.probe = Some(probe);
                Ok(ProbeResult::Waits)
            }
        }
    }

    /// Checks that the device is still connected under its own id.
    /// Returns the thread that connected it.
    pub(super) fn require_connected(&self) -> Result<u32> {
        if let Some(connected_by) = self.device.pid()?
            && self.device.backend()?.as_deref() == Some(self.backend.as_str())
        {
            return Ok(connected_by);
        }
        let message = format!(
            "nbd{} is no longer connected under backend id {}",
            self.index(),
            self.backend
        );
        Err(Error::new(ErrorKind::Vanished, message).at(Stage::Reconfigure))
    }
}
