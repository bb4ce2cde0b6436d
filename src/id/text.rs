//! The parts that all parsers of identifiers share: their error, decimal numbers, lists
//! without repeats.

/// The error for a string that is no identifier of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{input:?} is not {what}: expected {expected}")]
pub struct ParseIdError {
    what: &'static str,
    expected: &'static str,
    input: String,
}

impl ParseIdError {
    pub(super) fn new(what: &'static str, expected: &'static str, input: &str) -> Self {
        Self {
            what,
            expected,
            input: input.to_owned(),
        }
    }
}

/// Parses a plain decimal number. It allows no sign, space or leading zero, because the
/// kernel reads a leading zero as octal.
pub(super) fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten()
}

/// Drops repeated names and keeps the order.
pub(super) fn without_repeats<T: Ord + Clone>(mut names: Vec<T>) -> Vec<T> {
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}
