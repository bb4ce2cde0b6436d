//! The kernel's side of the socket. Each call runs on a separate thread, like the calls of a
//! process.

use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use nix::errno::Errno;

use super::Kernel;
use super::wire::{Heard, Reply, Request, SOCKET, hear, say};

pub(super) struct Server {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(kernel: &Arc<Kernel>) -> Self {
        let listener = UnixListener::bind(kernel.path(SOCKET)).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let (kernel, its_end) = (Arc::clone(kernel), Arc::clone(&ends));
        let thread = thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if its_end.load(Ordering::Acquire) {
                    return;
                }
                let kernel = Arc::clone(&kernel);
                thread::spawn(move || {
                    // A killed process does not read its answer.
                    let _nobody_hears = serve(&kernel, stream);
                });
            }
        });
        Self {
            ends,
            thread: Some(thread),
        }
    }

    pub(super) fn stop(&mut self, root: &Path) {
        self.ends.store(true, Ordering::Release);
        let _wakes_it = UnixStream::connect(root.join(SOCKET));
        if let Some(thread) = self.thread.take() {
            let _panicked_already = thread.join();
        }
    }
}

fn serve(kernel: &Kernel, mut stream: UnixStream) -> io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let request = hear::<Request>(&mut reader)?;
    let done = |result: Result<(), Errno>| match result {
        Ok(()) => Reply::Done,
        Err(errno) => Reply::Refused(errno as i32),
    };
    let reply = match request {
        Request::Write { path, inode, text } => done(kernel.write_attribute(&path, inode, &text)),
        Request::Open { life } => done(kernel.open(life)),
        Request::Sync { life } => done(kernel.sync(life)),
        Request::WritePages { life } => done(kernel.write_pages(life)),
        Request::DropPages { life } => done(kernel.drop_pages(life)),
        Request::Command { life, cdb, length } => match kernel.command(life, &cdb, length) {
            Ok(answer) => Reply::Answered(answer),
            Err(errno) => Reply::Refused(errno as i32),
        },
        Request::Listen => return tell(kernel, &mut stream),
    };
    say(&mut stream, &reply)
}

fn tell(kernel: &Kernel, stream: &mut UnixStream) -> io::Result<()> {
    let events = kernel.listen();
    say(stream, &Reply::Done)?;
    for event in events {
        let heard = Heard {
            of_udev: event.of_udev,
            datagram: event.datagram(),
        };
        say(stream, &heard)?;
    }
    Ok(())
}
