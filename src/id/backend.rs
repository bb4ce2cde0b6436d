//! The name by which an attach finds an NBD device again.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use super::text::ParseIdError;

/// The longest id in bytes. The kernel has no limit of its own, and prints the id into one
/// page of sysfs without a check (`drivers/block/nbd.c`, `backend_show`).
const LONGEST: usize = 255;

/// A text that the kernel stores with a connected NBD device and demands again at each
/// reconnection (`NBD_ATTR_BACKEND_IDENTIFIER`, Linux 5.14): 1 to 255 printable ASCII
/// characters. Unlike the device's index, it names the backing volume across restarts of
/// server and client.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackendId(String);

impl BackendId {
    /// The longest id in characters.
    pub(crate) const LONGEST: usize = LONGEST;

    /// Makes an id from the source of the device, such as an NBD URI. The same text gives
    /// the same id in every version of this crate. A printable text without blanks, such as
    /// a URI, is its own id. A text longer than 255 becomes its beginning and a hash of the
    /// whole. Other bytes are percent-encoded.
    #[must_use]
    pub fn derived(source: &str) -> Self {
        const HASHED: usize = LONGEST - 17;
        let mut text = String::with_capacity(source.len().min(LONGEST));
        for byte in source.bytes() {
            if byte.is_ascii_graphic() {
                text.push(char::from(byte));
            } else {
                let _ = write!(text, "%{byte:02X}");
            }
        }
        if text.is_empty() || text.len() > LONGEST {
            // The text is pure ASCII, so every index is a character boundary.
            text.truncate(HASHED);
            let _ = write!(text, "#{:016x}", fnv1a(source));
        }
        Self(text)
    }

    /// A number that stands for the id in a file's name, where the text cannot.
    pub(crate) fn digest(&self) -> u64 {
        fnv1a(&self.0)
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// FNV-1a. std's hasher does not promise the same result in every version, and these ids
/// need it.
pub(super) fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl fmt::Display for BackendId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for BackendId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        // sysfs ends its attributes with a newline, so an id with a blank at either end
        // would not read back unchanged.
        let plain = |b: u8| b.is_ascii_graphic() || b == b' ';
        let fits = (1..=LONGEST).contains(&text.len());
        if fits && text.bytes().all(plain) && text.trim() == text {
            return Ok(Self(text.to_owned()));
        }
        Err(ParseIdError::new(
            "a backend id",
            "1 to 255 printable ASCII characters with no blank at either end",
            text,
        ))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_uri_is_its_own_id() {
        let uri = "nbd+unix:///vol%201?socket=/run/a.sock";
        assert_eq!(BackendId::derived(uri).as_str(), uri);
        assert_eq!(BackendId::derived("a\u{e9} ").as_str(), "a%C3%A9%20");
    }

    #[test]
    fn two_long_texts_that_begin_alike_stay_two() {
        let text = "x".repeat(300);
        let one = BackendId::derived(&format!("{text}1"));
        let two = BackendId::derived(&format!("{text}2"));
        assert_ne!(one, two);
        assert_eq!(one.as_str().len(), LONGEST);
        // The literal is a fixture: a later version must find today's devices.
        assert_eq!(BackendId::derived("").as_str(), "#cbf29ce484222325");
    }

    #[test]
    fn what_sysfs_could_not_give_back_is_no_id() {
        for text in ["", " a", "a ", "a\nb", "a\0", "\u{e9}", &"x".repeat(256)] {
            assert!(text.parse::<BackendId>().is_err(), "{text:?}");
        }
        assert!("x".repeat(255).parse::<BackendId>().is_ok());
        assert!("vol 1".parse::<BackendId>().is_ok());
    }

    proptest! {
        #[test]
        fn every_derived_id_is_an_id(source: String) {
            let id = BackendId::derived(&source);
            prop_assert_eq!(id.to_string().parse::<BackendId>(), Ok(id));
        }
    }
}
