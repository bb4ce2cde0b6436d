//! The hashes of CHAP, and the list that a login offers.

use std::fmt;
use std::str::FromStr;

use md5::{Digest, Md5};
use sha1::Sha1;
use sha2::Sha256;
use sha3::Sha3_256;

use super::{Secret, invalid};
use crate::error::{Error, Result};

/// A hash for CHAP, by its IANA number. Its text is that of open-iscsi's
/// `node.session.auth.chap_algs`: `MD5`, `SHA1`, `SHA256`, `SHA3-256`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// MD5, which every target knows.
    Md5 = 5,
    /// SHA-1.
    Sha1 = 6,
    /// SHA-256. tgt and old versions of SCST take its number for SHA-1, and refuse an
    /// initiator that uses SHA-256.
    Sha256 = 7,
    /// SHA3-256.
    Sha3 = 8,
}

impl Algorithm {
    const ALL: [Self; 4] = [Self::Md5, Self::Sha1, Self::Sha256, Self::Sha3];

    /// The proof of knowing `secret`: the hash over the identifier, the secret and the
    /// challenge.
    #[must_use]
    pub fn response(self, identifier: u8, secret: &Secret, challenge: &[u8]) -> Vec<u8> {
        fn hash<D: Digest>(parts: [&[u8]; 3]) -> Vec<u8> {
            let mut digest = D::new();
            for part in parts {
                digest.update(part);
            }
            digest.finalize().to_vec()
        }
        let parts = [&[identifier][..], secret.bytes(), challenge];
        match self {
            Self::Md5 => hash::<Md5>(parts),
            Self::Sha1 => hash::<Sha1>(parts),
            Self::Sha256 => hash::<Sha256>(parts),
            Self::Sha3 => hash::<Sha3_256>(parts),
        }
    }

    /// The length of a response in bytes.
    pub(super) fn length(self) -> usize {
        match self {
            Self::Md5 => 16,
            Self::Sha1 => 20,
            Self::Sha256 | Self::Sha3 => 32,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Md5 => "MD5",
            Self::Sha1 => "SHA1",
            Self::Sha256 => "SHA256",
            Self::Sha3 => "SHA3-256",
        })
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = Self::ALL.into_iter();
        let mut named = known.filter(|algorithm| algorithm.to_string() == text);
        named.next().ok_or_else(|| {
            let known = "MD5, SHA1, SHA256 and SHA3-256";
            invalid(&format!("{text:?} is no CHAP algorithm: there are {known}"))
        })
    }
}

/// The hashes that a target may pick from, the most preferred first. As text they are
/// separated by commas: `SHA3-256,SHA256`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Algorithms(Vec<Algorithm>);

impl Algorithms {
    /// A list in this order. Many targets pick the first hash that they know.
    ///
    /// # Errors
    /// `InvalidInput` if the list is empty or names a hash twice.
    pub fn new(wanted: impl IntoIterator<Item = Algorithm>) -> Result<Self> {
        let mut list = Vec::new();
        for algorithm in wanted {
            if list.contains(&algorithm) {
                return Err(invalid(&format!("{algorithm} is named twice")));
            }
            list.push(algorithm);
        }
        if list.is_empty() {
            return Err(invalid("no CHAP algorithm is named"));
        }
        Ok(Self(list))
    }

    /// The value of `CHAP_A`.
    pub(super) fn offer(&self) -> String {
        let numbers = self.0.iter().map(|known| (*known as u32).to_string());
        numbers.collect::<Vec<_>>().join(",")
    }

    /// The offered hash with this number, which the target has picked; `None` if it was not
    /// offered.
    pub(super) fn picked(&self, number: u32) -> Option<Algorithm> {
        let mut offered = self.0.iter().copied();
        offered.find(|algorithm| *algorithm as u32 == number)
    }
}

impl Default for Algorithms {
    /// All hashes, SHA-256 last, because some targets take its number for SHA-1 (see
    /// [`Algorithm::Sha256`]). All of these know MD5 and none knows number 8. The targets
    /// that take it for SHA-256 (LIO, current SCST) know SHA3-256.
    ///
    /// The order weakens nothing: if MD5 is offered at all, the target, or an attacker in
    /// its place, may pick it. CHAP needs only that the input of the hash cannot be found,
    /// which still holds for MD5. A faster hash makes it cheaper to guess the secret, so
    /// the strength of the secret counts. For a target that has SHA-256 but not SHA3-256,
    /// use a list of your own.
    fn default() -> Self {
        use Algorithm::{Md5, Sha1, Sha3, Sha256};
        Self(vec![Sha3, Sha1, Md5, Sha256])
    }
}

impl fmt::Display for Algorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.iter().map(ToString::to_string);
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

impl FromStr for Algorithms {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Self::new([]);
        }
        let names = text.split(',').map(str::parse);
        Self::new(names.collect::<Result<Vec<_>>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::iscsi::chap::encode_binary;

    /// Python's hashlib computed these over the byte 7, the secret and 00 to 0f.
    #[test]
    fn responses_are_what_other_programs_compute() {
        let secret = Secret::new(b"lunbd-secret-12").unwrap();
        let challenge: Vec<u8> = (0..16).collect();
        for (algorithm, expected) in VECTORS {
            let response = algorithm.response(7, &secret, &challenge);
            assert_eq!(encode_binary(&response), format!("0x{expected}"));
            assert_eq!(response.len(), algorithm.length());
        }
    }

    const VECTORS: [(Algorithm, &str); 4] = [
        (Algorithm::Md5, "110c94ec748fc3958312850d2b4397e4"),
        (Algorithm::Sha1, "c66f66e88130ffdbb878a1396175fdc72fe1d1f2"),
        (
            Algorithm::Sha256,
            "5236761f9f75ce65f843d3c94f342cdeb369f7b2b44e137e928c9843d301bedb",
        ),
        (
            Algorithm::Sha3,
            "2c895a08df0c4426d404fdeb2dd1e1494214832229a408e6025d8f34db8dec23",
        ),
    ];

    #[test]
    fn all_are_offered_and_one_that_others_mistake_last() {
        let all = Algorithms::default();
        assert_eq!(all.offer(), "8,6,5,7");
        assert_eq!(all.picked(7), Some(Algorithm::Sha256));
        assert_eq!([0, 4, 9, 261].map(|number| all.picked(number)), [None; 4]);
    }

    #[test]
    fn a_list_is_read_in_its_order_and_what_is_not_in_it_cannot_be_picked() {
        for (text, offer) in [("SHA256", "7"), ("MD5,SHA3-256", "5,8")] {
            let list: Algorithms = text.parse().unwrap();
            assert_eq!(
                (list.offer(), list.to_string()),
                (offer.into(), text.into())
            );
            assert_eq!(list.picked(6), None);
        }
    }

    #[test]
    fn a_list_that_is_empty_unknown_or_twofold_is_refused_and_says_why() {
        for (text, why) in [
            ("", "no CHAP algorithm is named"),
            (
                "SHA512",
                "\"SHA512\" is no CHAP algorithm: there are MD5, SHA1,",
            ),
            ("SHA256,", "\"\" is no CHAP algorithm"),
            ("SHA256, MD5", "\" MD5\" is no CHAP algorithm"),
            ("7", "\"7\" is no CHAP algorithm"),
            ("MD5,SHA1,MD5", "MD5 is named twice"),
        ] {
            let error = text.parse::<Algorithms>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text:?}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
