//! The places that a look for users could not see.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use crate::error::Result;
use crate::kernel::machine::Capabilities;
use crate::kernel::{Roots, mounts, process};

/// A place where users of a disk may be, and which this process could not look at. That no
/// user was found there proves nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "place", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum NotLookedAt {
    /// `/proc` shows the processes of one PID namespace alone.
    OtherPidNamespaces,
    /// `/proc` is mounted with `hidepid`, and this process has no
    /// `CAP_SYS_PTRACE`.
    HiddenProcesses,
    /// The kernel did not show all that some processes have open: this process may not see
    /// it, or the kernel did not answer in time, or they have an `io_uring` whose files the
    /// kernel does not show.
    UnreadableProcesses {
        /// The number of these processes.
        count: usize,
    },
    /// What backs this loop device could not be found.
    LoopDevice {
        /// Its name.
        device: String,
    },
    /// A mount or a swap area was made from this path, which leads through a file server
    /// that does not answer.
    Path {
        /// The path.
        path: PathBuf,
    },
    /// The driver of a target or of OCFS2's heartbeat is loaded, and configfs is not mounted
    /// here.
    Target {
        /// The driver's module.
        module: Cow<'static, str>,
    },
    /// What backs this volume of the kernel's target cannot be read, or its path leads
    /// nowhere here.
    TargetVolume {
        /// The volume's name in the target's configuration: `fileio_0/volume`.
        volume: String,
    },
}

impl fmt::Display for NotLookedAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherPidNamespaces => {
                f.write_str("processes of other PID namespaces (/proc shows one alone)")
            }
            Self::HiddenProcesses => {
                f.write_str("processes that /proc hides (hidepid, and no CAP_SYS_PTRACE)")
            }
            Self::UnreadableProcesses { count } => {
                write!(
                    f,
                    "the open files of {count} processes (the kernel does not show all of them)"
                )
            }
            Self::LoopDevice { device } => write!(
                f,
                "what backs {device} (its node is missing, or a file server that has its file \
                 does not answer)"
            ),
            Self::Path { path } => write!(
                f,
                "what is mounted or swapped on from {} (a link there leads to a file server that \
                 does not answer)",
                path.display()
            ),
            Self::Target { module } => write!(
                f,
                "what the kernel's {module} uses (configfs is not mounted here)"
            ),
            Self::TargetVolume { volume } => write!(
                f,
                "what the kernel's target exports as {volume} (its path leads nowhere here, may \
                 not be read, or leads through a file server that does not answer)"
            ),
        }
    }
}

impl NotLookedAt {
    /// The mounts and swap areas whose device could not be found.
    pub(in crate::engine) fn of_paths(paths: Vec<PathBuf>) -> Vec<Self> {
        paths.into_iter().map(|path| Self::Path { path }).collect()
    }

    /// Adds those that are not in `known` yet.
    pub(in crate::engine) fn merge(known: &mut Vec<Self>, new: &[Self]) {
        let new: Vec<Self> = new
            .iter()
            .filter(|it| !known.contains(it))
            .cloned()
            .collect();
        known.extend(new);
    }
}

/// The processes that this `/proc` does not show at all.
pub(super) fn read_hidden(roots: &Roots) -> Result<Option<NotLookedAt>> {
    if !process::shows_all_namespaces(roots)? {
        return Ok(Some(NotLookedAt::OtherPidNamespaces));
    }
    // A process with this capability in the initial user namespace sees all processes,
    // whatever the options (`fs/proc/base.c`, `has_pid_permissions`).
    if Capabilities::over_the_machine(roots).is_ok_and(Capabilities::sys_ptrace) {
        return Ok(None);
    }
    // A `/proc` without mounts is a test's, and hides nothing.
    let options = mounts::read_options(roots, &roots.proc).unwrap_or_default();
    let hides = |option: &str| option.starts_with("hidepid=") && option != "hidepid=0";
    let hidden = options.split(',').any(hides);
    Ok(hidden.then_some(NotLookedAt::HiddenProcesses))
}

/// The places in words, for an error.
pub(super) fn list(places: &[NotLookedAt]) -> String {
    let places: Vec<String> = places.iter().map(ToString::to_string).collect();
    places.join(", ")
}
