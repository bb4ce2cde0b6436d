//! The files that are kept between runs and shared between clones.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};

/// An old recipe's result that no run has used for this long is removed. Clones with different
/// recipes may take turns.
const KEPT_UNUSED: Duration = Duration::from_secs(24 * 60 * 60);

/// The user's directory for packages, kernels and images.
pub(crate) struct Cache {
    root: PathBuf,
    /// Rebuilds what exists already.
    refresh: bool,
    /// What this lab has rebuilt: two series may share it.
    rebuilt: RefCell<BTreeSet<PathBuf>>,
    /// Held while a lab fills the cache, so that two clones do not do it twice.
    _lock: File,
}

/// A recipe's result. No lab removes it while this is held.
#[derive(Debug)]
pub(crate) struct Entry {
    path: PathBuf,
    _in_use: File,
}

impl Entry {
    /// The caller must hold the cache's lock, or another lab may be removing the entry.
    fn hold(path: PathBuf) -> Result<Self> {
        let in_use = File::open(&path).with_context(|| path.display().to_string())?;
        in_use
            .lock_shared()
            .with_context(|| path.display().to_string())?;
        // If the time of use cannot be stored, the lock still protects the entry.
        let _unwritable = in_use.set_modified(SystemTime::now());
        Ok(Self {
            path,
            _in_use: in_use,
        })
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Cache {
    /// Opens the cache and waits until no other lab is filling it.
    pub(crate) fn lock(refresh: bool) -> Result<Self> {
        let root = directory()?;
        fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
        Self::lock_at(root, refresh)
    }

    fn lock_at(root: PathBuf, refresh: bool) -> Result<Self> {
        let path = root.join("lock");
        let lock = File::create(&path).with_context(|| path.display().to_string())?;
        if lock.try_lock().is_err() {
            eprintln!("another lab is filling {}: waiting for it", root.display());
            lock.lock().with_context(|| path.display().to_string())?;
        }
        Ok(Self {
            root,
            refresh,
            rebuilt: RefCell::default(),
            _lock: lock,
        })
    }

    /// The result of `recipe` under `name`. `build` makes it in a directory that gets this name
    /// only when it is complete.
    pub(crate) fn entry(
        &self,
        name: &str,
        recipe: &str,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Entry> {
        let path = self.root.join(format!("{name}-{:016x}", fnv1a(recipe)));
        if path.exists() {
            if !self.refresh || self.rebuilt.borrow().contains(&path) {
                return Entry::hold(path);
            }
            if is_in_use(&path)? {
                bail!("{} is in use by another lab", path.display());
            }
        }
        let unfinished = self.root.join(format!("{name}.unfinished"));
        remove(&unfinished)?;
        fs::create_dir_all(&unfinished).with_context(|| unfinished.display().to_string())?;
        build(&unfinished)?;
        // A refresh replaces the old result only when the new one is complete.
        remove(&path)?;
        fs::rename(&unfinished, &path).with_context(|| path.display().to_string())?;
        self.rebuilt.borrow_mut().insert(path.clone());
        let entry = Entry::hold(path)?;
        self.prune(name)?;
        Ok(entry)
    }

    /// Removes the results of older recipes under `name`.
    fn prune(&self, name: &str) -> Result<()> {
        for other in fs::read_dir(&self.root)?.flatten() {
            let file = other.file_name().to_string_lossy().into_owned();
            let hash = file
                .strip_prefix(name)
                .and_then(|rest| rest.strip_prefix('-'));
            let of_a_recipe =
                hash.is_some_and(|hash| hash.len() == 16 && u64::from_str_radix(hash, 16).is_ok());
            if of_a_recipe && age(&other.path()) > KEPT_UNUSED && !is_in_use(&other.path())? {
                remove(&other.path())?;
            }
        }
        Ok(())
    }

    pub(crate) fn refreshes(&self) -> bool {
        self.refresh
    }

    /// A directory without a recipe: package lists, downloaded packages.
    pub(crate) fn directory(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name);
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// `$LUNBD_VM_CACHE`, or `lunbd-vm` in the user's cache directory.
pub(crate) fn directory() -> Result<PathBuf> {
    if let Some(chosen) = env::var_os("LUNBD_VM_CACHE").filter(|path| !path.is_empty()) {
        return std::path::absolute(&chosen).context("LUNBD_VM_CACHE");
    }
    let base = env::var_os("XDG_CACHE_HOME").filter(|path| Path::new(path).is_absolute());
    let base = match base {
        Some(base) => PathBuf::from(base),
        None => {
            PathBuf::from(env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?)
                .join(".cache")
        }
    };
    Ok(base.join("lunbd-vm"))
}

/// The time since the entry was made or used; zero if the clock was set back.
fn age(path: &Path) -> Duration {
    let used = fs::metadata(path).and_then(|meta| meta.modified());
    used.ok()
        .and_then(|used| used.elapsed().ok())
        .unwrap_or_default()
}

fn is_in_use(path: &Path) -> Result<bool> {
    let entry = File::open(path).with_context(|| path.display().to_string())?;
    Ok(entry.try_lock().is_err())
}

fn remove(path: &Path) -> Result<()> {
    if path.exists() {
        fs::remove_dir_all(path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Names a recipe. The hash must be the same in every build of the lab, which std's hasher does
/// not promise.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_has_the_same_name_in_every_build() {
        assert_eq!(fnv1a(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a("a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn an_entry_is_removed_once_it_is_unheld_and_long_unused_and_a_recent_one_stays() {
        let root = env::temp_dir().join(format!("lunbd-cache-test-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        let cache = Cache::lock_at(root.clone(), false).unwrap();
        let make = |recipe| cache.entry("root", recipe, |_| Ok(())).unwrap();
        let long_ago = SystemTime::now() - 2 * KEPT_UNUSED;
        let (held, old, recent) = (make("held"), make("old"), make("recent"));
        for entry in [&held, &old] {
            let directory = File::open(&entry.path).unwrap();
            directory.set_modified(long_ago).unwrap();
        }
        let paths = [old.path.clone(), recent.path.clone()];
        drop((old, recent));
        let new = make("new");
        let left = paths.map(|path| path.exists());
        assert_eq!(left, [false, true]);
        assert!(held.path.exists() && new.path.exists());
        drop((held, new, cache));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_refresh_that_fails_keeps_what_is_there() {
        let root = env::temp_dir().join(format!("lunbd-refresh-test-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        let first = Cache::lock_at(root.clone(), false).unwrap();
        let path = first.entry("root", "recipe", |_| Ok(())).unwrap().path;
        drop(first);
        let cache = Cache::lock_at(root.clone(), true).unwrap();
        assert!(
            cache
                .entry("root", "recipe", |_| bail!("no network"))
                .is_err()
        );
        assert!(path.exists());
        let anew = cache.entry("root", "recipe", |to| Ok(fs::write(to.join("new"), "")?));
        let anew = anew.unwrap();
        assert!(anew.join("new").exists());
        // Another series of the same run has the same recipe.
        let again = cache.entry("root", "recipe", |_| bail!("it is rebuilt already"));
        assert!(again.is_ok());
        drop(cache);
        fs::remove_dir_all(root).unwrap();
    }
}
