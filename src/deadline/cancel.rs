//! The end of a call before its deadline, where its caller asks for it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Ends calls early: each whose [`Deadline`](super::Deadline) is
/// [cancelled by](super::Deadline::cancelled_by) it. Clones are one and the same.
///
/// A call that is cancelled ends at its next stage with
/// [`Cancelled`](crate::ErrorKind::Cancelled). A kernel call that is under way has three
/// more seconds to return, so that what it does can be undone. What the call brought is
/// taken down again, for which the call has what is left of its deadline, and 15 seconds
/// at most.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Owner>);

/// Gives its place back.
struct Owner(Token);

/// Whether its [`Cancel`] was used. It is `Copy`, so that a deadline is.
#[derive(Clone, Copy)]
pub(super) struct Token {
    place: &'static AtomicU64,
    /// The even number that stands at the place until the cancellation.
    number: u64,
}

/// Places that no `Cancel` has now. One that was cancelled never comes back, because
/// deadlines may carry its token for any time.
static FREE: Mutex<Vec<&'static AtomicU64>> = Mutex::new(Vec::new());

impl Cancel {
    /// One that is not cancelled.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the calls, for good.
    pub fn cancel(&self) {
        let Token { place, number } = self.0.0;
        place.store(number + 1, Ordering::Release);
    }

    /// Whether the calls were told to end.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.token().is_cancelled()
    }

    pub(super) fn token(&self) -> Token {
        self.0.0
    }
}

impl Token {
    pub(super) fn is_cancelled(self) -> bool {
        self.place.load(Ordering::Acquire) == self.number + 1
    }
}

impl Default for Owner {
    fn default() -> Self {
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let place = free.unwrap_or_else(|| Box::leak(Box::default()));
        let number = place.load(Ordering::Acquire);
        Self(Token { place, number })
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Token { place, number } = self.0;
        if !self.0.is_cancelled() {
            place.store(number + 2, Ordering::Release);
            let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
            free.push(place);
        }
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.token().fmt(f)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cancelled = self.is_cancelled();
        f.debug_tuple("Cancel").field(&cancelled).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_takes_the_place_of_another_ends_no_call_of_the_other() {
        let tokens: Vec<Token> = (0..100).map(|_| Cancel::new().token()).collect();
        let later: Vec<Cancel> = (0..100).map(|_| Cancel::new()).collect();
        later.iter().for_each(Cancel::cancel);
        assert!(!tokens.iter().any(|token| token.is_cancelled()));
        let cancelled: Vec<Token> = later.iter().map(Cancel::token).collect();
        drop(later);
        let _new: Vec<Cancel> = (0..100).map(|_| Cancel::new()).collect();
        assert!(cancelled.iter().all(|token| token.is_cancelled()));
    }
}
