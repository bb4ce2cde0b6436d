//! What sysfs shows of the whole machine.

use std::collections::{BTreeSet, HashMap};

use crate::error::{Error, ErrorKind, Result};
use crate::id::{Hctl, VolumeId, Wwid};
use crate::kernel::Roots;
use crate::nbd::NbdDevice;
use crate::scsi::{Identity, ScsiDevice, State};

/// What sysfs shows of the whole machine.
#[derive(Default)]
pub(super) struct SysfsSnapshot {
    pub(super) scsi: Vec<Scanned>,
    by_name: HashMap<Wwid, Vec<usize>>,
    pub(super) addresses: BTreeSet<Hctl>,
    pub(super) nbd: HashMap<String, Vec<NbdDevice>>,
    /// The volume to which a unit belongs, by a unique name of the unit.
    pub(super) owners: HashMap<Wwid, VolumeId>,
}

/// A SCSI device, and the identity that the kernel read at the scan.
pub(super) struct Scanned {
    pub(super) device: ScsiDevice,
    pub(super) identity: Identity,
    state: Option<State>,
    pub(super) runs: bool,
}

impl std::fmt::Display for Scanned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} was scanned as {}", self.device.hctl(), self.identity)?;
        match &self.state {
            Some(State::Running) => Ok(()),
            Some(state) => write!(f, " and is {state}"),
            None => f.write_str(" and shows no state"),
        }
    }
}

impl SysfsSnapshot {
    pub(super) fn read_scsi(&mut self, roots: &Roots) -> Result<()> {
        for device in ScsiDevice::all(roots)? {
            let read = || Ok::<_, Error>((device.cached_identity()?, device.state()?));
            let (identity, state) = match read() {
                Ok(read) => read,
                // The device goes away meanwhile, its attributes before its directory.
                Err(error) if error.kind() == ErrorKind::Vanished || !device.is_there() => continue,
                Err(error) => return Err(error),
            };
            for name in &identity.names {
                let named = self.by_name.entry(name.clone()).or_default();
                named.push(self.scsi.len());
            }
            self.addresses.insert(device.hctl());
            self.scsi.push(Scanned {
                device,
                identity,
                runs: state == Some(State::Running),
                state,
            });
        }
        Ok(())
    }

    pub(super) fn read_nbd(&mut self, roots: &Roots) -> Result<()> {
        for device in NbdDevice::all(roots)? {
            if device.pid()?.is_some()
                && let Some(backend) = device.backend()?
            {
                self.nbd.entry(backend).or_default().push(device);
            }
        }
        Ok(())
    }

    pub(super) fn named(&self, name: &Wwid) -> Vec<&Scanned> {
        let places = self.by_name.get(name).into_iter().flatten();
        places.filter_map(|&at| self.scsi.get(at)).collect()
    }

    pub(super) fn belongs_to_another(&self, identity: &Identity, volume: &VolumeId) -> bool {
        let owner = identity.wwid().and_then(|name| self.owners.get(name));
        owner.is_some_and(|owner| owner != volume)
    }
}
