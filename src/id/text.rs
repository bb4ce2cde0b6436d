//! What the parsers of all names share: their error, decimal numbers, lists without repeats.

/// A string that is not what it was taken for.
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

/// A plain decimal number: no sign, no space, no leading zero, so that nothing
/// that the kernel would read as octal gets through.
pub(super) fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten()
}

/// What is named again goes; the order stays.
pub(super) fn without_repeats<T: Ord + Clone>(mut names: Vec<T>) -> Vec<T> {
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}
