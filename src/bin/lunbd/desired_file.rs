//! The file of wanted volumes.

use std::fs;
use std::io;
use std::path::Path;

use lunbd::reconcile::Desired;
use lunbd::{Error, ErrorKind, Result};

/// # Errors
/// `NotFound`; `InvalidInput`, naming the line and the key; `NotPermitted` and `Io`, where
/// a later read may succeed.
pub(crate) fn read(path: &Path) -> Result<Desired> {
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|error| {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::NotPermitted,
            io::ErrorKind::InvalidData | io::ErrorKind::IsADirectory => ErrorKind::InvalidInput,
            _ => ErrorKind::Io,
        };
        Error::new(kind, format!("cannot read {shown}: {error}"))
    })?;
    toml::from_str(&text).map_err(|error| {
        let message = error.to_string();
        Error::new(
            ErrorKind::InvalidInput,
            format!("{shown}: {}", message.trim_end()),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn kind(path: &str) -> ErrorKind {
        read(Path::new(path)).unwrap_err().kind()
    }

    #[test]
    fn a_read_that_fails_is_no_fault_of_what_the_file_says() {
        // No process has memory mapped at address 0, so the kernel answers EIO.
        assert_eq!(kind("/proc/self/mem"), ErrorKind::Io);
        assert_eq!(kind("/"), ErrorKind::InvalidInput);
        assert_eq!(kind("/proc/self/exe"), ErrorKind::InvalidInput);
        assert_eq!(kind("/proc/self/nothing"), ErrorKind::NotFound);
    }
}
