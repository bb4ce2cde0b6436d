//! The name of an iSCSI node.

use std::fmt;
use std::str::FromStr;

use super::ParseIdError;

/// In bytes (RFC 7143, 4.2.7.1).
const LONGEST: usize = 223;

/// The name of an iSCSI target or initiator: `iqn.YYYY-MM.DOMAIN[:TEXT]`,
/// `eui.` and 16 hex digits, or `naa.` and 16 or 32 hex digits.
///
/// At most 223 bytes of ASCII letters, digits, dash, dot and colon, in lower
/// case: what RFC 3722 makes of a name, so that two are equal when the protocol
/// takes them for the same. Names outside ASCII, which the RFC knows, are
/// refused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Iqn(String);

impl Iqn {
    /// The name, in lower case.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Iqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Iqn {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let name = text.to_ascii_lowercase();
        let kept = |b: u8| b.is_ascii_alphanumeric() || b"-.:".contains(&b);
        let is_name = name.len() <= LONGEST && name.bytes().all(kept);
        let has_form = match name.split_once('.') {
            Some(("iqn", rest)) => is_dated(rest),
            Some(("eui", hex)) => hex.len() == 16 && is_hex(hex),
            Some(("naa", hex)) => matches!(hex.len(), 16 | 32) && is_hex(hex),
            _ => false,
        };
        if is_name && has_form {
            return Ok(Self(name));
        }
        Err(ParseIdError::new(
            "an iSCSI name",
            "iqn.YYYY-MM.DOMAIN[:TEXT], eui. and 16 hex digits, or naa. and 16 or 32, in at most \
             223 ASCII letters, digits, dashes, dots and colons",
            text,
        ))
    }
}

/// `YYYY-MM.` and the domain of who named it (RFC 7143, 4.2.7.4).
fn is_dated(rest: &str) -> bool {
    let Some((date, name)) = rest.split_once('.') else {
        return false;
    };
    let Some((year, month)) = date.split_once('-') else {
        return false;
    };
    let month_is_one = month.len() == 2 && matches!(month.parse(), Ok(1..=12_u8));
    let year_is_one = year.len() == 4 && year.bytes().all(|b| b.is_ascii_digit());
    let domain = name.split(':').next().unwrap_or_default();
    year_is_one && month_is_one && !domain.is_empty()
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_same_in_upper_case() {
        let name: Iqn = "IQN.2000-01.com.Synology:Box.Target-1".parse().unwrap();
        assert_eq!(name.as_str(), "iqn.2000-01.com.synology:box.target-1");
        for text in [
            "eui.02004567A425678D",
            "naa.52004567BA64678D",
            "naa.62004567BA64678D0123456789ABCDEF",
            "iqn.2001-12.org",
        ] {
            let name: Iqn = text.parse().unwrap();
            assert_eq!(name.to_string(), text.to_ascii_lowercase());
        }
    }

    #[test]
    fn what_the_rfc_takes_for_no_name_is_none() {
        for text in [
            "",
            "iqn.",
            "iqn.2003-01",
            "iqn.2003-01.",
            "iqn.2003-01.:disk",
            "iqn.2003-1.org",
            "iqn.2003-13.org",
            "iqn.2003-+1.org",
            "iqn.203-01.org",
            "iqn.2003-01.org:a_b",
            "iqn.2003-01.org:a/b",
            "iqn.2003-01.org:a b",
            "iqn.2003-01.org:a\n",
            "iqn.2003-01.org:\u{e9}",
            "eui.02004567A425678",
            "eui.02004567A425678G",
            "naa.52004567BA64678D0",
            "wwn.52004567BA64678D",
        ] {
            assert!(text.parse::<Iqn>().is_err(), "{text:?}");
        }
        let longest = format!("iqn.2003-01.org:{}", "x".repeat(223 - 16));
        assert!(longest.parse::<Iqn>().is_ok());
        assert!(format!("{longest}x").parse::<Iqn>().is_err());
    }
}
