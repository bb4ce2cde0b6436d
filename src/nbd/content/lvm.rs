//! The UUID of an LVM physical volume.
//!
//! lvm2, `lib/label/label.h` (`struct label_header`: one of the first four sectors begins
//! with `LABELONE`, has the offset of its content at byte 20, little-endian, and `LVM2 001`
//! at 24) and `lib/format_text/layout.h` (`struct pv_header`: the content begins with the
//! UUID, of 32 letters).

use super::bytes::Bytes;
use crate::id::ContentName;

pub(super) fn name(first: Bytes<'_>) -> Option<ContentName> {
    let labels = [0, 512, 1024, 1536].into_iter();
    let labels = labels.filter_map(|at| first.from(at));
    let mut labels = labels.filter(|label| label.has(0, b"LABELONE") && label.has(24, b"LVM2 001"));
    let label = labels.next()?;
    let offset = u32::from_le_bytes(label.array(20)?);
    ContentName::lvm(label.text(usize::try_from(offset).ok()?, 32)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_physical_volume_has_its_uuid_in_whichever_sector_its_label_is() {
        for at in [0, 512, 1024, 1536, 2048] {
            let mut bytes = vec![0; 4096];
            bytes[at..at + 8].copy_from_slice(b"LABELONE");
            bytes[at + 20] = 32;
            bytes[at + 24..at + 32].copy_from_slice(b"LVM2 001");
            bytes[at + 32..at + 64].copy_from_slice(b"AbcDef0123456789AbcdEFghIJklMNop");
            let name = name(Bytes(&bytes)).map(|name| name.to_string());
            let expected = "lvm.AbcDef-0123-4567-89Ab-cdEF-ghIJ-klMNop";
            assert_eq!(name.as_deref(), (at < 2048).then_some(expected), "{at}");
            bytes[at + 20..at + 24].copy_from_slice(&[0xff; 4]);
            assert_eq!(super::name(Bytes(&bytes)), None, "{at}");
        }
    }
}
