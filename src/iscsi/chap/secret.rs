//! A CHAP secret.

use std::fmt;

use zeroize::Zeroizing;

use super::invalid;
use crate::error::Result;

/// The longest name or secret in bytes.
pub(super) const LONGEST: usize = 255;

/// A CHAP secret of 1 to 255 bytes. `Debug` does not show it, and dropping it wipes its
/// memory.
///
/// The RFC wants at least 12 random bytes. Shorter secrets are accepted, because many
/// arrays have them.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// The secret of these bytes.
    ///
    /// # Errors
    /// `InvalidInput` if there are no bytes or more than 255.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        if bytes.is_empty() || bytes.len() > LONGEST {
            return Err(invalid("a CHAP secret has 1 to 255 bytes"));
        }
        Ok(Self(Zeroizing::new(bytes.to_vec())))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
