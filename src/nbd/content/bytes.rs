//! Fields of the first bytes of a volume. Each read checks the end first.

/// The first bytes of a volume. A field behind their end reads as missing.
#[derive(Clone, Copy)]
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl<'a> Bytes<'a> {
    pub(super) fn array<const N: usize>(self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..)?.first_chunk().copied()
    }

    pub(super) fn has(self, at: usize, magic: &[u8]) -> bool {
        self.from(at)
            .is_some_and(|bytes| bytes.0.starts_with(magic))
    }

    pub(super) fn from(self, at: usize) -> Option<Self> {
        self.0.get(at..).map(Bytes)
    }

    /// The text up to the first zero byte.
    pub(super) fn text(self, at: usize, length: usize) -> Option<&'a str> {
        let field = self.0.get(at..)?.get(..length)?;
        let end = field.iter().position(|byte| *byte == 0);
        std::str::from_utf8(field.get(..end.unwrap_or(length))?).ok()
    }
}
