//! The name of a network interface.

use std::fmt;
use std::str::FromStr;

use super::ParseIdError;

/// The name of a network interface of this machine, as `ip link` prints it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceName(String);

impl InterfaceName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for InterfaceName {
    type Err = ParseIdError;

    /// Accepts the names that the kernel accepts (`dev_valid_name` of `net/core/dev.c`):
    /// `IFNAMSIZ` is 16 bytes with the zero byte at the end.
    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let is_valid = (1..16).contains(&text.len())
            && !matches!(text, "." | "..")
            && !text.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace() || c == '\0');
        if is_valid {
            return Ok(Self(text.to_owned()));
        }
        let (what, expected) = (
            "the name of a network interface",
            "1 to 15 bytes without a slash, a colon and a blank",
        );
        Err(ParseIdError::new(what, expected, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_the_kernel_gives_no_interface_is_refused() {
        for name in ["eth0", "enp0s31f6", "bond0.100", "a23456789012345"] {
            assert_eq!(name.parse::<InterfaceName>().unwrap().to_string(), name);
        }
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "eth0:1",
            "a b",
            "a234567890123456",
            "a\0",
        ] {
            assert!(name.parse::<InterfaceName>().is_err(), "{name:?}");
        }
    }
}
