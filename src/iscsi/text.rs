//! Keys and values in text (RFC 7143, 6): pairs `key=value`, each with a zero byte at its
//! end.

use std::fmt;
use std::ops::RangeInclusive;

use super::violation;
use crate::error::{Error, Result, escape_untrusted};

/// The longest key in bytes (RFC 7143, 6.1).
const LONGEST_KEY: usize = 63;
/// The longest value in bytes; a long CHAP challenge has 2,050.
const LONGEST_VALUE: usize = 8192;

/// One key and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair<'a> {
    /// At most 63 letters, digits and `.-+@_`, the first a letter.
    pub key: &'a str,
    /// At most 8,192 bytes without control characters.
    pub value: &'a str,
}

/// A peer's answer to an offered key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The peer picks this value.
    Value(&'a str),
    /// Another agreement leaves the key without a meaning.
    Irrelevant,
    /// The peer accepts none of the offered values.
    Reject,
    /// The peer does not know the key.
    NotUnderstood,
}

/// The pairs of `text`, in order.
///
/// # Errors
/// An item is `Protocol` if it is not a pair; the iterator ends there.
pub fn pairs(text: &[u8]) -> impl Iterator<Item = Result<Pair<'_>>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let pair = next(&mut rest);
        if pair.is_err() {
            rest = &[];
        }
        Some(pair)
    })
}

fn next<'a>(rest: &mut &'a [u8]) -> Result<Pair<'a>> {
    let Some(end) = rest.iter().position(|byte| *byte == 0) else {
        return Err(violation("text", quoted(rest), "a zero byte at its end"));
    };
    let (pair, after) = rest.split_at(end);
    *rest = after.get(1..).unwrap_or_default();
    let Some(equals) = pair.iter().position(|byte| *byte == b'=') else {
        return Err(violation("text", quoted(pair), "key=value"));
    };
    let (key, value) = (&pair[..equals], &pair[equals + 1..]);
    let is_key = key.first().is_some_and(u8::is_ascii_alphabetic)
        && key.len() <= LONGEST_KEY
        && key
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b".-+@_".contains(byte));
    let Some(key) = std::str::from_utf8(key).ok().filter(|_| is_key) else {
        let expected = "at most 63 letters, digits and .-+@_, the first a letter";
        return Err(violation("a key", quoted(key), expected));
    };
    if value.len() > LONGEST_VALUE {
        let field = format!("the length of the value of {key}");
        return Err(violation(&field, value.len(), "at most 8192"));
    }
    match std::str::from_utf8(value) {
        Ok(value) if !value.contains(char::is_control) => Ok(Pair { key, value }),
        _ => Err(violation(
            key,
            quoted(value),
            "UTF-8 without control characters",
        )),
    }
}

fn quoted(text: &[u8]) -> String {
    format!("\"{}\"", escape_untrusted(text))
}

impl<'a> Pair<'a> {
    /// The value as an answer: the RFC reserves three words that are no values.
    #[must_use]
    pub fn answer(&self) -> Answer<'a> {
        match self.value {
            "Irrelevant" => Answer::Irrelevant,
            "Reject" => Answer::Reject,
            "NotUnderstood" => Answer::NotUnderstood,
            value => Answer::Value(value),
        }
    }

    /// A number, in decimal or as `0x` and hex digits.
    ///
    /// # Errors
    /// `Protocol` if the value is no number, or outside `range`.
    pub fn number(&self, range: RangeInclusive<u32>) -> Result<u32> {
        let hex = self.value.strip_prefix("0x");
        let (digits, radix) = match hex.or_else(|| self.value.strip_prefix("0X")) {
            Some(digits) => (digits, 16),
            None => (self.value, 10),
        };
        let number = u32::from_str_radix(digits, radix).ok();
        // from_str_radix also accepts a sign.
        let plain = digits.starts_with(|c: char| c.is_ascii_hexdigit());
        number
            .filter(|number| plain && range.contains(number))
            .ok_or_else(|| {
                let expected = format!("a number from {} to {}", range.start(), range.end());
                self.violation(&expected)
            })
    }

    /// A boolean: `Yes` or `No`.
    ///
    /// # Errors
    /// `Protocol` if the value is neither.
    pub fn boolean(&self) -> Result<bool> {
        match self.value {
            "Yes" => Ok(true),
            "No" => Ok(false),
            _ => Err(self.violation("Yes or No")),
        }
    }

    /// The items of a list, the most preferred first.
    pub fn list(&self) -> impl Iterator<Item = &'a str> {
        self.value.split(',')
    }

    /// The error for a value that is not what `expected` says.
    pub(super) fn violation(&self, expected: &str) -> Error {
        violation(self.key, quoted(self.value.as_bytes()), expected)
    }
}

/// Text to be sent.
#[derive(Debug, Default)]
pub struct Text(Vec<u8>);

impl Text {
    /// Adds a pair. Neither part may hold a zero byte, and ours never do.
    pub fn push(&mut self, key: &str, value: impl fmt::Display) {
        self.0.extend(format!("{key}={value}\0").into_bytes());
    }

    /// All pairs.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Text that arrives in several PDUs, cut at any byte.
#[derive(Debug)]
pub(super) struct PartialText {
    text: Vec<u8>,
    limit: usize,
}

impl PartialText {
    /// A text of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            text: Vec::new(),
            limit,
        }
    }

    /// # Errors
    /// `Protocol` if the text becomes longer than the limit.
    pub(super) fn add(&mut self, part: &[u8]) -> Result<()> {
        let length = self.text.len() + part.len();
        if length > self.limit {
            let expected = format!("at most {} bytes", self.limit);
            return Err(violation("the length of the text", length, &expected));
        }
        self.text.extend(part);
        Ok(())
    }

    /// Returns the text that has arrived, and empties the buffer.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn all(text: &[u8]) -> Result<Vec<Pair<'_>>> {
        pairs(text).collect()
    }

    fn pair(value: &str) -> Pair<'_> {
        Pair { key: "K", value }
    }

    #[test]
    fn pairs_come_in_their_order_and_a_value_may_hold_an_equals_sign() {
        let found = all(b"B=1\0A=\0X-com.example.a=b=c\0").unwrap();
        let found: Vec<_> = found.iter().map(|pair| (pair.key, pair.value)).collect();
        assert_eq!(found, [("B", "1"), ("A", ""), ("X-com.example.a", "b=c")]);
        assert_eq!(all(b"").unwrap(), []);
    }

    #[test]
    fn what_is_no_pair_is_refused_and_shown_escaped() {
        let long = [&b"K="[..], &[b'x'; 8193], &[0]].concat();
        let long_key = [&[b'k'; 64][..], b"=1\0"].concat();
        for (text, shown) in [
            (&b"A=1\0B=2"[..], "zero byte"),
            (b"A=1\0\0", "key=value"),
            (b"novalue\0", "novalue"),
            (b"=1\0", "a key"),
            (b"1A=1\0", "a key"),
            (b"A B=1\0", "a key"),
            (b"A\xff=1\0", "a key"),
            (&long_key, "a key"),
            (b"A=\xff\0", "UTF-8"),
            (b"A=x\x1b[31m\0", r"x\u{1b}[31m"),
            (&long, "the length of the value of K"),
        ] {
            let error = all(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            let text = error.to_string();
            assert!(text.contains(shown), "{text}");
            assert!(!text.contains(char::is_control), "{text:?}");
        }
    }

    #[test]
    fn numbers_are_decimal_or_hex_and_within_their_range() {
        for (value, number) in [
            ("0", 0),
            ("512", 512),
            ("0x1F", 31),
            ("0X1f", 31),
            ("007", 7),
        ] {
            assert_eq!(pair(value).number(0..=512).unwrap(), number);
        }
        for value in [
            "",
            "-1",
            "+1",
            "0x",
            "0x+1",
            "513",
            "1 ",
            "4294967296",
            "ten",
            "1~2",
        ] {
            let error = pair(value).number(0..=512).unwrap_err();
            assert!(error.to_string().contains("K is"), "{error}");
        }
    }

    #[test]
    fn booleans_and_words_are_spelt_as_the_rfc_has_them() {
        assert!(pair("Yes").boolean().unwrap());
        assert!(!pair("No").boolean().unwrap());
        assert!(pair("yes").boolean().is_err());
        assert_eq!(pair("Reject").answer(), Answer::Reject);
        assert_eq!(pair("Irrelevant").answer(), Answer::Irrelevant);
        assert_eq!(pair("NotUnderstood").answer(), Answer::NotUnderstood);
        assert_eq!(pair("None").answer(), Answer::Value("None"));
        assert_eq!(
            pair("CRC32C,None").list().collect::<Vec<_>>(),
            ["CRC32C", "None"]
        );
    }

    #[test]
    fn text_longer_than_its_limit_is_refused_before_it_is_kept() {
        let mut gathered = PartialText::new(4);
        gathered.add(b"A=1").unwrap();
        assert!(gathered.add(b"\0B").is_err());
        gathered.add(b"\0").unwrap();
        assert_eq!(gathered.take(), b"A=1\0");
        assert_eq!(gathered.take(), b"");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(keys in proptest::collection::vec("[A-Za-z][A-Za-z0-9.+@_-]{0,62}", 0..8), value in "[ -~]{0,300}") {
            let mut text = Text::default();
            for key in &keys {
                text.push(key, &value);
            }
            let found = all(text.as_bytes()).unwrap();
            prop_assert_eq!(found.iter().map(|pair| pair.key).collect::<Vec<_>>(), keys);
            prop_assert!(found.iter().all(|pair| pair.value == value));
        }

        #[test]
        fn no_bytes_break_the_parser(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for pair in pairs(&bytes).flatten() {
                let _ = (pair.answer(), pair.number(0..=u32::MAX), pair.boolean());
            }
        }
    }
}
