//! Divides many short kernel calls among the processors.

use std::thread;

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind, Result};

/// The least number of items that is worth a thread.
const MIN_ITEMS_PER_THREAD: usize = 500;

/// With more threads the calls would only wait for the kernel's own locks.
const MAX_THREADS: usize = 4;

/// Applies `work` to the items and returns the results in order. It calls `work` once
/// with all items or, if there are many, with an equal share on each of a few threads.
/// The caller's thread is one of them, and does the shares of threads that cannot be
/// started. None of the calls may block: no deadline ends this.
///
/// # Errors
/// `Io` if a thread died.
pub(crate) fn in_parallel<T: Send, R: Send>(
    items: Vec<T>,
    work: impl Fn(Vec<T>) -> Vec<R> + Sync,
) -> Result<Vec<R>> {
    in_shares_on(thread::Builder::new, items, work)
}

fn in_shares_on<T: Send, R: Send>(
    new_thread: impl Fn() -> thread::Builder,
    mut items: Vec<T>,
    work: impl Fn(Vec<T>) -> Vec<R> + Sync,
) -> Result<Vec<R>> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let share = items
        .len()
        .div_ceil(processors.min(MAX_THREADS))
        .max(MIN_ITEMS_PER_THREAD);
    if items.len() <= share {
        return Ok(work(items));
    }
    let mut shares = Vec::new();
    while items.len() > share {
        let rest = items.split_off(share);
        shares.push(std::mem::replace(&mut items, rest));
    }
    shares.push(items);
    let threads = shares.len() - 1;
    let next = Mutex::new(shares.into_iter().enumerate());
    let done = Mutex::new(Vec::new());
    let run = || {
        loop {
            let taken = next.lock().next();
            let Some((at, share)) = taken else {
                return;
            };
            let results = work(share);
            done.lock().push((at, results));
        }
    };
    thread::scope(|scope| {
        let start = |_| new_thread().spawn_scoped(scope, run).ok();
        let started: Vec<_> = (0..threads).map_while(start).collect();
        run();
        let died = |_| Error::new(ErrorKind::Io, "a thread that read a part of it died");
        let mut ended = started
            .into_iter()
            .map(|thread| thread.join().map_err(died));
        ended.try_for_each(|ended| ended)
    })?;
    let mut done = done.into_inner();
    done.sort_unstable_by_key(|(at, _)| *at);
    Ok(done.into_iter().flat_map(|(_, results)| results).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn are_in_their_order(new_thread: impl Fn() -> thread::Builder) {
        for count in [
            0,
            1,
            MIN_ITEMS_PER_THREAD,
            2 * MIN_ITEMS_PER_THREAD + 1,
            9 * MIN_ITEMS_PER_THREAD,
        ] {
            let items: Vec<usize> = (0..count).collect();
            let double = |items: Vec<usize>| items.into_iter().map(|item| 2 * item).collect();
            let done = in_shares_on(&new_thread, items, double).unwrap();
            assert!(done.iter().copied().eq((0..count).map(|item| 2 * item)));
        }
    }

    #[test]
    fn what_is_made_of_many_items_is_in_their_order() {
        are_in_their_order(thread::Builder::new);
    }

    #[test]
    fn the_caller_does_the_shares_of_threads_that_cannot_be_started() {
        // No machine has room for this stack.
        are_in_their_order(|| thread::Builder::new().stack_size(1 << 60));
    }
}
