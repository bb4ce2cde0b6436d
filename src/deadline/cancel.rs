//! Cancellation: the caller ends a call before its deadline.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Ends calls early: every call whose [`Deadline`](super::Deadline) is
/// [cancelled by](super::Deadline::cancelled_by) this. All clones share one state.
///
/// A cancelled call ends at its next stage with
/// [`Cancelled`](crate::ErrorKind::Cancelled). A kernel call that has begun gets three
/// more seconds to return, so that its effect can be undone. The call removes what it
/// attached, for which it has the rest of its deadline, but at most 15 seconds.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Owner>);

/// Returns its place to [`FREE`] when the last clone is dropped.
struct Owner(Token);

/// Says whether its [`Cancel`] was used. It is `Copy` so that a deadline can be `Copy`.
#[derive(Clone, Copy)]
pub(super) struct Token {
    place: &'static AtomicU64,
    /// The even number that the place holds until the cancellation.
    number: u64,
}

/// Places that no `Cancel` uses now. The place of a used `Cancel` never returns here,
/// because a deadline may hold its token for any time.
static FREE: Mutex<Vec<&'static AtomicU64>> = Mutex::new(Vec::new());

impl Cancel {
    /// A `Cancel` that is not used yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the calls. This cannot be taken back.
    pub fn cancel(&self) {
        let Token { place, number } = self.0.0;
        place.store(number + 1, Ordering::Release);
    }

    /// Whether [`cancel`](Self::cancel) was called.
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
        let free = FREE.lock().pop();
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
            let mut free = FREE.lock();
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
    fn a_new_cancel_in_a_reused_slot_cancels_no_earlier_token() {
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
