//! The query of a file system for its space, one at a time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::DevNo;
use crate::kernel::file_system::Usage;
use crate::kernel::worker;

/// The unanswered queries, by the mounted device. A file system on a dead device may
/// block its query for ever, and a thread with it; there is never a second thread.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct FileSystemQueries(Arc<Mutex<BTreeMap<DevNo, Arc<FileSystemQuery>>>>);

type Answer = Result<(Usage, DevNo), (ErrorKind, String)>;

/// A query that is under way; every caller waits for the same one.
#[derive(Debug, Default)]
pub(super) struct FileSystemQuery {
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

impl FileSystemQueries {
    /// Starts a query, unless one is under way.
    pub(super) fn ask(
        &self,
        device: DevNo,
        read: impl FnOnce() -> Result<(Usage, DevNo)> + Send + 'static,
    ) -> Result<Arc<FileSystemQuery>> {
        let mut running = self.0.lock();
        if let Some(query) = running.get(&device) {
            return Ok(Arc::clone(query));
        }
        let query = Arc::new(FileSystemQuery::default());
        let (ours, queries) = (Arc::clone(&query), self.clone());
        worker::start(Stage::Measure, move || {
            let answer = read();
            let mut running = queries.0.lock();
            running.remove(&device);
            drop(running);
            let answer = answer.map_err(|error| (error.kind(), error.to_string()));
            *ours.answer.lock() = Some(answer);
            ours.answered.notify_all();
            Ok(())
        })?;
        running.insert(device, Arc::clone(&query));
        Ok(query)
    }
}

impl FileSystemQuery {
    /// # Errors
    /// Those of the file system; `TimedOut` at stage `measure`.
    pub(super) fn wait(&self, path: &Path, deadline: Deadline) -> Result<(Usage, DevNo)> {
        let mut answer = self.answer.lock();
        loop {
            match &*answer {
                Some(Ok(usage)) => return Ok(*usage),
                Some(Err((kind, text))) => {
                    return Err(Error::new(*kind, text.clone()).at(Stage::Measure));
                }
                None => {}
            }
            if deadline.has_passed() {
                let what = format!("the file system at {} to report its usage", path.display());
                let error = Error::timed_out(Stage::Measure, deadline, &what);
                return Err(
                    error.with_last_seen("no answer; lunbd does not ask again before it answers")
                );
            }
            self.answered.wait_for(&mut answer, deadline.max_sleep());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::kernel::file_system;

    const DEVICE: DevNo = DevNo { major: 8, minor: 0 };

    #[test]
    fn a_file_system_that_hangs_costs_its_caller_the_deadline_and_one_thread() {
        let queries = FileSystemQueries::default();
        let answer = file_system::read(Path::new("/")).unwrap();
        let (release, hang) = mpsc::channel::<()>();
        let query = queries.ask(DEVICE, move || {
            let _released = hang.recv();
            Ok(answer)
        });
        let path = Path::new("/mnt");
        let error = query
            .unwrap()
            .wait(path, Deadline::after(Duration::from_millis(20)))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.stage(), Some(Stage::Measure));
        let again = queries.ask(DEVICE, || panic!("asked a second time"));
        let again = again.unwrap();
        drop(release);
        let soon = Deadline::after(Duration::from_secs(30));
        assert_eq!(again.wait(path, soon).unwrap(), answer);
        // After the answer the next caller starts a new query.
        let failing = queries.ask(DEVICE, || Err(Error::new(ErrorKind::Io, "shut down")));
        let error = failing.unwrap().wait(path, soon).unwrap_err();
        assert_eq!(error.to_string(), "measure: shut down");
    }
}
