//! A secret of CHAP.

use std::fmt;

use zeroize::Zeroizing;

use super::invalid;
use crate::error::Result;

/// Of a name or a secret, in bytes.
pub(super) const LONGEST: usize = 255;

/// A secret of CHAP, 1 to 255 bytes. It is not shown, and its memory is wiped
/// when it is dropped.
///
/// The RFC wants 12 random bytes at least; many arrays have shorter ones, which
/// are taken.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// The secret of these bytes.
    ///
    /// # Errors
    /// `InvalidInput` where they are none or more than 255.
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
