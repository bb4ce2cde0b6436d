//! What is kept between runs and shared between clones.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The user's directory for packages, kernels and images.
pub(crate) struct Cache {
    root: PathBuf,
    /// Held while the cache is filled, so that two clones do not do it twice.
    _lock: File,
}

impl Cache {
    /// Opens the cache and waits until no other lab is filling it.
    pub(crate) fn lock() -> Result<Self> {
        let root = directory()?;
        fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
        let path = root.join("lock");
        let lock = File::create(&path).with_context(|| path.display().to_string())?;
        if lock.try_lock().is_err() {
            eprintln!("another lab is filling {}: waiting for it", root.display());
            lock.lock().with_context(|| path.display().to_string())?;
        }
        Ok(Self { root, _lock: lock })
    }

    /// The directory of `name` as made by `recipe`, built by `build` in a
    /// directory that gets its name only when it is whole.
    pub(crate) fn entry(
        &self,
        name: &str,
        recipe: &str,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.root.join(format!("{name}-{:016x}", fnv1a(recipe)));
        if path.exists() {
            return Ok(path);
        }
        let unfinished = self.root.join(format!("{name}.unfinished"));
        if unfinished.exists() {
            fs::remove_dir_all(&unfinished).with_context(|| unfinished.display().to_string())?;
        }
        fs::create_dir_all(&unfinished).with_context(|| unfinished.display().to_string())?;
        build(&unfinished)?;
        fs::rename(&unfinished, &path).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// A directory that is used as it is: package lists, downloaded packages.
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

/// Names a recipe; it must come out the same in every build of the lab, which
/// std's hasher does not promise.
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
}
