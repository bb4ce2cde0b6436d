//! Writes cpio archives in the "newc" format, which the kernel unpacks as its initramfs. This
//! needs no root: owners and modes are only numbers here.

use std::fs::{self, DirEntry};
use std::io::{Result, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// An archive that is being written. Root owns everything in it.
pub(crate) struct Newc<W> {
    to: W,
    inode: u32,
}

impl<W: Write> Newc<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to, inode: 0 }
    }

    pub(crate) fn directory(&mut self, path: &str, permissions: u32) -> Result<()> {
        self.entry(path, DIRECTORY | permissions, &[])
    }

    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) -> Result<()> {
        self.entry(path, REGULAR | permissions, content)
    }

    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        self.entry(path, SYMLINK | 0o777, target.as_bytes())
    }

    /// Adds everything in `from` that `is_wanted`, below `name`. `name` must be in the archive
    /// already, or be empty.
    pub(crate) fn tree(
        &mut self,
        from: &Path,
        name: &str,
        is_wanted: impl Fn(&str) -> bool + Copy,
    ) -> Result<()> {
        let mut entries = fs::read_dir(from)?.collect::<Result<Vec<_>>>()?;
        entries.sort_by_key(DirEntry::file_name);
        for entry in entries {
            let below = entry.file_name().to_string_lossy().into_owned();
            let name = Path::new(name).join(below).to_string_lossy().into_owned();
            let (path, meta) = (entry.path(), entry.metadata()?);
            let permissions = meta.permissions().mode() & 0o7777;
            if !is_wanted(&name) {
            } else if meta.is_symlink() {
                self.symlink(&name, &fs::read_link(path)?.to_string_lossy())?;
            } else if meta.is_dir() {
                self.directory(&name, permissions)?;
                self.tree(&path, &name, is_wanted)?;
            } else {
                self.file(&name, permissions, &fs::read(path)?)?;
            }
        }
        Ok(())
    }

    /// Ends the archive. Another one may follow it in the same file.
    pub(crate) fn finish(mut self) -> Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, &[])?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.inode += 1;
        let too_large = |_| std::io::Error::other("newc holds files below 4 GiB");
        let size = u32::try_from(content.len()).map_err(too_large)?;
        let name_size = u32::try_from(path.len() + 1).map_err(too_large)?;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        // inode, mode, uid, gid, links, mtime, size, device and rdev (major and
        // minor each), name size, checksum.
        let fields = [
            self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0,
        ];
        write!(self.to, "070701")?;
        for field in fields {
            write!(self.to, "{field:08x}")?;
        }
        self.to.write_all(path.as_bytes())?;
        self.to.write_all(&[0])?;
        // Both the name (with the 110 bytes before it) and the content are padded to a multiple
        // of four.
        self.pad(110 + path.len() + 1)?;
        self.to.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, length: usize) -> Result<()> {
        let missing = length.next_multiple_of(4) - length;
        self.to.write_all(&[0; 3][..missing])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_start_on_multiples_of_four() {
        let mut archive = Newc::new(Vec::new());
        archive.directory("d", 0o755).unwrap();
        archive.file("d/file", 0o644, b"12345").unwrap();
        archive.symlink("l", "d/file").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let starts: Vec<usize> = (0..bytes.len() - 6)
            .filter(|at| &bytes[*at..*at + 6] == b"070701")
            .collect();
        assert_eq!(starts.len(), 4);
        assert!(starts.iter().all(|start| start % 4 == 0));
        let size = &bytes[starts[1] + 54..starts[1] + 62];
        assert_eq!(size, b"00000005");
    }
}
