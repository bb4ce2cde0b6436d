//! Works on many items at once, on a bounded number of threads.

use std::thread;

use parking_lot::Mutex;

use super::threads::not_started;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};

/// The most threads that work on the items of one call.
pub(crate) const MAX_THREADS: usize = 64;

/// Applies `work` to each item and returns the results in order. It works on up to
/// [`MAX_THREADS`] items at once, each on a thread of its own. The other items wait.
///
/// If a thread cannot be started, the started threads do its work. The result of an item
/// is `Io` if no thread could be started, or if the thread that worked on it died.
pub(crate) fn each<T: Send, R: Send>(
    stage: Stage,
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<Result<R>> {
    each_on(|_| thread::Builder::new(), stage, items, work)
}

fn each_on<T: Send, R: Send>(
    new_thread: impl Fn(usize) -> thread::Builder,
    stage: Stage,
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<Result<R>> {
    let items: Vec<T> = items.into_iter().collect();
    let (count, span) = (items.len(), tracing::Span::current());
    let next = Mutex::new(items.into_iter().enumerate());
    let done: Mutex<Vec<Option<R>>> = Mutex::new((0..count).map(|_| None).collect());
    let run = || {
        let _entered = span.enter();
        loop {
            let taken = next.lock().next();
            let Some((at, item)) = taken else {
                return;
            };
            let result = work(item);
            if let Some(place) = done.lock().get_mut(at) {
                *place = Some(result);
            }
        }
    };
    let refused = thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut refused = None;
        for number in 0..count.min(MAX_THREADS) {
            match new_thread(number).spawn_scoped(scope, run) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        for thread in threads {
            // A panicked thread leaves its item without a result.
            let _ = thread.join();
        }
        refused
    });
    let without_result = || match &refused {
        Some(error) => not_started(error).at(stage),
        None => Error::new(ErrorKind::Io, "the thread that worked on it died").at(stage),
    };
    let done = done.into_inner();
    let results = done.into_iter();
    results
        .map(|result| result.ok_or_else(without_result))
        .collect()
}

/// Like [`each`], for items that may need several turns: `work` returns its result and
/// whether this was the item's last turn. Every item has its first turn before any has
/// its second. The result is that of the item's last turn. It is `None` if the item had
/// no turn by `deadline`.
pub(crate) fn round_robin<'a, T: Send + 'a, R: Send>(
    stage: Stage,
    items: impl IntoIterator<Item = &'a mut T>,
    deadline: Deadline,
    work: impl Fn(&mut T) -> (R, bool) + Sync,
) -> Vec<Option<Result<R>>> {
    let mut waiting: Vec<(usize, &mut T)> = items.into_iter().enumerate().collect();
    let mut results: Vec<Option<Result<R>>> = waiting.iter().map(|_| None).collect();
    while !waiting.is_empty() && !deadline.has_passed() {
        let turns = each(stage, &mut waiting, |(_, item)| {
            (!deadline.has_passed()).then(|| work(item))
        });
        let mut rest = Vec::new();
        for ((at, item), turn) in waiting.into_iter().zip(turns) {
            let (result, is_last) = match turn {
                Ok(None) => continue,
                Ok(Some((result, is_last))) => (Ok(result), is_last),
                Err(error) => (Err(error), true),
            };
            if let Some(place) = results.get_mut(at) {
                *place = Some(result);
            }
            if !is_last {
                rest.push((at, item));
            }
        }
        waiting = rest;
    }
    results
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_item_whose_thread_dies_or_does_not_start_is_an_error_at_its_place() {
        let double = |item: i32| {
            assert_ne!(item, 2, "it dies");
            2 * item
        };
        let mut done = each(Stage::Resolve, [1, 2, 3], double).into_iter();
        assert_eq!(done.next().unwrap().unwrap(), 2);
        assert_eq!(done.next().unwrap().unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(done.next().unwrap().unwrap(), 6);
        let done = each_on(|_| too_large(), Stage::Resolve, [1, 3], double);
        assert_eq!(done.len(), 2);
        for refused in done {
            let error = refused.unwrap_err();
            assert!(error.to_string().contains("cannot start"), "{error}");
        }
    }

    #[test]
    fn the_threads_that_could_be_started_do_the_work_of_those_that_could_not() {
        let new_thread = |number| match number {
            0 => thread::Builder::new(),
            _ => too_large(),
        };
        let done = each_on(new_thread, Stage::Resolve, 0..10, |item| 2 * item);
        let done: Vec<i32> = done.into_iter().map(Result::unwrap).collect();
        assert!(done.into_iter().eq((0..10).map(|item| 2 * item)));
    }

    #[test]
    fn many_items_have_no_more_threads_at_once_than_the_bound() {
        let (at_once, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let started = AtomicUsize::new(0);
        let limit = Deadline::after(Duration::from_secs(60));
        let work = |_| {
            let beside = at_once.fetch_add(1, Ordering::SeqCst) + 1;
            most.fetch_max(beside, Ordering::SeqCst);
            while most.load(Ordering::SeqCst) < MAX_THREADS && !limit.has_passed() {
                thread::yield_now();
            }
            at_once.fetch_sub(1, Ordering::SeqCst);
        };
        let new_thread = |_| {
            started.fetch_add(1, Ordering::SeqCst);
            thread::Builder::new()
        };
        let done = each_on(new_thread, Stage::Resolve, 0..10 * MAX_THREADS, work);
        assert_eq!(done.len(), 10 * MAX_THREADS);
        assert!(done.iter().all(Result::is_ok));
        assert_eq!(started.into_inner(), MAX_THREADS);
        assert_eq!(most.into_inner(), MAX_THREADS);
    }

    #[test]
    fn each_item_has_a_turn_before_any_has_a_second() {
        let turns = AtomicUsize::new(0);
        let limit = Deadline::after(Duration::from_secs(60));
        let count = 3 * MAX_THREADS;
        let work = |first: &mut Option<usize>| {
            let turn = turns.fetch_add(1, Ordering::SeqCst);
            let is_first = first.is_none();
            let first = *first.get_or_insert(turn);
            (first, !is_first)
        };
        let done = round_robin(Stage::Resolve, &mut vec![None; count], limit, work);
        let firsts = done.into_iter().map(|first| first.unwrap().unwrap());
        assert!(firsts.max().unwrap() < count);
        assert_eq!(turns.into_inner(), 2 * count);
    }

    #[test]
    fn an_item_that_needs_more_turns_than_there_is_time_has_the_result_of_its_last() {
        let limit = Deadline::after(Duration::from_millis(20));
        let never_over = |turns: &mut usize| {
            *turns += 1;
            thread::yield_now();
            (*turns, false)
        };
        let done = round_robin(Stage::Resolve, &mut [0], limit, never_over);
        assert!(done.into_iter().all(|last| last.unwrap().unwrap() > 0));
        let too_late = Deadline::after(Duration::ZERO);
        let done = round_robin(Stage::Resolve, &mut [0], too_late, never_over);
        assert!(done.iter().all(Option::is_none));
    }

    /// No machine has room for this stack.
    fn too_large() -> thread::Builder {
        thread::Builder::new().stack_size(1 << 60)
    }
}
