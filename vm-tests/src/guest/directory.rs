//! A directory of one test.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// An empty directory below `/tmp`; removed on drop.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// A directory of this process with this name. It replaces what an earlier test left.
    #[must_use]
    pub fn new(name: &str) -> Self {
        super::enter();
        let path = PathBuf::from(format!("/tmp/{name}-{}", std::process::id()));
        let _not_there = fs::remove_dir_all(&path);
        fs::create_dir(&path).expect("a directory");
        Self(path)
    }
}

impl Deref for Directory {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _gone_already = fs::remove_dir_all(&self.0);
    }
}
