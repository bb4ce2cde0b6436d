//! Many short kernel calls, shared among the processors.

use std::mem;
use std::thread;

use crate::error::{Error, ErrorKind, Result};

/// What a thread must find to do to be worth its start.
const SHARE: usize = 500;

/// Beyond these the kernel's own locks are what is waited for.
const MOST: usize = 4;

/// What `work` makes of the items, in their order: of all at once, or where
/// there are many, of an equal share on each of a few threads. None of the
/// calls may block: nobody's deadline ends this.
///
/// # Errors
/// `Io` where a thread died.
pub(crate) fn in_parallel<T: Send, R: Send>(
    mut items: Vec<T>,
    work: impl Fn(Vec<T>) -> Vec<R> + Sync,
) -> Result<Vec<R>> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let share = items.len().div_ceil(processors.min(MOST)).max(SHARE);
    if items.len() <= share {
        return Ok(work(items));
    }
    thread::scope(|scope| {
        let work = &work;
        let mut threads = Vec::new();
        while items.len() > share {
            let rest = items.split_off(share);
            let one = mem::replace(&mut items, rest);
            threads.push(scope.spawn(move || work(one)));
        }
        let last = work(items);
        let mut done = Vec::new();
        for thread in threads {
            let died = |_| Error::new(ErrorKind::Io, "a thread that read a share of it died");
            done.extend(thread.join().map_err(died)?);
        }
        done.extend(last);
        Ok(done)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_of_many_items_is_in_their_order() {
        for count in [0, 1, SHARE, 2 * SHARE + 1, 9 * SHARE] {
            let items: Vec<usize> = (0..count).collect();
            let double = |items: Vec<usize>| items.into_iter().map(|item| 2 * item).collect();
            let done = in_parallel(items, double).unwrap();
            assert!(done.iter().copied().eq((0..count).map(|item| 2 * item)));
        }
    }
}
