//! The answers of a node to opens, flushes and SCSI commands.

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::array::Address;
use super::{Kernel, State};

const INQUIRY: u8 = 0x12;
const TEST_UNIT_READY: u8 = 0x00;
const READ_CAPACITY_10: u8 = 0x25;
const SERVICE_ACTION_IN_16: u8 = 0x9e;
const REPORT_LUNS: u8 = 0xa0;
const MAINTENANCE_IN: u8 = 0xa3;
const REPORT_TARGET_PORT_GROUPS: u8 = 0x0a;

const CHECK_CONDITION: u8 = 0x02;
/// `DID_NO_CONNECT` and `DID_TIME_OUT` of the kernel.
const NO_CONNECTION: u16 = 0x01;
const TIMED_OUT: u16 = 0x03;

/// How a command ended.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) data: Vec<u8>,
    pub(crate) status: u8,
    pub(crate) host_status: u16,
    pub(crate) sense: Vec<u8>,
}

impl Answer {
    fn good(data: Vec<u8>) -> Self {
        Self {
            data,
            ..Self::default()
        }
    }

    /// ILLEGAL REQUEST with this additional sense code, in fixed format.
    fn refused(code: u8) -> Self {
        let mut sense = vec![0; 18];
        (sense[0], sense[2], sense[7], sense[12]) = (0x70, 0x05, 10, code);
        Self {
            status: CHECK_CONDITION,
            sense,
            ..Self::default()
        }
    }

    fn lost(host_status: u16) -> Self {
        Self {
            host_status,
            ..Self::default()
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        self.status == 0 && self.host_status == 0
    }
}

const LOGICAL_UNIT_NOT_SUPPORTED: u8 = 0x25;
const INVALID_FIELD: u8 = 0x24;
const INVALID_COMMAND: u8 = 0x20;

impl Kernel {
    /// The disk's address, by the number of its instance.
    fn disk_of_life(state: &State, life: u64) -> Result<Address, Errno> {
        let is_it = |device: &super::Device| device.disk.as_ref().is_some_and(|it| it.life == life);
        let mut devices = state.devices.iter();
        let found = devices.find_map(|(address, device)| is_it(device).then_some(*address));
        found.ok_or(Errno::ENXIO)
    }

    /// Opens a node (`drivers/scsi/sd.c`, `sd_open`); an offline device refuses.
    pub(super) fn open(&self, life: u64) -> Result<(), Errno> {
        let state = self.state();
        let address = Self::disk_of_life(&state, life)?;
        match &*state.devices[&address].state {
            "running" => Ok(()),
            _ => Err(Errno::ENXIO),
        }
    }

    /// `fsync` of a node: it writes dirty pages, and then sends SYNCHRONIZE CACHE.
    pub(super) fn sync(&self, life: u64) -> Result<(), Errno> {
        let state = self.state();
        let address = Self::disk_of_life(&state, life).map_err(|_| Errno::EIO)?;
        let (mut state, answered) = self.is_answered(state);
        state.acts.push(format!("flush {address}"));
        let runs = state
            .devices
            .get(&address)
            .is_some_and(|device| device.state == "running");
        let unit = state.units.get_mut(&address);
        let failure = unit.map_or(Some((Errno::EIO, 1)), |unit| {
            let was_dirty = std::mem::take(&mut unit.is_dirty);
            let fails = (was_dirty && unit.fails_writes) || !unit.serves_io();
            fails.then_some(unit.flush_failure)
        });
        drop(state);
        let failure = failure.or_else(|| (!runs || !answered).then_some((Errno::EIO, 1)));
        let Some((error, answers)) = failure else {
            return Ok(());
        };
        for _ in 0..answers {
            self.count_error(address);
        }
        Err(error)
    }

    /// `sync_file_range` of a node.
    pub(super) fn write_pages(&self, life: u64) -> Result<(), Errno> {
        let mut state = self.state();
        let address = Self::disk_of_life(&state, life).map_err(|_| Errno::EIO)?;
        let runs = state
            .devices
            .get(&address)
            .is_some_and(|device| device.state == "running");
        let unit = state.units.get_mut(&address);
        let fails = unit.is_none_or(|unit| {
            let was_dirty = std::mem::take(&mut unit.is_dirty);
            was_dirty && (unit.fails_writes || !unit.serves_io() || !runs)
        });
        if fails {
            // The flush ends here, like an `fsync` whose writes fail.
            state.acts.push(format!("flush {address}"));
        }
        drop(state);
        if fails {
            self.count_error(address);
            return Err(Errno::EIO);
        }
        Ok(())
    }

    /// Writes to a node; the data stays in the node's page cache.
    pub(crate) fn write_to(&self, node: &std::path::Path) {
        self.change(|state| {
            let is_it = |device: &super::Device| {
                let disk = device.disk.as_ref();
                disk.is_some_and(|disk| node.ends_with(disk.name()))
            };
            let mut devices = state.devices.iter();
            let (address, _) = devices.find(|(_, device)| is_it(device)).unwrap();
            let address = *address;
            state.units.get_mut(&address).unwrap().is_dirty = true;
        });
    }

    /// `BLKFLSBUF`.
    pub(super) fn drop_pages(&self, life: u64) -> Result<(), Errno> {
        Self::disk_of_life(&self.state(), life).map(drop)
    }

    /// `SG_IO` with a command that reads.
    pub(super) fn command(&self, life: u64, cdb: &[u8], length: usize) -> Result<Answer, Errno> {
        let state = self.state();
        let address = Self::disk_of_life(&state, life)?;
        let (mut state, answered) = self.is_answered(state);
        if cdb.first() == Some(&MAINTENANCE_IN) {
            state.acts.push(format!("port groups {address}"));
        }
        let runs = state
            .devices
            .get(&address)
            .is_some_and(|device| device.state == "running");
        let mut answer = if !answered {
            Answer::lost(TIMED_OUT)
        } else if runs {
            answer(&state, address, cdb)
        } else {
            Answer::lost(NO_CONNECTION)
        };
        drop(state);
        answer.data.truncate(length);
        if !answer.is_good() {
            self.count_error(address);
        }
        Ok(answer)
    }
}

/// The target's answer.
fn answer(state: &State, address: Address, cdb: &[u8]) -> Answer {
    let at = |index: usize| cdb.get(index).copied().unwrap_or_default();
    let unit = state.units.get(&address);
    match (at(0), unit) {
        (REPORT_LUNS, _) => report_luns(state, address),
        // Most targets answer INQUIRY also for LUNs that they do not have.
        (INQUIRY, None) if !state.refuses_inquiry => {
            Answer::good([vec![0x7f], vec![0; 35]].concat())
        }
        (_, None) => Answer::refused(LOGICAL_UNIT_NOT_SUPPORTED),
        (INQUIRY, Some(unit)) if at(1) & 1 == 0 => Answer::good(unit.standard_inquiry()),
        (INQUIRY, Some(unit)) => match at(2) {
            0x83 => Answer::good(unit.page_83()),
            0x80 => Answer::good(unit.page_80()),
            _ => Answer::refused(INVALID_FIELD),
        },
        (MAINTENANCE_IN, Some(unit)) if at(1) & 0x1f == REPORT_TARGET_PORT_GROUPS => {
            report_port_groups(unit)
        }
        (TEST_UNIT_READY, Some(_)) => Answer::default(),
        (SERVICE_ACTION_IN_16, Some(unit)) => {
            let mut data = (unit.bytes / 512 - 1).to_be_bytes().to_vec();
            data.extend(512_u32.to_be_bytes());
            data.resize(32, 0);
            Answer::good(data)
        }
        (READ_CAPACITY_10, Some(unit)) => {
            let last = u32::try_from(unit.bytes / 512 - 1).unwrap_or(u32::MAX);
            Answer::good([last.to_be_bytes(), 512_u32.to_be_bytes()].concat())
        }
        _ => Answer::refused(INVALID_COMMAND),
    }
}

/// The group of the unit's own port, after the group of another port, which is unavailable.
fn report_port_groups(unit: &super::Unit) -> Answer {
    let Some((number, state)) = unit.port_group else {
        return Answer::refused(INVALID_COMMAND);
    };
    let [high, low] = number.to_be_bytes();
    let other = [3, 0x0f, 0xff, 0xfe, 0, 0, 0, 0];
    let own = [state, 0x0f, high, low, 0, 0, 0, 0];
    Answer::good([&[0, 0, 0, 16][..], &other, &own].concat())
}

fn report_luns(state: &State, address: Address) -> Answer {
    let of_target = |other: &&Address| {
        (other.host, other.channel, other.target) == (address.host, address.channel, address.target)
    };
    let luns: Vec<u8> = state
        .units
        .keys()
        .filter(of_target)
        .flat_map(|address| {
            // The kernel's LUN has the first two bytes in its low bits.
            let number = u16::try_from(address.lun).unwrap_or(u16::MAX);
            let [high, low] = number.to_be_bytes();
            [high, low, 0, 0, 0, 0, 0, 0]
        })
        .collect();
    let length = u32::try_from(luns.len()).unwrap().to_be_bytes();
    Answer::good([length.to_vec(), vec![0; 4], luns].concat())
}
