//! Decodes what a server announces about its exports.

use super::wire::{self, Fields};
use crate::error::{Error, Result, escape_untrusted};
use crate::nbd::block_size::BlockSizes;
use crate::nbd::export::Export;
use crate::nbd::violation::violation;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// The infos that came before the ACK to `OPT_GO` or `OPT_INFO`.
#[derive(Debug, Default)]
pub(super) struct Infos {
    /// The size in bytes and the transmission flags.
    export: Option<(u64, u16)>,
    block_sizes: Option<BlockSizes>,
}

impl Infos {
    /// Decodes one info, and skips a kind that it does not need, such as a
    /// description.
    pub(super) fn add(&mut self, payload: &[u8]) -> Result<()> {
        if payload.len() < 2 {
            return Err(violation("length of an info", payload.len(), "at least 2"));
        }
        let mut fields = Fields(payload);
        match fields.u16() {
            INFO_EXPORT => {
                if payload.len() != 12 {
                    return Err(violation("length of INFO_EXPORT", payload.len(), "12"));
                }
                once(self.export.is_some(), "INFO_EXPORT")?;
                self.export = Some((fields.u64(), fields.u16()));
            }
            INFO_BLOCK_SIZE => {
                if payload.len() != 14 {
                    return Err(violation("length of INFO_BLOCK_SIZE", payload.len(), "14"));
                }
                once(self.block_sizes.is_some(), "INFO_BLOCK_SIZE")?;
                let sizes = BlockSizes::new(fields.u32(), fields.u32(), fields.u32())?;
                self.block_sizes = Some(sizes);
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks at the ACK that all required infos came.
    pub(super) fn finish(self, name: &str, ack: &[u8]) -> Result<Export> {
        wire::empty_ack(ack)?;
        let Some((size, flags)) = self.export else {
            return Err(violation(
                "ACK to OPT_GO or OPT_INFO",
                "the first reply",
                "INFO_EXPORT before it",
            ));
        };
        Export::new(name, size, flags, self.block_sizes)
    }
}

fn once(came_before: bool, info: &str) -> Result<()> {
    if came_before {
        return Err(violation(info, "said twice", "it once"));
    }
    Ok(())
}

/// Decodes one entry of a list: the name's length, the name, and text for
/// people.
pub(super) fn listed(payload: &[u8]) -> Result<ListedExport> {
    let not_text = |_| -> Error { violation("name of a listed export", "not UTF-8", "UTF-8") };
    if payload.len() < 4 {
        let expected = "at least 4";
        return Err(violation(
            "length of a listed export",
            payload.len(),
            expected,
        ));
    }
    let mut fields = Fields(payload);
    let length = usize::try_from(fields.u32()).unwrap_or(usize::MAX);
    let name = fields.0.split_at_checked(length);
    let Some((name, description)) = name.filter(|_| length <= LONGEST_NAME) else {
        let expected = "at most 4096 and within its reply";
        return Err(violation(
            "length of a listed export's name",
            length,
            expected,
        ));
    };
    Ok(ListedExport {
        name: String::from_utf8(name.to_vec()).map_err(not_text)?,
        description: (!description.is_empty()).then(|| escape_untrusted(description)),
    })
}

/// The protocol's limit for strings.
pub(super) const LONGEST_NAME: usize = 4096;

/// One export in a server's list.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ListedExport {
    /// The export's name. It is free text and may hold control characters, so
    /// show it with `{:?}`.
    pub name: String,
    /// The server's description, escaped and cut for display; `None` if it sent
    /// none.
    pub description: Option<String>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    const EXPORT: &[u8] = b"\0\0\0\0\0\0\0\0\x10\0\0\x05";
    const SIZES: &[u8] = b"\0\x03\0\0\x02\0\0\0\x10\0\0\x10\0\0";

    fn infos(payloads: &[&[u8]]) -> Result<Export> {
        let mut infos = Infos::default();
        for payload in payloads {
            infos.add(payload)?;
        }
        infos.finish("a", b"")
    }

    #[test]
    fn the_export_is_what_the_infos_say_in_any_order() {
        for order in [[EXPORT, SIZES, b"\0\x01name"], [SIZES, b"\x12\x34", EXPORT]] {
            let export = infos(&order).unwrap();
            assert_eq!((export.size, export.flags.bits()), (4096, 5));
            let sizes = BlockSizes::new(512, 4096, 1 << 20).unwrap();
            assert_eq!(export.block_sizes, Some(sizes));
        }
        assert_eq!(infos(&[EXPORT]).unwrap().block_sizes, None);
    }

    #[test]
    fn the_info_that_breaks_the_protocol_is_named() {
        let short = |info: &'static [u8]| &info[..info.len() - 1];
        let long = [SIZES, b"x"].concat();
        let small_maximum = b"\0\x03\0\0\x02\0\0\0\x10\0\0\0\x0f\xff";
        for (payloads, field) in [
            (vec![short(EXPORT)], "length of INFO_EXPORT"),
            (vec![EXPORT, EXPORT], "INFO_EXPORT is said twice"),
            (vec![short(SIZES)], "length of INFO_BLOCK_SIZE"),
            (vec![&long], "length of INFO_BLOCK_SIZE"),
            (vec![SIZES, SIZES], "INFO_BLOCK_SIZE is said twice"),
            (vec![EXPORT, b"\0"], "length of an info"),
            (vec![SIZES], "ACK to OPT_GO"),
            (vec![], "ACK to OPT_GO"),
            (vec![small_maximum, EXPORT], "maximum block size"),
        ] {
            let error = infos(&payloads).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    #[test]
    fn an_ack_that_says_something_is_refused() {
        let mut infos = Infos::default();
        infos.add(EXPORT).unwrap();
        let error = infos.finish("a", b"x").unwrap_err();
        assert!(error.to_string().contains("length of an ACK"), "{error}");
    }

    #[test]
    fn a_listed_export_has_a_name_and_perhaps_a_description() {
        let one = listed(b"\0\0\0\x02ab").unwrap();
        assert_eq!((one.name.as_str(), one.description), ("ab", None));
        let one = listed(b"\0\0\0\0for\x1b[31m you").unwrap();
        assert_eq!(one.name, "");
        assert_eq!(one.description.as_deref(), Some(r"for\u{1b}[31m you"));
    }

    #[test]
    fn a_listed_export_that_breaks_the_protocol_is_refused() {
        let long = [&4097_u32.to_be_bytes()[..], &[b'a'; 4097]].concat();
        for payload in [
            &b"\0\0\0"[..],
            b"\0\0\0\x02a",
            b"\xff\xff\xff\xffa",
            &long,
            b"\0\0\0\x01\xff",
        ] {
            let error = listed(payload).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
    }

    proptest! {
        #[test]
        fn no_payload_panics(payloads: Vec<Vec<u8>>) {
            let payloads: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
            let _ = infos(&payloads);
            for payload in payloads {
                let _ = listed(payload);
            }
        }

        #[test]
        fn what_a_server_writes_is_read(size in 1..1_u64 << 63, flags: u16, low in 0..=16_u32, more in 0..15_u32) {
            let (minimum, preferred) = (1_u32 << low, 1_u32 << (low + more));
            let export = [&[0, 0][..], &size.to_be_bytes(), &(flags | 1).to_be_bytes()].concat();
            let sizes = [minimum, preferred, u32::MAX].map(u32::to_be_bytes).concat();
            let sizes = [&[0, 3][..], &sizes].concat();
            let read = infos(&[&export, &sizes]).unwrap();
            prop_assert_eq!(read.size, size);
            prop_assert_eq!(read.flags.bits(), (flags | 1) & 0x017f);
            prop_assert_eq!(read.block_sizes, BlockSizes::new(minimum, preferred, u32::MAX).ok());
        }
    }
}
