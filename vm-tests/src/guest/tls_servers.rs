//! NBD servers over TLS, and the addresses of their exports.

use std::net::SocketAddr;
use std::path::Path;

use lunbd::Source;

use super::certificates::Certificates;
use super::nbd_server::{At, NbdServer};

/// `nbdkit` of a file, which asks each client for TLS.
#[must_use]
pub fn nbdkit(certificates: &Certificates, file: &Path, more: &[&str]) -> NbdServer {
    let directory = format!("--tls-certificates={}", certificates.path().display());
    let mut arguments = vec!["--tls=require", &directory];
    arguments.extend(more);
    arguments.extend(["file", file.to_str().expect("UTF-8")]);
    NbdServer::nbdkit(At::tcp(), &arguments)
}

/// `qemu-nbd` of a file, under the name `disk`; `priority` is a priority string of `GnuTLS`.
#[must_use]
pub fn qemu_nbd(certificates: &Certificates, file: &Path, priority: &str) -> NbdServer {
    let directory = certificates.path().display();
    let credentials = format!(
        "tls-creds-x509,id=tls0,endpoint=server,verify-peer=off,priority={priority},dir={directory}"
    );
    let arguments = ["--object", &credentials, "--tls-creds", "tls0"];
    NbdServer::qemu_nbd(At::tcp(), "disk", file, &arguments)
}

/// `nbd-server` of files, each under a name. It refuses a client without a certificate.
#[must_use]
pub fn nbd_server(certificates: &Certificates, exports: &[(&str, &Path)]) -> NbdServer {
    NbdServer::of_nbd_server_with_tls(exports, certificates.path())
}

/// Where a server on TCP listens.
///
/// # Panics
/// If it listens on a unix socket.
#[must_use]
pub fn address(server: &NbdServer) -> SocketAddr {
    let At::Tcp(address) = server.at() else {
        panic!("not on TCP: {:?}", server.at());
    };
    *address
}

/// The export of a server there, over TLS.
#[must_use]
pub fn source(at: SocketAddr, export: &str, certificates: &Certificates) -> Source {
    let directory = certificates.path().display();
    let uri = format!("nbds://{at}/{export}?tls-certificates={directory}");
    uri.parse().expect("a source")
}
