//! Whether the sides of a session proved who they are.

use super::chap::Credentials;

/// How the sides of a session proved their identity at its login. More proof compares
/// greater.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proven {
    /// Neither side proved its identity.
    #[default]
    Nothing,
    /// The initiator did, with CHAP.
    Initiator,
    /// Both sides did, with mutual CHAP.
    Both,
}

impl Proven {
    /// What a login with these credentials proves if the target accepts it.
    pub(crate) fn with(credentials: Option<&Credentials>) -> Self {
        match credentials.map(Credentials::is_mutual) {
            None => Self::Nothing,
            Some(false) => Self::Initiator,
            Some(true) => Self::Both,
        }
    }

    /// The text that marks a session of lunbd in the kernel for as long as it exists.
    /// `None` if nothing was proven.
    pub(super) fn mark(self) -> Option<&'static str> {
        match self {
            Self::Nothing => None,
            Self::Initiator => Some("lunbd:chap"),
            Self::Both => Some("lunbd:mutual-chap"),
        }
    }

    pub(super) fn of_mark(mark: Option<&str>) -> Self {
        let mut marked = [Self::Initiator, Self::Both].into_iter();
        let found = marked.find(|proven| mark.is_some() && proven.mark() == mark);
        found.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_other_text_marks_nothing() {
        for proven in [Proven::Nothing, Proven::Initiator, Proven::Both] {
            assert_eq!(Proven::of_mark(proven.mark()), proven);
        }
        for text in ["(null)", "", "array"] {
            assert_eq!(Proven::of_mark(Some(text)), Proven::Nothing);
        }
        assert!(Proven::Both > Proven::Initiator && Proven::Initiator > Proven::Nothing);
    }
}
