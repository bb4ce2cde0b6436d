//! The words of a Rust source, without its comments.

/// The parts of a token that the imports of a module are read from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Word(String),
    /// `::`
    Separator,
    /// The content of a string literal: an attribute may have a path there.
    Text(String),
    Other(char),
}

impl Token {
    pub(crate) fn word(&self) -> Option<&str> {
        match self {
            Self::Word(word) => Some(word),
            _ => None,
        }
    }
}

/// The tokens of `source`, each with its line.
pub(crate) fn tokens(source: &str) -> Vec<(Token, usize)> {
    let (mut rest, mut line) = (source, 1);
    let mut found = Vec::new();
    while let Some(first) = rest.chars().next() {
        let (token, length) = next(rest, first);
        found.extend(token.map(|token| (token, line)));
        line += rest[..length].matches('\n').count();
        rest = &rest[length..];
    }
    found
}

/// The first token of `rest`, if any, and its length.
fn next(rest: &str, first: char) -> (Option<Token>, usize) {
    if rest.starts_with("//") {
        return (None, rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("::") {
        return (Some(Token::Separator), 2);
    }
    if let Some(length) = raw_text(rest) {
        return (None, length);
    }
    match first {
        '"' => {
            let length = quoted(rest, '"');
            let text = rest[1..length - 1].to_owned();
            (Some(Token::Text(text)), length)
        }
        // A character literal, unless it is a lifetime.
        '\'' if rest[1..].starts_with('\\') => (None, quoted(rest, '\'')),
        '\'' => {
            let mut after = rest[1..].char_indices().skip(1);
            let is_character = after.next().is_some_and(|(_, c)| c == '\'');
            (None, if is_character { quoted(rest, '\'') } else { 1 })
        }
        c if c.is_alphanumeric() || c == '_' => {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
            let word = &rest[..end.unwrap_or(rest.len())];
            (Some(Token::Word(word.to_owned())), word.len())
        }
        c if c.is_whitespace() => (None, c.len_utf8()),
        c => (Some(Token::Other(c)), c.len_utf8()),
    }
}

/// The length of a raw string literal at the start of `rest`.
fn raw_text(rest: &str) -> Option<usize> {
    let after = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'))?;
    let marks = after.len() - after.trim_start_matches('#').len();
    let content = after[marks..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(marks));
    let length = content.find(&end)? + end.len();
    Some(rest.len() - content.len() + length)
}

/// The length of a literal at the start of `rest`, including its closing quote.
fn quoted(rest: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if c == quote && !is_escaped {
            return at + 1;
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    rest.len()
}
