//! CHAP names and secrets. They come from a file or from the environment, never from a
//! place that a list of processes shows.

use zeroize::Zeroizing;

use super::algorithm::Algorithms;
use super::invalid;
use super::secret::{LONGEST, Secret};
use crate::error::Result;

/// The keys in a file. The environment has them in capitals, after a prefix.
const FIELDS: [&str; 5] = [
    "user",
    "secret",
    "target_user",
    "target_secret",
    "algorithms",
];

/// The default prefix of the environment variables.
pub(super) const VARIABLES: &str = "LUNBD_CHAP_";

/// The proof that we give to a target, and the proof that it must give to us.
#[derive(Debug, Clone)]
pub struct Credentials {
    pub(super) user: String,
    pub(super) secret: Secret,
    pub(super) target: Option<(Option<String>, Secret)>,
    pub(super) algorithms: Algorithms,
}

impl Credentials {
    /// One-way CHAP: the target learns that we know `secret`. A target that does not ask
    /// for a proof gets none.
    ///
    /// # Errors
    /// `InvalidInput` if the name does not have 1 to 255 bytes, or has control characters.
    pub fn new(user: impl Into<String>, secret: Secret) -> Result<Self> {
        Ok(Self {
            user: checked(user.into())?,
            secret,
            target: None,
            algorithms: Algorithms::default(),
        })
    }

    /// Mutual CHAP: the target must prove that it knows `secret`, under the name `user` if
    /// one is given. A target without this proof is refused.
    ///
    /// # Errors
    /// `InvalidInput` as for [`new`](Self::new), and if the target's secret is ours or begins
    /// with it, because an attacker who knows the rest could then get the target's proof from
    /// us. The proof is a hash of an id, a secret and the challenge, one after the other. So the
    /// target's proof for a challenge is ours for the rest of its secret and that challenge.
    pub fn mutual(mut self, user: Option<String>, secret: Secret) -> Result<Self> {
        if secret.bytes().starts_with(self.secret.bytes()) {
            return Err(invalid(
                "the target's secret is the initiator's or begins with it, so an attacker could \
                 get the target's proof from the initiator: choose another secret for one of \
                 them",
            ));
        }
        self.target = Some((user.map(checked).transpose()?, secret));
        Ok(self)
    }

    /// Offers only these and not [all](Algorithms::default). A target that knows none of
    /// them refuses the login, or picks another hash and is refused.
    #[must_use]
    pub fn algorithms(mut self, algorithms: Algorithms) -> Self {
        self.algorithms = algorithms;
        self
    }

    /// Whether the target must prove itself.
    #[must_use]
    pub fn is_mutual(&self) -> bool {
        self.target.is_some()
    }

    /// Parses lines `user=`, `secret=`, and so on, each with its number in the file; `None`
    /// if there are no lines.
    pub(super) fn of_lines<'a>(
        lines: impl Iterator<Item = (usize, &'a [u8])>,
    ) -> Result<Option<Self>> {
        let mut values = [None; FIELDS.len()];
        for (number, line) in lines {
            let at = line.iter().position(|byte| *byte == b'=');
            let (key, value) = line.split_at(at.unwrap_or(line.len()));
            let field = FIELDS.iter().position(|field| field.as_bytes() == key);
            let slot = field.and_then(|field| values.get_mut(field));
            let (Some(slot @ None), Some(value)) = (slot, value.get(1..)) else {
                let expected = "expected each of user=, secret=, target_user=, target_secret= and \
                                algorithms= at most once in a section";
                return Err(invalid(&format!("line {number}: {expected}")));
            };
            *slot = Some(value);
        }
        Self::of(values)
    }

    /// Reads `LUNBD_CHAP_USER` and `LUNBD_CHAP_SECRET`; for mutual CHAP
    /// `LUNBD_CHAP_TARGET_SECRET` and `LUNBD_CHAP_TARGET_USER`; for [`Algorithms`]
    /// `LUNBD_CHAP_ALGORITHMS`. `None` if none of them is set. This crate cannot wipe the
    /// environment itself.
    ///
    /// # Errors
    /// `InvalidInput` if a variable is missing or invalid.
    pub fn from_environment() -> Result<Option<Self>> {
        Self::from_variables(VARIABLES)
    }

    /// As [`from_environment`](Self::from_environment), with another prefix than
    /// `LUNBD_CHAP_`.
    ///
    /// # Errors
    /// `InvalidInput` if a variable is missing or invalid.
    pub fn from_variables(prefix: &str) -> Result<Option<Self>> {
        use std::os::unix::ffi::OsStringExt as _;
        let values = FIELDS.map(|field| {
            let name = format!("{prefix}{}", field.to_ascii_uppercase());
            std::env::var_os(name).map(|value| Zeroizing::new(value.into_vec()))
        });
        Self::of(
            values
                .each_ref()
                .map(|value| value.as_ref().map(|value| value.as_slice())),
        )
    }

    fn of(values: [Option<&[u8]>; FIELDS.len()]) -> Result<Option<Self>> {
        let [user, secret, target_user, target_secret, algorithms] = values;
        let name = |bytes: &[u8]| {
            String::from_utf8(bytes.to_vec()).map_err(|_| invalid("a CHAP name is no UTF-8"))
        };
        let one_way = match (user, secret) {
            (Some(user), Some(secret)) => Self::new(name(user)?, Secret::new(secret)?)?,
            _ if values == [None; FIELDS.len()] => return Ok(None),
            _ => return Err(invalid("a user and a secret are needed, both")),
        };
        let all = match (target_user, target_secret) {
            (user, Some(secret)) => {
                let user = user.map(name).transpose()?;
                one_way.mutual(user, Secret::new(secret)?)?
            }
            (None, None) => one_way,
            (Some(_), None) => {
                return Err(invalid("a target_user is nothing without a target_secret"));
            }
        };
        Ok(Some(match algorithms {
            // The error does not show the value, because a misplaced value may be a secret.
            Some(list) => {
                let list = std::str::from_utf8(list).ok();
                let list = list.and_then(|list| list.parse().ok()).ok_or_else(|| {
                    invalid(
                        "algorithms are one or more of MD5, SHA1, SHA256 and SHA3-256, each once, \
                         with commas between them",
                    )
                })?;
                all.algorithms(list)
            }
            None => all,
        }))
    }
}

fn checked(name: String) -> Result<String> {
    if name.is_empty() || name.len() > LONGEST || name.contains(char::is_control) {
        let message = "a CHAP name has 1 to 255 bytes and no control characters";
        return Err(invalid(message));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The proof for the challenge `c` with the secret `first-and-more` is that for `-and-morec`
    /// with the secret `first`, and any target may send us that challenge.
    #[test]
    fn a_target_secret_that_begins_with_ours_is_refused() {
        let secret = |text: &str| Secret::new(text).unwrap();
        let with = |target: &str| {
            let one_way = Credentials::new("joe", secret("first")).unwrap();
            one_way.mutual(None, secret(target))
        };
        for refused in ["first", "first-and-more"] {
            let error = with(refused).unwrap_err().to_string();
            assert!(error.contains("begins with it"), "{error}");
            assert!(!error.contains(refused), "{error}");
        }
        for accepted in ["firs", "second", "not-first"] {
            with(accepted).unwrap();
        }
    }

    #[test]
    fn a_secret_is_not_shown() {
        let secret = Secret::new("hush").unwrap();
        let other = Secret::new("quiet").unwrap();
        let credentials = Credentials::new("joe", secret).unwrap();
        let shown = format!("{:?}", credentials.mutual(None, other).unwrap());
        assert!(shown.contains("joe") && !shown.contains("hush"), "{shown}");
        assert!(
            !shown.contains("104") && !shown.contains("quiet"),
            "{shown}"
        );
        assert!(Secret::new("").is_err() && Secret::new([1; 256]).is_err());
    }
}
