//! Waits for the events of a change of a file.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use lunbd::{Deadline, Error, ErrorKind, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};

use crate::threads::Call;

/// A change counts once no other has followed it for this long: a file that is copied in
/// parts, or a directory that is replaced, causes several changes.
const REST: Duration = Duration::from_millis(200);
/// A change counts after this long even if others keep following.
const LONGEST_REST: Duration = Duration::from_secs(5);
/// The kernel's own limit of links in a path (`MAXSYMLINKS`).
const MOST_LINKS: usize = 40;

/// One name in one directory.
type Place = (PathBuf, OsString);

/// A watch on a file and on each name of its path: any of them may become a link to
/// another directory, or be replaced by another directory, as in an orchestrator's
/// volumes.
pub(crate) struct FileWatch {
    inotify: Inotify,
    path: PathBuf,
    watched: BTreeMap<WatchDescriptor, Directory>,
    /// The watch on the file itself: a writer may use another directory, in another mount
    /// of the file system.
    file: Option<WatchDescriptor>,
    /// When the first change came that no wait has reported.
    changed: Option<Instant>,
    /// Whether a process wrote to the file last, and has not closed it.
    is_open: bool,
}

/// What an event means for the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Effect {
    None,
    /// The file has changed.
    Changed,
    /// A process writes to the file and has not closed it yet.
    Written,
}

/// A watched directory, and the names in it that lead to the file.
struct Directory {
    path: PathBuf,
    names: BTreeSet<OsString>,
}

impl FileWatch {
    /// As [`of`](Self::of), within a deadline.
    ///
    /// # Errors
    /// As [`of`](Self::of); `TimedOut`.
    pub(crate) fn within(path: &Path, deadline: Deadline) -> Result<Self> {
        let started = Call::start("lunbd-follow", {
            let path = path.to_owned();
            move || Self::of(&path)
        });
        started?.wait(deadline).unwrap_or_else(|| {
            let message = format!("starting to follow {}: no answer", path.display());
            Err(Error::new(ErrorKind::TimedOut, message))
        })
    }

    /// Starts a watch, which reports every change from now on. **Blocks** as long as the file
    /// system does.
    ///
    /// # Errors
    /// `InvalidInput` if the path names no file; `NotPermitted` if its directory
    /// cannot be read; `Io` if this user may watch no more directories.
    fn of(path: &Path) -> Result<Self> {
        if path.file_name().is_none() {
            let message = format!("{} is no file", path.display());
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        let path = std::path::absolute(path).map_err(|error| failed(path, &error))?;
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)
            .map_err(|errno| failed(&path, &errno.into()))?;
        let mut watch = Self {
            inotify,
            path,
            watched: BTreeMap::new(),
            file: None,
            changed: None,
            is_open: false,
        };
        watch.follow_places()?;
        Ok(watch)
    }

    /// Waits until events say that the file has changed and its writer has closed it. Returns
    /// false if that has not happened within `limit`.
    ///
    /// # Errors
    /// `Io` if the file can no longer be watched.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<bool> {
        let begun = Instant::now();
        loop {
            let rests_since = self.changed.filter(|_| !self.is_open);
            let rest = match rests_since {
                Some(since) if since.elapsed() >= LONGEST_REST => break,
                Some(_) => REST,
                None => limit.saturating_sub(begun.elapsed()),
            };
            if self.poll(rest)? {
                self.take_events()?;
            } else if rests_since.is_some() {
                break;
            } else {
                return Ok(false);
            }
        }
        (self.changed, self.is_open) = (None, false);
        Ok(true)
    }

    /// Whether events say that the file has changed again, completely or not. The next wait
    /// reports it too.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub(crate) fn has_changed(&mut self) -> Result<bool> {
        // One read returns some of the events, and those of other files may come first.
        while self.changed.is_none() && self.poll(Duration::ZERO)? {
            self.take_events()?;
        }
        Ok(self.changed.is_some())
    }

    /// Whether a process has written to the file and not closed it yet.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Watches the file after a change that no event has announced.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub(crate) fn follow_anew(&mut self) -> Result<()> {
        (self.changed, self.is_open) = (None, false);
        self.follow_places()
    }

    fn take_events(&mut self) -> Result<()> {
        for effect in self.read_effects()? {
            self.is_open = match effect {
                Effect::None => continue,
                Effect::Changed => false,
                Effect::Written => true,
            };
            self.changed.get_or_insert_with(Instant::now);
        }
        if self.changed.is_some() {
            self.follow_places()?;
        }
        Ok(())
    }

    /// Whether an event arrives within the limit.
    fn poll(&self, limit: Duration) -> Result<bool> {
        let timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        let mut files = [PollFd::new(self.inotify.as_fd(), PollFlags::POLLIN)];
        match poll(&mut files, timeout) {
            Ok(count) => Ok(count > 0),
            Err(Errno::EINTR) => Ok(true),
            Err(errno) => Err(failed(&self.path, &errno.into())),
        }
    }

    fn read_effects(&self) -> Result<Vec<Effect>> {
        let events = match self.inotify.read_events() {
            Ok(events) => events,
            Err(Errno::EINTR | Errno::EAGAIN) => return Ok(Vec::new()),
            Err(errno) => return Err(failed(&self.path, &errno.into())),
        };
        events.iter().map(|event| self.effect_of(event)).collect()
    }

    fn effect_of(&self, event: &InotifyEvent) -> Result<Effect> {
        let is = |mask| event.mask.contains(mask);
        let written = if is(AddWatchFlags::IN_MODIFY) {
            Effect::Written
        } else {
            Effect::Changed
        };
        let directory = self.watched.get(&event.wd);
        let is_file = self.file == Some(event.wd);
        // No event announces a later mount. The kernel may report the file before its
        // directories, whose watches are then replaced.
        if is(AddWatchFlags::IN_UNMOUNT) && (directory.is_some() || is_file) {
            let path = directory.map_or(&self.path, |directory| &directory.path);
            let error = io::Error::other("its file system was unmounted");
            return Err(failed(path, &error));
        }
        let Some(name) = &event.name else {
            return match directory {
                // Events were lost, or the directory was removed.
                Some(_) => Ok(Effect::Changed),
                None if is(AddWatchFlags::IN_Q_OVERFLOW) => Ok(Effect::Changed),
                None if is(AddWatchFlags::IN_IGNORED) => Ok(Effect::None),
                None if is_file => Ok(written),
                None => Ok(Effect::None),
            };
        };
        let Some(directory) = directory.filter(|it| it.names.contains(name)) else {
            return Ok(Effect::None);
        };
        // A new file reports another change when its writer closes it. A new link is
        // complete at once.
        let is_new_file =
            is(AddWatchFlags::IN_CREATE) && is_being_written(&directory.path.join(name));
        Ok(if is_new_file { Effect::None } else { written })
    }

    /// Watches the directories in which the names of the path are now, from the root on:
    /// replacing a directory meanwhile causes an event in the one above it.
    fn follow_places(&mut self) -> Result<()> {
        loop {
            let places = places_of(&self.path);
            let mut watched: BTreeMap<_, Directory> = BTreeMap::new();
            for (path, name) in &places {
                let descriptor = match self.inotify.add_watch(path, events()) {
                    Ok(descriptor) => descriptor,
                    // The directory above it reports its creation.
                    Err(Errno::ENOENT | Errno::ENOTDIR) => continue,
                    // A directory that this user cannot read is unlikely to change.
                    Err(Errno::EACCES) if Some(path.as_path()) != self.path.parent() => continue,
                    Err(errno) => return Err(failed(path, &errno.into())),
                };
                let directory = watched.entry(descriptor).or_insert_with(|| Directory {
                    path: path.clone(),
                    names: BTreeSet::new(),
                });
                directory.names.insert(name.clone());
            }
            for old in self.watched.keys().filter(|old| !watched.contains_key(old)) {
                let _gone_with_its_directory = self.inotify.rm_watch(*old);
            }
            self.watched = watched;
            self.follow_file();
            if places_of(&self.path) == places {
                return Ok(());
            }
        }
    }

    fn follow_file(&mut self) {
        let events = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MODIFY;
        // If the file cannot be watched itself, its directory reports the changes.
        let file = self.inotify.add_watch(&self.path, events).ok();
        if let Some(old) = self.file.filter(|_| self.file != file) {
            let _gone_with_the_file = self.inotify.rm_watch(old);
        }
        self.file = file;
    }
}

fn events() -> AddWatchFlags {
    AddWatchFlags::IN_CLOSE_WRITE
        | AddWatchFlags::IN_MODIFY
        | AddWatchFlags::IN_MOVED_TO
        | AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_ONLYDIR
        // nix has no name for this flag, which excludes events of a file that was removed
        // or replaced.
        | AddWatchFlags::from_bits_retain(nix::libc::IN_EXCL_UNLINK)
}

/// Whether it is a file with one link, which its writer has yet to close.
fn is_being_written(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && file.nlink() == 1)
}

/// Each name on the way to the file, with its directory, through all links.
fn places_of(path: &Path) -> Vec<Place> {
    let mut places = Vec::new();
    let mut links = 0;
    let mut at = PathBuf::from("/");
    let mut rest = names_of(path);
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        places.push((at.clone(), name.clone()));
        match fs::read_link(at.join(&name)) {
            Ok(target) if links < MOST_LINKS => {
                links += 1;
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                let mut longer = names_of(&target);
                longer.append(&mut rest);
                rest = longer;
            }
            _ => at.push(name),
        }
    }
    places
}

fn names_of(path: &Path) -> VecDeque<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    });
    names.collect()
}

fn failed(path: &Path, error: &io::Error) -> Error {
    let message = format!("cannot follow changes of {}: {error}", path.display());
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied => ErrorKind::NotPermitted,
        _ => ErrorKind::Io,
    };
    Error::new(kind, message)
}

#[cfg(test)]
mod tests;
