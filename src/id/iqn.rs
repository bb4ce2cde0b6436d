//! The name of an iSCSI node.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use super::text::ParseIdError;

/// The longest name in bytes (RFC 7143, 4.2.7.1).
const LONGEST: usize = 223;

/// The name of an iSCSI target or initiator: `iqn.YYYY-MM.DOMAIN[:TEXT]`,
/// `eui.` and 16 hex digits, or `naa.` and 16 or 32 hex digits.
///
/// A name has at most 223 bytes of ASCII letters, digits, dash, dot and colon. It keeps its
/// spelling, because some targets (LIO and tgt) compare bytes. Names that differ in case
/// alone are equal and have the same order and hash, as the protocol demands (RFC 3722).
/// Names outside ASCII, which the RFC allows, are refused.
#[derive(Debug, Clone)]
pub struct Iqn(String);

impl Iqn {
    /// The name as it was given.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name in lower case, which is the same for each spelling.
    #[must_use]
    pub fn to_lowercase(&self) -> String {
        self.0.to_ascii_lowercase()
    }

    fn folded(&self) -> impl Iterator<Item = u8> {
        self.0.bytes().map(|byte| byte.to_ascii_lowercase())
    }
}

impl PartialEq for Iqn {
    fn eq(&self, other: &Self) -> bool {
        self.0.eq_ignore_ascii_case(&other.0)
    }
}

impl Eq for Iqn {}

impl PartialOrd for Iqn {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Iqn {
    fn cmp(&self, other: &Self) -> Ordering {
        self.folded().cmp(other.folded())
    }
}

impl Hash for Iqn {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.to_lowercase().hash(state);
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
        let kept = |b: u8| b.is_ascii_alphanumeric() || b"-.:".contains(&b);
        let is_name = text.len() <= LONGEST && text.bytes().all(kept);
        let lower = text.to_ascii_lowercase();
        let has_form = match lower.split_once('.') {
            Some(("iqn", rest)) => is_dated(rest),
            Some(("eui", hex)) => hex.len() == 16 && is_hex(hex),
            Some(("naa", hex)) => matches!(hex.len(), 16 | 32) && is_hex(hex),
            _ => false,
        };
        if is_name && has_form {
            return Ok(Self(text.to_owned()));
        }
        Err(ParseIdError::new(
            "an iSCSI name",
            "iqn.YYYY-MM.DOMAIN[:TEXT], eui. and 16 hex digits, or naa. and 16 or 32, in at most \
             223 ASCII letters, digits, dashes, dots and colons",
            text,
        ))
    }
}

/// Whether the text is `YYYY-MM.` and the domain of the naming authority (RFC 7143,
/// 4.2.7.4).
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
    fn a_name_keeps_its_spelling_and_is_the_same_in_every_case() {
        for text in [
            "IQN.2000-01.com.Synology:Box.Target-1",
            "eui.02004567A425678D",
            "naa.52004567BA64678D",
            "naa.62004567BA64678D0123456789ABCDEF",
            "iqn.2001-12.org",
        ] {
            let name: Iqn = text.parse().unwrap();
            assert_eq!((name.as_str(), name.to_string()), (text, text.to_owned()));
            let spellings: [Iqn; 2] =
                [text.to_uppercase(), text.to_lowercase()].map(|text| text.parse().unwrap());
            for other in spellings {
                assert_eq!(other, name);
                assert_eq!(other.cmp(&name), Ordering::Equal);
                assert_eq!(other.to_lowercase(), name.to_lowercase());
                let names: std::collections::HashSet<_> = [other, name.clone()].into();
                assert_eq!(names.len(), 1);
            }
        }
        let [small, large]: [Iqn; 2] =
            ["iqn.2001-12.org:B", "iqn.2001-12.org:a"].map(|text| text.parse().unwrap());
        assert!(small > large);
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
