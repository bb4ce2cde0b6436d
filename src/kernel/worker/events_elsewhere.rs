//! The events and spans on threads that have left the open files of the process.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::LazyLock;

use parking_lot::Mutex;
use tracing::span::Id;
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

static SEEN: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
static WATCH: LazyLock<()> = LazyLock::new(|| {
    let file = tempfile::tempfile().unwrap();
    let inode = file.metadata().unwrap().ino();
    let subscriber = tracing_subscriber::registry().with(LogFile { file, inode });
    // The threads of calls have no subscriber of their own.
    tracing::subscriber::set_global_default(subscriber).unwrap();
});

/// Watches from the first call on, and returns what it has seen since.
pub(crate) fn seen() -> Vec<&'static str> {
    LazyLock::force(&WATCH);
    SEEN.lock().clone()
}

/// A subscriber with an open file, as one that writes a log.
struct LogFile {
    file: File,
    inode: u64,
}

impl LogFile {
    fn look(&self, what: &'static str) {
        let is_open_here = self
            .file
            .metadata()
            .is_ok_and(|found| found.ino() == self.inode);
        if !is_open_here {
            SEEN.lock().push(what);
        }
    }
}

impl<S: Subscriber> Layer<S> for LogFile {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        self.look(event.metadata().name());
    }

    fn on_enter(&self, _: &Id, _: Context<'_, S>) {
        self.look("an entered span");
    }

    fn on_exit(&self, _: &Id, _: Context<'_, S>) {
        self.look("a left span");
    }

    fn on_close(&self, _: Id, _: Context<'_, S>) {
        self.look("a closed span");
    }
}
