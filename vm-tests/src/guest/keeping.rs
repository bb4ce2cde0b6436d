//! Session recovery: by the engine of a test, and by `lunbd heal --watch`.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use lunbd::engine::{SessionRecoveryOptions, SessionRecoveryOutcome, SessionRecoveryReport};
use lunbd::{Deadline, Engine};

const LIMIT: Duration = Duration::from_secs(60);

/// A thread of this process that recovers sessions.
#[derive(Debug)]
pub struct Keeping {
    stop: Arc<AtomicBool>,
    news: Arc<Mutex<Vec<SessionRecoveryReport>>>,
    thread: JoinHandle<()>,
}

impl Keeping {
    /// Starts the recovery after it has seen the existing sessions: nothing knows the digests
    /// of a session that was lost before. Each report is printed too.
    #[must_use]
    pub fn start(engine: &Engine) -> Self {
        Self::start_with(engine, SessionRecoveryOptions::new())
    }

    /// The same with options, such as credentials.
    #[must_use]
    pub fn start_with(engine: &Engine, options: SessionRecoveryOptions) -> Self {
        let mut keeper = engine.recover_sessions(options).unwrap();
        let seen = keeper.next(Deadline::after(Duration::ZERO)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let news = Arc::new(Mutex::new(seen));
        let (told, list) = (Arc::clone(&stop), Arc::clone(&news));
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                let turn = Deadline::after(Duration::from_millis(100));
                for kept in keeper.next(turn).unwrap() {
                    println!("{:?} after {} tries", kept.outcome, kept.tries);
                    list.lock().unwrap().push(kept);
                }
            }
        });
        Self { stop, news, thread }
    }

    /// How many reports match.
    #[must_use]
    pub fn count(&self, is_it: impl Fn(&SessionRecoveryReport) -> bool) -> usize {
        let news = self.news.lock().unwrap();
        news.iter().filter(|kept| is_it(kept)).count()
    }

    /// How often a session was logged in again.
    #[must_use]
    pub fn recovered(&self) -> usize {
        self.count(|kept| matches!(kept.outcome, SessionRecoveryOutcome::Recovered))
    }

    /// Waits for the first report that matches.
    pub fn wait_until(&self, what: &str, is_it: impl Fn(&SessionRecoveryReport) -> bool) {
        super::wait_until(what, LIMIT, || (self.count(&is_it) > 0).then_some(()));
    }

    /// Waits until sessions were logged in again this often.
    pub fn wait_until_recovered(&self, times: usize) {
        let what = format!("{times} recoveries");
        super::wait_until(&what, LIMIT, || (self.recovered() >= times).then_some(()));
    }

    /// Stops the recovery; returns its reports.
    #[allow(
        clippy::must_use_candidate,
        reason = "some tests want its end and not the answer"
    )]
    pub fn end(self) -> Vec<SessionRecoveryReport> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        std::mem::take(&mut self.news.lock().unwrap())
    }
}

/// `lunbd heal --watch` in a separate process.
#[derive(Debug)]
pub struct HealWatch {
    child: Child,
    news: Arc<Mutex<Vec<String>>>,
}

impl HealWatch {
    /// Starts it with these additional arguments; its output is printed too.
    #[must_use]
    pub fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new("lunbd")
            .args(["heal", "--watch", "--json"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let news: Arc<Mutex<Vec<String>>> = Arc::default();
        let list = Arc::clone(&news);
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                println!("{line}");
                list.lock().unwrap().push(line);
            }
        });
        Self { child, news }
    }

    /// Waits until it reports that it logged this session in again.
    pub fn wait_until_recovered(&self, session: u32) {
        let what = format!("session {session} to be logged in again");
        let is_it = |line: &String| {
            super::require_as_in_the_schema(line);
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            let number = line["session"].as_str().and_then(|id| id.parse().ok());
            number == Some(session) && line["outcome"] == "recovered"
        };
        super::wait_until(&what, LIMIT, || {
            let news = self.news.lock().unwrap();
            news.iter().any(is_it).then_some(())
        });
    }

    /// Kills the process (SIGKILL).
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}
