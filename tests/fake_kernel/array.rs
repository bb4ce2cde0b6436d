//! The logical units that the array presents, by address.

use std::fmt;
use std::str::FromStr;

use nix::errno::Errno;

/// `H:C:T:L`, as the kernel writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Address {
    pub(crate) host: u32,
    pub(crate) channel: u32,
    pub(crate) target: u32,
    pub(crate) lun: u64,
}

impl Address {
    /// A LUN of the only target of a host.
    pub(crate) fn of(host: u32, lun: u64) -> Self {
        Self {
            host,
            channel: 0,
            target: 0,
            lun,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            host,
            channel,
            target,
            lun,
        } = self;
        write!(f, "{host}:{channel}:{target}:{lun}")
    }
}

impl FromStr for Address {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut numbers = text.split(':').map(str::parse::<u64>);
        let mut next = || numbers.next().and_then(Result::ok).ok_or(());
        let narrow = |number| u32::try_from(number).map_err(drop);
        let address = Self {
            host: narrow(next()?)?,
            channel: narrow(next()?)?,
            target: narrow(next()?)?,
            lun: next()?,
        };
        numbers.next().is_none().then_some(address).ok_or(())
    }
}

/// One logical unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Its NAA designator, IEEE Registered (NAA 5).
    pub(crate) naa: u64,
    pub(crate) serial: String,
    pub(crate) product: String,
    pub(crate) bytes: u64,
    /// The peripheral device type: 0 is a disk.
    pub(crate) kind: u8,
    /// The page cache has pages of the disk that wait to be written.
    pub(crate) is_dirty: bool,
    /// Writes fail.
    pub(crate) fails_writes: bool,
    /// The kernel's error for a flush that fails, and how many commands it counts as failed.
    pub(crate) flush_failure: (Errno, usize),
    /// The number of the target port group of its port, and its ALUA access state.
    pub(crate) port_group: Option<(u16, u8)>,
}

impl Unit {
    /// A disk of 8 MiB; each number names another unit.
    pub(crate) fn disk(number: u64) -> Self {
        Self {
            naa: 0x5000_c500_0000_0000 | number,
            serial: format!("S{number:08}"),
            product: "fake disk".to_owned(),
            bytes: 8 << 20,
            kind: 0,
            is_dirty: false,
            fails_writes: false,
            flush_failure: (Errno::EIO, 1),
            port_group: None,
        }
    }

    /// Whether its port serves reads, writes and flushes.
    pub(super) fn serves_io(&self) -> bool {
        self.port_group.is_none_or(|(_, state)| state < 2)
    }

    /// The standard INQUIRY data.
    pub(crate) fn standard_inquiry(&self) -> Vec<u8> {
        let tpgs = if self.port_group.is_some() { 0x10 } else { 0 };
        let mut data = vec![self.kind, 0, 6, 2, 31, tpgs, 0, 0];
        data.extend(format!("lunbd   {:<16}0001", self.product).into_bytes());
        data
    }

    /// VPD page 83h.
    pub(crate) fn page_83(&self) -> Vec<u8> {
        let naa = self.naa.to_be_bytes();
        let t10 = format!("lunbd   {:<16}{}", self.product, self.serial);
        let mut page = vec![1, 3, 0, 8];
        page.extend(naa);
        page.extend([2, 1, 0, u8::try_from(t10.len()).unwrap()]);
        page.extend(t10.as_bytes());
        if let Some((number, _)) = self.port_group {
            let [high, low] = number.to_be_bytes();
            page.extend([1, 0x15, 0, 4, 0, 0, high, low]);
        }
        header(0x83, page)
    }

    /// VPD page 80h.
    pub(crate) fn page_80(&self) -> Vec<u8> {
        header(0x80, self.serial.clone().into_bytes())
    }
}

fn header(code: u8, page: Vec<u8>) -> Vec<u8> {
    let [high, low] = u16::try_from(page.len()).unwrap().to_be_bytes();
    [vec![0, code, high, low], page].concat()
}
