//! CHAP, one-way and mutual (RFC 7143, 12.1.3; RFC 1994).
//!
//! In mutual CHAP the protocol has the initiator prove itself first. What is
//! left to hold is held: nothing is sent to a target that then proves itself
//! wrongly or not at all, one that goes without CHAP is refused, the two secrets
//! must differ, and a challenge of ours that comes back as a target's is not
//! answered.

mod binary;
mod conversation;
mod credentials;

pub use binary::{decode_binary, encode_binary};
pub(super) use conversation::Conversation;
pub use credentials::{Credentials, CredentialsSource, Secret};

use md5::{Digest, Md5};
use sha1::Sha1;
use sha2::Sha256;
use sha3::Sha3_256;

/// A hash for CHAP, by its number at IANA. The target picks one of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// What every target knows.
    Md5 = 5,
    /// SHA-1.
    Sha1 = 6,
    /// SHA-256.
    Sha256 = 7,
    /// SHA3-256.
    Sha3 = 8,
}

impl Algorithm {
    /// What is offered, the most wanted first.
    const OFFER: &str = "8,7,6,5";

    fn of(number: u32) -> Option<Self> {
        [Self::Md5, Self::Sha1, Self::Sha256, Self::Sha3]
            .into_iter()
            .find(|known| *known as u32 == number)
    }

    /// What proves that one knows `secret`: the hash over the identifier, the
    /// secret and the challenge.
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

    /// Of a response, in bytes.
    fn length(self) -> usize {
        match self {
            Self::Md5 => 16,
            Self::Sha1 => 20,
            Self::Sha256 | Self::Sha3 => 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worked with Python's hashlib over the byte 7, the secret and 00 to 0f.
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
    fn numbers_that_iana_did_not_give_are_no_algorithm() {
        assert_eq!(Algorithm::of(7), Some(Algorithm::Sha256));
        assert_eq!([0, 4, 9, 261].map(Algorithm::of), [None; 4]);
        let offered = Algorithm::OFFER
            .split(',')
            .map(|text| text.parse().unwrap());
        assert!(offered.map(Algorithm::of).all(|known| known.is_some()));
    }
}
