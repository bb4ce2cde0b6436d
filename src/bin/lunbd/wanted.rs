//! The file that says what is wanted.

use std::fs;
use std::io;
use std::path::Path;

use lunbd::reconcile::Desired;
use lunbd::{Error, ErrorKind, Result};

/// # Errors
/// `NotFound`; `InvalidInput`, naming the line and the key.
pub(crate) fn read(path: &Path) -> Result<Desired> {
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|error| {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::NotPermitted,
            _ => ErrorKind::InvalidInput,
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
