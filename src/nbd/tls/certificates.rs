//! The files of `tls-certificates`, named as libnbd, nbdkit and QEMU name them.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use zeroize::Zeroizing;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::given_up::GivenUp;
use crate::kernel::worker;

/// The reads on file systems that did not answer.
static GIVEN_UP: GivenUp<Certificates> = GivenUp::new();

/// The longest file that is read, in bytes: more than any system's authorities take.
const LONGEST: usize = 4 << 20;

/// The authorities that the client trusts, and the certificate that it shows.
#[derive(Debug)]
pub(super) struct Certificates {
    pub(super) authorities: RootCertStore,
    /// The lists of certificates that their authorities have revoked.
    pub(super) revoked: Vec<CertificateRevocationListDer<'static>>,
    pub(super) own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
}

impl Certificates {
    /// Reads the files for each connection, so that new files count from the next connection
    /// on. It reads on a thread of its own, which stays if the file system does not answer.
    ///
    /// # Errors
    /// `InvalidInput` for a file that holds no certificate, no list or no key, and for a
    /// directory without files; those of reading a file; `TimedOut` at stage `tls`, and
    /// `Quarantined` after that until the read has returned.
    pub(super) fn read(directory: Option<&Path>, deadline: Deadline) -> Result<Self> {
        let what = match directory {
            Some(directory) => format!("the certificates in {}", directory.display()),
            None => "the system's certificates".to_owned(),
        };
        if GIVEN_UP.has(&what) {
            let message = format!("an earlier read of {what} has not returned");
            return Err(Error::new(ErrorKind::Quarantined, message));
        }
        let timed_out = || Error::timed_out(Stage::Tls, deadline, &what);
        if deadline.has_passed() {
            return Err(timed_out().with_last_seen("not begun: the deadline had passed"));
        }
        let directory = directory.map(Path::to_owned);
        let call = move || Self::read_now(directory.as_deref());
        let pending = worker::start(Stage::Tls, call)?;
        GIVEN_UP
            .wait(what.clone(), pending, deadline)
            .unwrap_or_else(|| Err(timed_out().with_last_seen("no answer")))
    }

    fn read_now(directory: Option<&Path>) -> Result<Self> {
        let Some(directory) = directory else {
            let authorities = system_authorities()?;
            return Ok(Self {
                authorities,
                revoked: Vec::new(),
                own: None,
            });
        };
        let [ca, lists, certificate, key] = [
            "ca-cert.pem",
            "ca-crl.pem",
            "client-cert.pem",
            "client-key.pem",
        ]
        .map(|name| directory.join(name));
        let own = match (read_if_there(&certificate)?, read_if_there(&key)?) {
            (Some(chain), Some(secret)) => {
                warn_if_open_to_others(&key);
                let secret = PrivateKeyDer::from_pem_slice(&secret)
                    .map_err(|error| no_pem(&key, "key", &error))?;
                Some((all_of(&certificate, "certificate", &chain)?, secret))
            }
            (None, None) => None,
            (Some(_), None) => return Err(lacks(&key, "client-cert.pem is there")),
            (None, Some(_)) => return Err(lacks(&certificate, "client-key.pem is there")),
        };
        let revoked = match read_if_there(&lists)? {
            Some(text) => Some(all_of(&lists, "revocation list", &text)?),
            None => None,
        };
        let authorities = match read_if_there(&ca)? {
            Some(text) => authorities_of(&ca, &text)?,
            None if own.is_some() || revoked.is_some() => system_authorities()?,
            None => return Err(lacks(&ca, "the directory has no other file of these names")),
        };
        Ok(Self {
            authorities,
            revoked: revoked.unwrap_or_default(),
            own,
        })
    }
}

fn authorities_of(path: &Path, text: &[u8]) -> Result<RootCertStore> {
    let mut authorities = RootCertStore::empty();
    for certificate in all_of(path, "certificate", text)? {
        authorities.add(certificate).map_err(|error| {
            let message = format!("a certificate in it is of no authority: {error}");
            Error::new(ErrorKind::InvalidInput, message).with_path(path)
        })?;
    }
    Ok(authorities)
}

fn system_authorities() -> Result<RootCertStore> {
    let found = rustls_native_certs::load_native_certs();
    let mut authorities = RootCertStore::empty();
    let (taken, left) = authorities.add_parsable_certificates(found.certs);
    tracing::debug!(taken, left, errors = ?found.errors, "the system's authorities");
    if taken > 0 {
        return Ok(authorities);
    }
    let message = "the system has no certificate authorities: say tls-certificates=DIRECTORY";
    Err(Error::new(ErrorKind::InvalidInput, message))
}

/// All items of one kind that the file holds; `what` names the kind.
fn all_of<T: PemObject>(path: &Path, what: &str, text: &[u8]) -> Result<Vec<T>> {
    let read: std::result::Result<Vec<_>, _> = T::pem_slice_iter(text).collect();
    let items = read.map_err(|error| no_pem(path, what, &error))?;
    if items.is_empty() {
        return Err(no_pem(path, what, &pem::Error::NoItemsFound));
    }
    Ok(items)
}

fn read_if_there(path: &Path) -> Result<Option<Zeroizing<Vec<u8>>>> {
    let failed = |error: &io::Error| Error::io("cannot read", path, error);
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| failed(&error))?,
    };
    let length = file.metadata().map_err(|error| failed(&error))?.len();
    // The buffer must not grow: that would leave copies of the text in memory.
    let room = usize::try_from(length).unwrap_or(LONGEST).min(LONGEST) + 1;
    let mut text = Zeroizing::new(Vec::with_capacity(room));
    let most = u64::try_from(room).unwrap_or(u64::MAX);
    let read = file.take(most).read_to_end(&mut text);
    if read.map_err(|error| failed(&error))? == room {
        let message = "the file grows, or is too long for one of certificates";
        return Err(Error::new(ErrorKind::InvalidInput, message).with_path(path));
    }
    Ok(Some(text))
}

fn warn_if_open_to_others(key: &Path) {
    let about = std::fs::metadata(key);
    if about.is_ok_and(|about| about.permissions().mode() & 0o077 != 0) {
        tracing::warn!(path = %key.display(), "others may read this key: chmod 0600");
    }
}

fn no_pem(path: &Path, what: &str, error: &pem::Error) -> Error {
    let message = format!("the file holds no {what} in PEM: {error}");
    Error::new(ErrorKind::InvalidInput, message).with_path(path)
}

fn lacks(path: &Path, though: &str) -> Error {
    let message = format!("the file is not there, and {though}");
    Error::new(ErrorKind::InvalidInput, message).with_path(path)
}
