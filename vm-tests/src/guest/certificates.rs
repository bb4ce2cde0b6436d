//! Certificates for TLS between a test and its servers.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use time::OffsetDateTime;

use super::directory::Directory;

/// An authority, and a directory with its certificates, named as nbdkit and QEMU name them.
#[derive(Debug)]
pub struct Certificates {
    directory: Directory,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Certificates {
    /// Makes the certificate of a server on the loopback interface and the authority that a
    /// client trusts. `name` names the directory.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let authority = CertifiedIssuer::self_signed(params, key).expect("an authority");
        let directory = Directory::new(name);
        fs::write(directory.join("ca-cert.pem"), authority.pem()).expect("its certificate");
        let made = Self {
            directory,
            authority,
        };
        made.give("server", ExtendedKeyUsagePurpose::ServerAuth);
        made
    }

    /// The directory, for `tls-certificates=` of both sides.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// Gives the client a certificate too.
    pub fn give_to_client(&self) {
        self.give("client", ExtendedKeyUsagePurpose::ClientAuth);
    }

    /// Gives the server a new certificate.
    pub fn renew(&self) {
        self.give("server", ExtendedKeyUsagePurpose::ServerAuth);
    }

    /// Gives the server another certificate, which is valid until this time.
    ///
    /// # Panics
    /// If the time is before 1970.
    pub fn renew_until(&self, end: SystemTime) {
        let since = end.duration_since(UNIX_EPOCH).expect("a time after 1970");
        let end = date_time_ymd(1970, 1, 1) + since;
        self.give_until("server", ExtendedKeyUsagePurpose::ServerAuth, Some(end));
    }

    fn give(&self, to: &str, purpose: ExtendedKeyUsagePurpose) {
        self.give_until(to, purpose, None);
    }

    fn give_until(&self, to: &str, purpose: ExtendedKeyUsagePurpose, end: Option<OffsetDateTime>) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("names");
        params.distinguished_name.push(DnType::CommonName, to);
        params.extended_key_usages = vec![purpose];
        params.not_after = end.unwrap_or(params.not_after);
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        let key = KeyPair::generate().expect("a key");
        let certificate = params
            .signed_by(&key, &self.authority)
            .expect("a certificate");
        for (file, text) in [("cert", certificate.pem()), ("key", key.serialize_pem())] {
            let path = self.directory.join(format!("{to}-{file}.pem"));
            fs::write(path, text).expect("a file of it");
        }
    }
}
