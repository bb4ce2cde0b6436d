//! The files of `tls-certificates`, named as libnbd, nbdkit and QEMU name them.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::worker;

/// The longest file that is read, in bytes: more than any system's authorities take.
const LONGEST: usize = 4 << 20;

/// The authorities that the client trusts, and the certificate that it shows.
#[derive(Debug)]
pub(super) struct Certificates {
    pub(super) authorities: RootCertStore,
    pub(super) own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
}

impl Certificates {
    /// Reads the files for each connection, so that new files count from the next connection
    /// on. It reads on a thread of its own, which stays if the file system does not answer.
    ///
    /// # Errors
    /// `InvalidInput` for a file that holds no certificate or no key, and for a directory
    /// without files; those of reading a file; `TimedOut` at stage `tls`.
    pub(super) fn read(directory: Option<&Path>, deadline: Deadline) -> Result<Self> {
        let directory = directory.map(Path::to_owned);
        let last_seen = || "no answer".to_owned();
        worker::run(
            Stage::Tls,
            "the certificates",
            deadline,
            last_seen,
            move || Self::read_now(directory.as_deref()),
        )
    }

    fn read_now(directory: Option<&Path>) -> Result<Self> {
        let Some(directory) = directory else {
            let authorities = system_authorities()?;
            return Ok(Self {
                authorities,
                own: None,
            });
        };
        let [ca, certificate, key] =
            ["ca-cert.pem", "client-cert.pem", "client-key.pem"].map(|name| directory.join(name));
        let own = match (read_if_there(&certificate)?, read_if_there(&key)?) {
            (Some(chain), Some(secret)) => {
                warn_if_open_to_others(&key);
                let secret = PrivateKeyDer::from_pem_slice(&secret)
                    .map_err(|error| no_pem(&key, "key", &error))?;
                Some((chain_of(&certificate, &chain)?, secret))
            }
            (None, None) => None,
            (Some(_), None) => return Err(lacks(&key, "client-cert.pem is there")),
            (None, Some(_)) => return Err(lacks(&certificate, "client-key.pem is there")),
        };
        let authorities = match read_if_there(&ca)? {
            Some(text) => authorities_of(&ca, &text)?,
            None if own.is_some() => system_authorities()?,
            None => return Err(lacks(&ca, "client-cert.pem is not there either")),
        };
        Ok(Self { authorities, own })
    }
}

fn authorities_of(path: &Path, text: &[u8]) -> Result<RootCertStore> {
    let mut authorities = RootCertStore::empty();
    for certificate in chain_of(path, text)? {
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

fn chain_of(path: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let chain = read.map_err(|error| no_pem(path, "certificate", &error))?;
    if chain.is_empty() {
        return Err(no_pem(path, "certificate", &pem::Error::NoItemsFound));
    }
    Ok(chain)
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
