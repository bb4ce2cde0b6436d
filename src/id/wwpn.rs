//! The name of a Fibre Channel port.

use std::fmt;
use std::str::FromStr;

use super::text::ParseIdError;

/// The world-wide name of a Fibre Channel port.
///
/// It prints as sysfs does, `0x50014380186b6e1c`. It parses that spelling, the bare 16 hex
/// digits, and pairs of digits with colons between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Wwpn(pub u64);

impl fmt::Display for Wwpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.0)
    }
}

impl FromStr for Wwpn {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let parse = || {
            let pairs: Vec<&str> = text.split(':').collect();
            let joined = (pairs.len() == 8 && pairs.iter().all(|pair| pair.len() == 2))
                .then(|| pairs.concat());
            let hex = match &joined {
                Some(hex) => hex,
                None => text.strip_prefix("0x").unwrap_or(text),
            };
            let is_hex = hex.len() == 16 && hex.bytes().all(|b| b.is_ascii_hexdigit());
            is_hex.then(|| u64::from_str_radix(hex, 16).ok())?.map(Self)
        };
        parse().ok_or_else(|| {
            ParseIdError::new(
                "a Fibre Channel port's name",
                "16 hex digits, bare, after 0x, or in pairs with colons between",
                text,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_is_the_same_name() {
        for text in [
            "0x200000109b1234ff",
            "0x200000109B1234FF",
            "200000109b1234ff",
            "20:00:00:10:9b:12:34:FF",
        ] {
            let name: Wwpn = text.parse().unwrap();
            assert_eq!(name, Wwpn(0x2000_0010_9b12_34ff), "{text}");
            assert_eq!(name.to_string(), "0x200000109b1234ff");
        }
        assert_eq!(Wwpn(1).to_string(), "0x0000000000000001");
    }

    #[test]
    fn what_is_no_such_name_is_refused() {
        for text in [
            "",
            "0x",
            "0x200000109b1234f",
            "0x200000109b1234ff0",
            "0X200000109b1234ff",
            "+00000109b1234ff0",
            "2000:0010:9b12:34ff",
            "20:00:00:10:9b:12:34",
            "2:000:00:10:9b:12:34:ff",
            "0x20:00:00:10:9b:12:34:ff",
        ] {
            assert!(text.parse::<Wwpn>().is_err(), "{text:?}");
        }
    }
}
