//! The CHAP part of a login's security stage.

use super::{Algorithm, Credentials, Secret, decode_binary, encode_binary};
use crate::error::{Error, ErrorKind, Result};
use crate::iscsi::text::{Pair, Text};
use crate::iscsi::{PEER, random, violation};

/// The longest challenge in bytes (RFC 7143, 12.1.3).
const LONGEST_CHALLENGE: usize = 1024;

/// One CHAP conversation. `sent` holds the challenges that we have sent to the targets of
/// the same login.
#[derive(Debug)]
pub(in crate::iscsi) struct Conversation<'a> {
    credentials: &'a Credentials,
    sent: &'a mut Vec<Vec<u8>>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Neither side has sent anything.
    New,
    /// We wait for the target to pick an algorithm and send its challenge.
    Offered,
    /// The target waits for our proof.
    Challenged(Challenge),
    /// We wait for the target's proof, if it owes one.
    Proved(Option<ExpectedProof>),
    Done,
}

#[derive(Debug)]
struct Challenge {
    algorithm: Algorithm,
    identifier: u8,
    bytes: Vec<u8>,
}

/// The proof that a target owes to our challenge.
#[derive(Debug)]
struct ExpectedProof {
    expected: Vec<u8>,
    /// Our own response, which the target must not send back.
    ours: Vec<u8>,
}

impl<'a> Conversation<'a> {
    pub(in crate::iscsi) fn new(credentials: &'a Credentials, sent: &'a mut Vec<Vec<u8>>) -> Self {
        Self {
            credentials,
            sent,
            state: State::New,
        }
    }

    /// Whether the target owes nothing more.
    pub(in crate::iscsi) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Writes the next keys. Returns `true` if these are our last keys.
    pub(in crate::iscsi) fn request(&mut self, text: &mut Text) -> Result<bool> {
        match &self.state {
            State::New => {
                text.push("CHAP_A", self.credentials.algorithms.offer());
                self.state = State::Offered;
                Ok(false)
            }
            State::Challenged(challenge) => {
                let ours = challenge.answer(&self.credentials.secret);
                text.push("CHAP_N", &self.credentials.user);
                text.push("CHAP_R", encode_binary(&ours));
                let expected = match &self.credentials.target {
                    Some((_, secret)) => {
                        let reciprocal = challenge.reciprocal_challenge()?;
                        text.push("CHAP_I", reciprocal.identifier);
                        text.push("CHAP_C", encode_binary(&reciprocal.bytes));
                        let expected = reciprocal.answer(secret);
                        self.sent.push(reciprocal.bytes);
                        Some(ExpectedProof { expected, ours })
                    }
                    None => None,
                };
                self.state = State::Proved(expected);
                Ok(true)
            }
            State::Offered | State::Proved(_) | State::Done => Ok(true),
        }
    }

    /// Takes the CHAP keys of one response, which holds each key at most once.
    ///
    /// # Errors
    /// `Protocol`, naming the key; `NotPermitted` if the target's proof is wrong or
    /// missing, or if it sends back what is ours. The caller must then send nothing to it.
    pub(in crate::iscsi) fn take(&mut self, keys: &[Pair<'_>]) -> Result<()> {
        let next = match &self.state {
            State::Offered => {
                require_only(keys, &["CHAP_A", "CHAP_I", "CHAP_C"])?;
                State::Challenged(self.challenge(keys)?)
            }
            State::Proved(Some(proof)) => {
                require_only(keys, &["CHAP_N", "CHAP_R"])?;
                self.check(proof, keys)?;
                State::Done
            }
            State::Proved(None) => {
                require_only(keys, &[])?;
                State::Done
            }
            State::New | State::Challenged(_) | State::Done => return require_only(keys, &[]),
        };
        self.state = next;
        Ok(())
    }

    fn challenge(&self, keys: &[Pair<'_>]) -> Result<Challenge> {
        let algorithm = require_key(keys, "CHAP_A")?;
        let offered = &self.credentials.algorithms;
        let picked = offered.picked(algorithm.number(0..=u32::MAX)?);
        let identifier = require_key(keys, "CHAP_I")?.number(0..=255)?;
        let challenge = Challenge {
            algorithm: picked.ok_or_else(|| {
                let expected = format!("one of {}, which are offered", offered.offer());
                algorithm.violation(&expected)
            })?,
            identifier: u8::try_from(identifier).unwrap_or(u8::MAX),
            bytes: decode_binary(require_key(keys, "CHAP_C")?, LONGEST_CHALLENGE)?,
        };
        if self.sent.contains(&challenge.bytes) {
            return Err(refused("sent our own challenge back to us"));
        }
        Ok(challenge)
    }

    fn check(&self, proof: &ExpectedProof, keys: &[Pair<'_>]) -> Result<()> {
        if keys.is_empty() {
            return Err(refused("did not prove that it knows its secret"));
        }
        let name = require_key(keys, "CHAP_N")?;
        let response = decode_binary(require_key(keys, "CHAP_R")?, proof.expected.len())?;
        if equal_in_constant_time(&response, &proof.ours) {
            return Err(refused("sent our own response back to us"));
        }
        if !equal_in_constant_time(&response, &proof.expected) {
            return Err(refused(
                "proved itself with another secret than ours for it",
            ));
        }
        let user = self.credentials.target.as_ref();
        match user.and_then(|(user, _)| user.as_deref()) {
            Some(user) if user != name.value => Err(refused(
                "proved itself under another name than was given for it",
            )),
            _ => Ok(()),
        }
    }
}

impl Challenge {
    fn answer(&self, secret: &Secret) -> Vec<u8> {
        self.algorithm
            .response(self.identifier, secret, &self.bytes)
    }

    /// Our challenge to the target that sent this one.
    fn reciprocal_challenge(&self) -> Result<Self> {
        let mut bytes = vec![0; 1 + self.algorithm.length()];
        random(&mut bytes)?;
        let identifier = bytes.pop().unwrap_or_default();
        if bytes == self.bytes {
            return Err(refused("foresaw our challenge"));
        }
        Ok(Self {
            algorithm: self.algorithm,
            identifier,
            bytes,
        })
    }
}

fn require_key<'p, 't>(keys: &'p [Pair<'t>], name: &str) -> Result<&'p Pair<'t>> {
    keys.iter()
        .find(|pair| pair.key == name)
        .ok_or_else(|| violation(name, "absent", "a value"))
}

fn require_only(keys: &[Pair<'_>], expected: &[&str]) -> Result<()> {
    match keys.iter().find(|pair| !expected.contains(&pair.key)) {
        Some(pair) => Err(pair.violation("no such key now")),
        None => Ok(()),
    }
}

/// Compares in constant time, so that the time does not show where the bytes differ.
fn equal_in_constant_time(one: &[u8], other: &[u8]) -> bool {
    let differ = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && differ == 0
}

fn refused(what: &str) -> Error {
    Error::new(ErrorKind::NotPermitted, format!("CHAP: {PEER} {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::text::pairs;

    fn credentials() -> Credentials {
        let secret = |text| Secret::new(text).unwrap();
        let one_way = Credentials::new("joe", secret("joes-secret")).unwrap();
        let target = Some("array".to_owned());
        one_way.mutual(target, secret("arrays-secret")).unwrap()
    }

    fn keys<'a>(text: &'a [(&'a str, &'a str)]) -> Vec<Pair<'a>> {
        let pair = |&(key, value)| Pair { key, value };
        text.iter().map(pair).collect()
    }

    /// Runs a conversation up to our proof; `make` makes the target's answer from our keys.
    fn mutual(make: impl FnOnce(u8, &[u8], &str) -> (String, String)) -> Result<()> {
        let credentials = credentials();
        let mut sent = Vec::new();
        let mut ours = Conversation::new(&credentials, &mut sent);
        assert!(!ours.request(&mut Text::default())?);
        ours.take(&keys(&[
            ("CHAP_A", "7"),
            ("CHAP_I", "0x2a"),
            ("CHAP_C", "0x0102"),
        ]))?;
        let mut text = Text::default();
        assert!(ours.request(&mut text)?);
        let said: Vec<_> = pairs(text.as_bytes()).collect::<Result<_>>()?;
        let value = |name| require_key(&said, name).unwrap();
        let expected = Algorithm::Sha256.response(0x2a, &credentials.secret, &[1, 2]);
        assert_eq!(value("CHAP_R").value, encode_binary(&expected));
        assert_eq!(value("CHAP_N").value, "joe");
        let identifier = u8::try_from(value("CHAP_I").number(0..=255)?).unwrap();
        let challenge = decode_binary(value("CHAP_C"), 32)?;
        let (name, response) = make(identifier, &challenge, value("CHAP_R").value);
        assert!(!ours.is_done());
        ours.take(&keys(&[("CHAP_N", &name), ("CHAP_R", &response)]))?;
        assert!(ours.is_done());
        Ok(())
    }

    fn proof(secret: &str, identifier: u8, challenge: &[u8]) -> String {
        let secret = Secret::new(secret).unwrap();
        encode_binary(&Algorithm::Sha256.response(identifier, &secret, challenge))
    }

    #[test]
    fn a_target_that_knows_its_secret_is_believed() {
        mutual(|id, challenge, _| ("array".to_owned(), proof("arrays-secret", id, challenge)))
            .unwrap();
    }

    #[test]
    fn a_wrong_proof_a_wrong_name_and_our_own_words_are_refused() {
        let refusal = |make: fn(u8, &[u8], &str) -> (String, String)| {
            let error = mutual(make).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
            error.to_string()
        };
        let wrong = refusal(|id, bytes, _| ("array".to_owned(), proof("x", id, bytes)));
        assert!(wrong.contains("another secret"), "{wrong}");
        let reflected = refusal(|_, _, ours| ("array".to_owned(), ours.to_owned()));
        assert!(reflected.contains("our own response"), "{reflected}");
        let named = refusal(|id, bytes, _| ("joe".to_owned(), proof("arrays-secret", id, bytes)));
        assert!(named.contains("another name"), "{named}");
    }

    #[test]
    fn a_challenge_of_ours_that_comes_back_is_not_answered() {
        let credentials = credentials();
        let mut sent = vec![vec![1, 2]];
        let mut ours = Conversation::new(&credentials, &mut sent);
        ours.request(&mut Text::default()).unwrap();
        let reflected = keys(&[("CHAP_A", "5"), ("CHAP_I", "1"), ("CHAP_C", "0bAQI=")]);
        let error = ours.take(&reflected).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
    }

    #[test]
    fn an_algorithm_that_is_known_and_was_not_offered_is_refused() {
        let credentials = credentials().algorithms("SHA3-256,SHA256".parse().unwrap());
        for (picked, is_taken) in [("8", true), ("7", true), ("6", false), ("5", false)] {
            let mut sent = Vec::new();
            let mut ours = Conversation::new(&credentials, &mut sent);
            let mut text = Text::default();
            ours.request(&mut text).unwrap();
            assert_eq!(text.as_bytes(), b"CHAP_A=8,7\0");
            let said = [("CHAP_A", picked), ("CHAP_I", "1"), ("CHAP_C", "0x01")];
            let taken = ours.take(&keys(&said));
            assert_eq!(taken.is_ok(), is_taken, "{picked}: {taken:?}");
            if let Err(error) = taken {
                assert!(error.to_string().contains("one of 8,7"), "{error}");
            }
        }
    }

    #[test]
    fn keys_that_are_absent_out_of_range_or_out_of_turn_are_named() {
        let all = [("CHAP_A", "5"), ("CHAP_I", "1"), ("CHAP_C", "0x01")];
        let [a, i, c] = all;
        for (said, field) in [
            (&[i, c][..], "CHAP_A is absent"),
            (&[a, c], "CHAP_I is absent"),
            (&[a, i], "CHAP_C is absent"),
            (&[("CHAP_A", "4"), i, c], "CHAP_A is \"4\""),
            (&[("CHAP_A", "5,6"), i, c], "CHAP_A is \"5,6\""),
            (&[a, ("CHAP_I", "256"), c], "CHAP_I"),
            (&[a, i, ("CHAP_C", "0x")], "CHAP_C"),
            (&[a, i, c, ("CHAP_R", "0x01")], "CHAP_R"),
        ] {
            let credentials = credentials();
            let mut sent = Vec::new();
            let mut ours = Conversation::new(&credentials, &mut sent);
            ours.request(&mut Text::default()).unwrap();
            let error = ours.take(&keys(said)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(field), "{error}");
        }
    }
}
