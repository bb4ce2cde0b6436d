//! An export: what a server serves under one name.

use bitflags::bitflags;

use super::block_size::{BlockSizes, Geometry};
use super::violation::violation;
use crate::error::{Error, ErrorKind, Result, Stage};

bitflags! {
    /// What the server announces for an export: the transmission flags that the
    /// kernel's client knows (`include/uapi/linux/nbd.h`). `NBD_ATTR_SERVER_FLAGS`
    /// takes the same bits.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct ExportFlags: u16 {
        /// The server always sets this flag.
        const HAS_FLAGS = 1 << 0;
        /// The server refuses writes.
        const READ_ONLY = 1 << 1;
        /// The server can flush its cache. Without it the kernel considers a write
        /// durable as soon as it is answered.
        const SEND_FLUSH = 1 << 2;
        /// The server can make a single write durable.
        const SEND_FUA = 1 << 3;
        /// Seeking is slow.
        const ROTATIONAL = 1 << 4;
        /// The server can discard ranges.
        const SEND_TRIM = 1 << 5;
        /// The server can zero ranges without receiving the zeroes.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// Several connections see one cache, so the kernel may spread I/O over them.
        const CAN_MULTI_CONN = 1 << 8;
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for ExportFlags {
    /// The names of the flags, in lower case.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let names = self.iter_names().map(|(name, _)| name.to_ascii_lowercase());
        serializer.collect_seq(names)
    }
}

/// One export, as a server described it in a handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Export {
    /// The requested name.
    pub name: String,
    /// The size in bytes that the server announced. [`geometry`](Self::geometry)
    /// returns the size of the device.
    pub size: u64,
    /// What the server can do, without the flags that the kernel's client does not
    /// know.
    pub flags: ExportFlags,
    /// The accepted request sizes; `None` if the server announced none.
    pub block_sizes: Option<BlockSizes>,
}

impl Export {
    /// Takes `flags` as received.
    ///
    /// # Errors
    /// `Protocol`, with the field that no export can have.
    pub(super) fn new(
        name: &str,
        size: u64,
        flags: u16,
        block_sizes: Option<BlockSizes>,
    ) -> Result<Self> {
        let flags = ExportFlags::from_bits_truncate(flags);
        if !flags.contains(ExportFlags::HAS_FLAGS) {
            let found = format!("{:#06x}", flags.bits());
            return Err(violation(
                "transmission flags",
                found,
                "HAS_FLAGS to be set",
            ));
        }
        // The kernel's file offset is a signed number (loff_t).
        if size == 0 || i64::try_from(size).is_err() {
            let expected = "1 to 9223372036854775807 bytes";
            return Err(violation("export size", size, expected));
        }
        if let Some(sizes) = &block_sizes {
            sizes.check_maximum(size)?;
        }
        Ok(Self {
            name: name.to_owned(),
            size,
            flags,
            block_sizes,
        })
    }

    /// This export, marked read-only.
    #[must_use]
    pub(crate) fn made_read_only(mut self) -> Self {
        self.flags |= ExportFlags::READ_ONLY;
        self
    }

    /// Whether the server refuses writes.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.flags.contains(ExportFlags::READ_ONLY)
    }

    /// Whether the kernel may spread I/O over several connections.
    #[must_use]
    pub fn can_multi_conn(&self) -> bool {
        self.flags.contains(ExportFlags::CAN_MULTI_CONN)
    }

    /// The longest request that the server accepts, in bytes; the protocol's default
    /// if it announced none. The device's `queue/max_sectors_kb` must not be above
    /// it.
    #[must_use]
    pub fn maximum_payload(&self) -> u32 {
        self.block_sizes.unwrap_or_default().maximum
    }

    /// What the kernel gets for this export: the logical block size (`wanted`, or the
    /// server's minimum but at least 512 bytes) and the size in whole blocks. The
    /// kernel has pages of `page_size` bytes.
    ///
    /// # Errors
    /// `InvalidInput` if `wanted` is no power of two of at least 512 bytes;
    /// `NotSupported` if the server's minimum is above `wanted` or above a page,
    /// `wanted` is above a page, the server accepts no request of a whole page, or
    /// the export is smaller than one block.
    pub fn geometry(&self, page_size: u32, wanted: Option<u32>) -> Result<Geometry> {
        let sizes = self.block_sizes.unwrap_or_default();
        // block/blk-settings.c: a limit on requests cannot be lower.
        if sizes.maximum < page_size {
            let message = format!(
                "the NBD server takes requests of at most {} bytes, and the kernel sends no \
                 shorter ones than a page of {page_size} bytes: have the server take more",
                sizes.maximum
            );
            return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Handshake));
        }
        Geometry::choose(sizes, self.size, page_size, wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_the_kernel_does_not_know_are_masked() {
        let export = Export::new("a", 1, 0xffff, None).unwrap();
        assert_eq!(export.flags.bits(), 0x017f);
        assert!(export.read_only() && export.can_multi_conn());
    }

    #[test]
    fn what_no_export_can_have_is_named() {
        for (size, flags, field) in [
            (0, 1, "export size"),
            (1 << 63, 1, "export size"),
            (u64::MAX, 1, "export size"),
            (1, 0, "HAS_FLAGS"),
            (1, 0xfffe, "HAS_FLAGS"),
        ] {
            let error = Export::new("a", size, flags, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(field), "{error}");
        }
        assert!(Export::new("a", (1 << 63) - 1, 1, None).is_ok());
    }

    #[test]
    fn a_server_that_says_nothing_of_block_sizes_has_the_protocols_defaults() {
        let export = Export::new("a", 3 << 40, 1, None).unwrap();
        assert_eq!(export.geometry(4096, None).unwrap().block_size, 512);
        assert_eq!(export.maximum_payload(), 32 << 20);
    }

    #[test]
    fn a_server_that_takes_no_request_of_a_page_is_refused() {
        let sizes = |maximum| BlockSizes {
            minimum: 512,
            preferred: 512,
            maximum,
        };
        let export = |maximum| Export::new("a", 1 << 20, 1, Some(sizes(maximum))).unwrap();
        let error = export(2048).geometry(4096, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
        assert!(export(4096).geometry(4096, None).is_ok());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn flags_are_serialised_by_name() {
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::SEND_FUA;
        let json = serde_json::to_string(&flags).unwrap();
        assert_eq!(json, r#"["has_flags","send_fua"]"#);
    }
}
