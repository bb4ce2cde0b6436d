//! Extracts the ELF kernel from a bzImage, so that the guest need not do it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::decompress;

/// Offsets from the kernel's Documentation/arch/x86/boot.rst.
const SETUP_SECTS: usize = 0x1f1;
const HEADER_MAGIC: usize = 0x202;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR: usize = 512;

/// The compressed kernel inside the image.
#[derive(Debug, PartialEq, Eq)]
struct Payload<'image> {
    compressed: &'image [u8],
    /// The kernel's build appends the size for every format but gzip, which
    /// has it inside.
    size: u32,
}

/// Writes the ELF kernel inside the bzImage `image` to `vmlinux`.
pub(crate) fn extract(image: &Path, vmlinux: &Path) -> Result<()> {
    let content = fs::read(image).with_context(|| image.display().to_string())?;
    let payload = payload(&content).with_context(|| image.display().to_string())?;
    let compressed = vmlinux.with_extension("compressed");
    fs::write(&compressed, payload.compressed)?;
    let kernel = decompress::read(&compressed)?;
    fs::remove_file(&compressed)?;
    if !kernel.starts_with(b"\x7fELF") || kernel.len() != payload.size as usize {
        bail!(
            "{}: the payload is not the ELF kernel that its header announces",
            image.display()
        );
    }
    fs::write(vmlinux, kernel).with_context(|| vmlinux.display().to_string())
}

fn payload(image: &[u8]) -> Result<Payload<'_>> {
    if image.get(HEADER_MAGIC..HEADER_MAGIC + 4) != Some(b"HdrS") {
        bail!("not a bzImage");
    }
    // 0 means 4, in images older than the field.
    let setup_sectors = match image[SETUP_SECTS] {
        0 => 4,
        count => usize::from(count),
    };
    let start = (setup_sectors + 1) * SECTOR + u32_at(image, PAYLOAD_OFFSET)? as usize;
    let length = u32_at(image, PAYLOAD_LENGTH)? as usize;
    let whole = image
        .get(start..start + length)
        .context("the payload ends after the image")?;
    let size_at = whole.len().checked_sub(4).context("the payload is empty")?;
    let size = u32_at(whole, size_at)?;
    let gzip = whole.starts_with(b"\x1f\x8b");
    Ok(Payload {
        compressed: if gzip { whole } else { &whole[..size_at] },
        size,
    })
}

fn u32_at(bytes: &[u8], offset: usize) -> Result<u32> {
    let field = bytes
        .get(offset..offset + 4)
        .context("the image is cut short")?;
    Ok(u32::from_le_bytes(field.try_into()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 3 * SECTOR + 16];
        image[SETUP_SECTS] = 2;
        image[HEADER_MAGIC..HEADER_MAGIC + 4].copy_from_slice(b"HdrS");
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&16u32.to_le_bytes());
        let length = u32::try_from(payload.len()).unwrap();
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn the_payload_is_where_the_setup_header_says() {
        let image = image(b"\x28\xb5\x2f\xfdkernel\x07\0\0\0");
        let found = payload(&image).unwrap();
        assert_eq!(
            found,
            Payload {
                compressed: b"\x28\xb5\x2f\xfdkernel",
                size: 7
            }
        );
        assert_eq!(
            decompress::program_for(found.compressed).unwrap()[0],
            "zstd"
        );
    }

    #[test]
    fn gzip_keeps_the_size_that_belongs_to_its_own_format() {
        let image = image(b"\x1f\x8bkernel\x07\0\0\0");
        assert_eq!(
            payload(&image).unwrap().compressed,
            b"\x1f\x8bkernel\x07\0\0\0"
        );
    }

    #[test]
    fn what_is_cut_short_or_no_kernel_is_refused() {
        assert!(payload(b"MZ").is_err());
        let whole = image(b"\x28\xb5\x2f\xfdkernel\x07\0\0\0");
        assert!(payload(&whole[..whole.len() - 1]).is_err());
    }
}
