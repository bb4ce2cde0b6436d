//! The address of an NBD export.

mod parse;

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};

use super::host::canonical_host;

/// The port that IANA assigned to NBD.
const DEFAULT_PORT: u16 = 10809;
/// The protocol's limit for strings in bytes (`proto.md`).
const LONGEST_EXPORT: usize = 4096;
/// The longest path that fits into `sun_path` before its NUL, in bytes (unix(7)).
const LONGEST_SOCKET: usize = 107;

/// The characters that an NBD URI prints unencoded: RFC 3986's unreserved characters and
/// the slash, which separates nothing in an export's name or in a query.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/');

/// An export of an NBD server (the protocol's `uri.md`):
/// `nbd://HOST[:PORT]/EXPORT`, `nbds://` for the same over TLS, or
/// `nbd+unix:///EXPORT?socket=PATH`.
///
/// An `nbds://` URI may end in `?tls-certificates=DIRECTORY`, `?tls-hostname=NAME` or both,
/// joined by `&`: see [`NbdServer::Tls`]. They are part of the address.
///
/// The default port is 10809. The name of the export is free text of at most 4096 bytes
/// without a NUL; it is empty for the server's default export. Everything after the first
/// slash is the name, so `//a` names the export `/a`. Characters that a URI does not allow
/// are percent-encoded.
///
/// A URI prints in one canonical spelling: two addresses are equal when they print the
/// same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NbdUri {
    server: NbdServer,
    export: String,
}

/// Where an NBD server listens.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NbdServer {
    /// TCP.
    Tcp {
        /// A host name in lower case, or an address; IPv6 without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// TLS over TCP, which needs the feature `tls`.
    Tls {
        /// A host name in lower case, or an address; IPv6 without brackets.
        host: String,
        /// The port.
        port: u16,
        /// An absolute path of a directory. The server's certificate must come from its
        /// `ca-cert.pem`; the server may ask for its `client-cert.pem` and
        /// `client-key.pem`. Without the directory, or without `ca-cert.pem` in it, the
        /// system's certificate authorities apply.
        certificates: Option<PathBuf>,
        /// The name that the server's certificate must hold; `None` means the host.
        hostname: Option<String>,
    },
    /// A Unix socket.
    Unix {
        /// The absolute path of the socket.
        socket: PathBuf,
    },
}

impl NbdUri {
    /// `export` of the server at `host` (a name, an IPv4 address or an IPv6 address without
    /// brackets). The port defaults to 10809. `None` if the host, the port or the export's
    /// name is invalid.
    #[must_use]
    pub fn tcp(host: &str, port: Option<u16>, export: &str) -> Option<Self> {
        let server = NbdServer::Tcp {
            host: canonical_host(host)?,
            port: port.unwrap_or(DEFAULT_PORT),
        };
        Self::new(server, export)
    }

    /// The same over TLS. `certificates` is an absolute path; for it and `hostname` see
    /// [`NbdServer::Tls`].
    #[must_use]
    pub fn tls(
        host: &str,
        port: Option<u16>,
        export: &str,
        certificates: Option<&Path>,
        hostname: Option<&str>,
    ) -> Option<Self> {
        let is_usable =
            |path: &Path| path.is_absolute() && !path.as_os_str().as_bytes().contains(&0);
        if !certificates.is_none_or(is_usable) {
            return None;
        }
        let hostname = match hostname {
            Some(name) => Some(canonical_host(name)?),
            None => None,
        };
        let server = NbdServer::Tls {
            host: canonical_host(host)?,
            port: port.unwrap_or(DEFAULT_PORT),
            // Collecting the components drops `//`, `/./` and a trailing slash.
            certificates: certificates.map(|path| path.components().collect()),
            hostname,
        };
        Self::new(server, export)
    }

    /// `export` of the server behind the Unix socket at `socket`, an absolute path of at
    /// most 107 bytes. `None` if the path or the export's name is invalid.
    #[must_use]
    pub fn unix(socket: &Path, export: &str) -> Option<Self> {
        let bytes = socket.as_os_str().as_bytes();
        let usable = socket.is_absolute() && bytes.len() <= LONGEST_SOCKET && !bytes.contains(&0);
        let socket = usable.then(|| socket.to_owned())?;
        Self::new(NbdServer::Unix { socket }, export)
    }

    fn new(server: NbdServer, export: &str) -> Option<Self> {
        let usable = export.len() <= LONGEST_EXPORT && !export.contains('\0');
        let port_is_zero = matches!(
            server,
            NbdServer::Tcp { port: 0, .. } | NbdServer::Tls { port: 0, .. }
        );
        (usable && !port_is_zero).then(|| Self {
            server,
            export: export.to_owned(),
        })
    }

    /// Where the server listens.
    #[must_use]
    pub fn server(&self) -> &NbdServer {
        &self.server
    }

    /// Whether the connections use TLS.
    #[must_use]
    pub(crate) fn uses_tls(&self) -> bool {
        matches!(self.server, NbdServer::Tls { .. })
    }

    /// The decoded name of the export. It may hold control characters: show it with `{:?}`.
    #[must_use]
    pub fn export(&self) -> &str {
        &self.export
    }

    /// Whether `scheme` is an NBD scheme, with or without TLS.
    pub(super) fn has_scheme(scheme: &str) -> bool {
        ["nbd", "nbd+unix", "nbds", "nbds+unix"]
            .iter()
            .any(|known| scheme.eq_ignore_ascii_case(known))
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = percent_encode(self.export.as_bytes(), PLAIN);
        match &self.server {
            NbdServer::Tcp { .. } => write!(f, "nbd://{}/{export}", self.server),
            NbdServer::Tls {
                certificates,
                hostname,
                ..
            } => {
                write!(f, "nbds://{}/{export}", self.server)?;
                let certificates = certificates
                    .as_ref()
                    .map(|path| path.as_os_str().as_bytes());
                let hostname = hostname.as_ref().map(String::as_bytes);
                let keys = [
                    ("tls-certificates", certificates),
                    ("tls-hostname", hostname),
                ];
                let given = keys
                    .iter()
                    .filter_map(|(key, value)| Some((key, (*value)?)));
                for ((key, value), before) in given.zip(["?", "&"]) {
                    write!(f, "{before}{key}={}", percent_encode(value, PLAIN))?;
                }
                Ok(())
            }
            NbdServer::Unix { socket } => {
                let socket = percent_encode(socket.as_os_str().as_bytes(), PLAIN);
                write!(f, "nbd+unix:///{export}?socket={socket}")
            }
        }
    }
}

impl fmt::Display for NbdServer {
    /// Prints `HOST[:PORT]` or the socket's path, each as in the URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } | Self::Tls { host, port, .. } => {
                if host.contains(':') {
                    write!(f, "[{host}]")?;
                } else {
                    f.write_str(host)?;
                }
                match *port {
                    DEFAULT_PORT => Ok(()),
                    port => write!(f, ":{port}"),
                }
            }
            Self::Unix { socket } => percent_encode(socket.as_os_str().as_bytes(), PLAIN).fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn canonical(text: &str) -> String {
        text.parse::<NbdUri>().unwrap().to_string()
    }

    #[test]
    fn it_prints_in_one_canonical_spelling() {
        for (text, expected) in [
            ("nbd://Example.COM", "nbd://example.com/"),
            ("NBD://h:10809/disk", "nbd://h/disk"),
            ("nbd://h:10810//disk", "nbd://h:10810//disk"),
            ("nbd://[0:0::1]:9/a%2fb", "nbd://[::1]:9/a/b"),
            ("nbd://h/a+b%20c%25", "nbd://h/a%2Bb%20c%25"),
            (
                "nbd+unix://?socket=/run/x%20y",
                "nbd+unix:///?socket=/run/x%20y",
            ),
            ("nbd+unix:///a?socket=/s", "nbd+unix:///a?socket=/s"),
            ("NBDS://H:10809", "nbds://h/"),
            (
                "nbds://h/?tls-certificates=/a//b/./c/",
                "nbds://h/?tls-certificates=/a/b/c",
            ),
            (
                "nbds://h:1/a?tls-hostname=B.example&tls-certificates=/etc/a%20b",
                "nbds://h:1/a?tls-certificates=/etc/a%20b&tls-hostname=b.example",
            ),
            (
                "nbds://h/?tls-hostname=::1",
                "nbds://h/?tls-hostname=%3A%3A1",
            ),
        ] {
            assert_eq!(canonical(text), expected);
        }
    }

    #[test]
    fn a_control_character_is_never_printed_as_it_is() {
        let uri = NbdUri::tcp("h", None, "a\n\u{1b}[31m\u{85}\u{202e}").unwrap();
        assert_eq!(uri.to_string(), "nbd://h/a%0A%1B%5B31m%C2%85%E2%80%AE");
        assert!(!format!("{uri:?}").contains(['\n', '\u{1b}', '\u{85}', '\u{202e}']));
    }

    #[test]
    fn what_no_server_could_be_is_not_made() {
        let unix = |path: &str| NbdUri::unix(Path::new(path), "");
        assert_eq!(unix("run/x"), None);
        assert_eq!(unix("/run/x\0"), None);
        assert_eq!(unix(&format!("/{}", "x".repeat(107))), None);
        assert!(unix(&format!("/{}", "x".repeat(106))).is_some());
        let tcp = |export: &str| NbdUri::tcp("h", None, export);
        assert_eq!(tcp("a\0"), None);
        assert_eq!(tcp(&"\u{e9}".repeat(2049)), None);
        assert!(tcp(&"\u{e9}".repeat(2048)).is_some());
        assert_eq!(NbdUri::tcp("h", Some(0), ""), None);
    }

    fn any_uri() -> impl Strategy<Value = NbdUri> {
        let host = prop_oneof![
            "[a-zA-Z][a-z0-9_-]{0,9}(\\.[a-z][a-z0-9]{0,5})?",
            any::<std::net::Ipv4Addr>().prop_map(|address| address.to_string()),
            any::<std::net::Ipv6Addr>().prop_map(|address| address.to_string()),
        ];
        let tcp = (host, any::<Option<u16>>(), any::<String>())
            .prop_filter_map("no address", |(host, port, export)| {
                NbdUri::tcp(&host, port, &export)
            });
        let unix = (prop::collection::vec(1u8.., 0..106), any::<String>()).prop_filter_map(
            "no socket",
            |(path, export)| {
                let path = [b"/", path.as_slice()].concat();
                NbdUri::unix(Path::new(std::ffi::OsStr::from_bytes(&path)), &export)
            },
        );
        let tls = (
            any::<Option<u16>>(),
            "/[ -~]{0,9}",
            prop::option::of("[a-z]{1,9}"),
        )
            .prop_filter_map("no port", |(port, path, name)| {
                NbdUri::tls("h", port, "x", Some(Path::new(&path)), name.as_deref())
            });
        prop_oneof![tcp, tls, unix]
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_to_the_same_address(uri in any_uri()) {
            prop_assert_eq!(uri.to_string().parse(), Ok(uri));
        }

        #[test]
        fn what_parses_is_printed_in_a_spelling_that_stays(text in "nbd(s|\\+unix)?://[a-z0-9.:\\[\\]]{0,8}/[ -~]{0,12}") {
            if let Ok(uri) = text.parse::<NbdUri>() {
                prop_assert_eq!(canonical(&uri.to_string()), uri.to_string());
            }
        }
    }
}
