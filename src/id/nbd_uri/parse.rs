//! Parses an NBD URI strictly: it refuses text that two parsers could read in two ways.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

use super::NbdUri;
use crate::id::host::host_and_port;
use crate::id::text::ParseIdError;

impl FromStr for NbdUri {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        parse(text).map_err(|expected| ParseIdError::new("an NBD URI", expected, text))
    }
}

/// The error says what was expected.
fn parse(text: &str) -> Result<NbdUri, &'static str> {
    const FORMS: &str =
        "nbd://HOST[:PORT]/EXPORT, the same with nbds://, or nbd+unix:///EXPORT?socket=PATH";

    let (scheme, rest) = text.split_once("://").ok_or(FORMS)?;
    let scheme = scheme.to_ascii_lowercase();
    if scheme == "nbds+unix" {
        return Err("nbds:// over TCP: the kernel has no TLS for unix sockets");
    }
    if !NbdUri::has_scheme(&scheme) {
        return Err(FORMS);
    }
    if !rest.bytes().all(belongs_in_a_uri) {
        return Err("every character that a URI does not hold to be percent-encoded");
    }
    let (rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, Some(query)),
        None => (rest, None),
    };
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    if authority.contains('@') {
        return Err(
            "no user in front of the host: one is for TLS with pre-shared keys, which is not supported",
        );
    }
    let export = decoded(export).and_then(|bytes| String::from_utf8(bytes).ok());
    let export = export.ok_or(EXPORT)?;

    match scheme.as_str() {
        "nbd" if query.is_some() => Err("no query after nbd://, where no key is known"),
        "nbd" => {
            let (host, port) = host_and_port(authority).ok_or("HOST or HOST:PORT after nbd://")?;
            NbdUri::tcp(&host, port, &export).ok_or(EXPORT)
        }
        "nbds" => parse_tls(authority, query, &export),
        _ => parse_unix(authority, query, &export),
    }
}

/// The rest of a URI that begins with `nbds://`.
fn parse_tls(authority: &str, query: Option<&str>, export: &str) -> Result<NbdUri, &'static str> {
    let (host, port) = host_and_port(authority).ok_or("HOST or HOST:PORT after nbds://")?;
    let TlsQuery {
        certificates,
        hostname,
    } = TlsQuery::parse(query)?;
    let certificates = certificates
        .as_deref()
        .map(|path| Path::new(OsStr::from_bytes(path)));
    let hostname = hostname.as_deref();
    let uri = |export| NbdUri::tls(&host, port, export, certificates, hostname);
    // If the URI is valid with an empty export, the export is wrong, else the query.
    let expected = uri("").map_or(TLS_QUERY, |_| EXPORT);
    uri(export).ok_or(expected)
}

/// The rest of a URI that begins with `nbd+unix://`.
fn parse_unix(authority: &str, query: Option<&str>, export: &str) -> Result<NbdUri, &'static str> {
    const SOCKET: &str =
        "?socket=PATH and no other key, PATH from the root and of at most 107 bytes";
    if !authority.is_empty() {
        return Err("no host after nbd+unix://, so three slashes");
    }
    let socket = query.and_then(|query| query.strip_prefix("socket="));
    let socket = socket.filter(|path| !path.contains(['&', '=', ';']));
    let socket = socket.and_then(decoded).ok_or(SOCKET)?;
    let socket = Path::new(OsStr::from_bytes(&socket));
    // If the URI is valid with an empty export, the export is wrong, else the socket.
    let expected = NbdUri::unix(socket, "").map_or(SOCKET, |_| EXPORT);
    NbdUri::unix(socket, export).ok_or(expected)
}

const EXPORT: &str =
    "an export's name of at most 4096 bytes of percent-encoded UTF-8 without a NUL";

const TLS_QUERY: &str = "after nbds:// no other keys than tls-certificates=DIRECTORY, from the root, \
    and tls-hostname=NAME, each once";

/// The keys after the question mark of a URI with TLS.
#[derive(Default)]
struct TlsQuery {
    certificates: Option<Vec<u8>>,
    hostname: Option<String>,
}

impl TlsQuery {
    fn parse(query: Option<&str>) -> Result<Self, &'static str> {
        let mut found = Self::default();
        for pair in query.into_iter().flat_map(|query| query.split(['&', ';'])) {
            let (key, value) = pair.split_once('=').ok_or(TLS_QUERY)?;
            let value = decoded(value)
                .filter(|_| !value.contains('='))
                .ok_or(TLS_QUERY)?;
            let is_new = match key {
                "tls-certificates" => found.certificates.replace(value).is_none(),
                "tls-hostname" => {
                    let name = String::from_utf8(value).map_err(|_| TLS_QUERY)?;
                    found.hostname.replace(name).is_none()
                }
                _ => false,
            };
            if !is_new {
                return Err(TLS_QUERY);
            }
        }
        Ok(found)
    }
}

/// RFC 3986's characters without `#`, which begins a fragment.
fn belongs_in_a_uri(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~:/?[]@!$&'()*+,;=%".contains(&byte)
}

/// `None` if a `%` has no two hex digits after it.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let escapes_are_whole = text.split('%').skip(1).all(|after| {
        let digits = after.as_bytes().get(..2);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    });
    escapes_are_whole.then(|| percent_decode_str(text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::NbdServer;

    fn expected(text: &str) -> &'static str {
        parse(text).unwrap_err()
    }

    #[test]
    fn the_forms_of_the_protocols_document_are_read() {
        for (text, host, port, export) in [
            ("nbd://example.com", "example.com", 10809, ""),
            ("nbd://example.com/", "example.com", 10809, ""),
            ("nbd://example.com/disk", "example.com", 10809, "disk"),
            ("nbd://example.com:9//disk", "example.com", 9, "/disk"),
            (
                "nbd://10.0.0.1/hello%20world",
                "10.0.0.1",
                10809,
                "hello world",
            ),
            ("nbd://[FE80::1]:1/a@b:c", "fe80::1", 1, "a@b:c"),
        ] {
            let uri = parse(text).unwrap();
            let host = host.to_owned();
            assert_eq!(uri.server(), &NbdServer::Tcp { host, port }, "{text}");
            assert_eq!(uri.export(), export, "{text}");
        }
        let uri = parse("nbd+unix:///d%2Fx?socket=/run/n%26.sock").unwrap();
        let socket = "/run/n&.sock".into();
        assert_eq!(uri.server(), &NbdServer::Unix { socket });
        assert_eq!(uri.export(), "d/x");
    }

    #[test]
    fn an_nbds_uri_is_tls_over_tcp_and_is_refused_over_unix_sockets_or_with_other_keys() {
        let uri = parse("nbds://H:1/x?tls-certificates=/c&tls-hostname=Name").unwrap();
        let server = NbdServer::Tls {
            host: "h".to_owned(),
            port: 1,
            certificates: Some("/c".into()),
            hostname: Some("name".to_owned()),
        };
        assert_eq!(uri.server(), &server);
        assert!(expected("nbds+unix:///x?socket=/s").contains("over TCP"));
        for text in [
            "nbds://h/x?",
            "nbds://h/x?tls-certificates",
            "nbds://h/x?tls-certificates=c",
            "nbds://h/x?tls-certificates=/c&tls-certificates=/c",
            "nbds://h/x?tls-verify-peer=false",
            "nbds://h/x?tls-hostname=",
        ] {
            assert!(expected(text).contains("no other keys"), "{text}");
        }
    }

    #[test]
    fn a_user_is_refused_in_words() {
        assert!(expected("nbd://me@h/x").contains("no user"));
        assert!(expected("nbd+unix://me@/x?socket=/s").contains("no user"));
    }

    #[test]
    fn a_key_that_is_not_known_is_refused() {
        assert!(expected("nbd://h/x?socket=/s").contains("no query"));
        assert!(expected("nbd://h/x?").contains("no query"));
        for text in [
            "nbd+unix:///x",
            "nbd+unix:///x?",
            "nbd+unix:///x?socket",
            "nbd+unix:///x?Socket=/s",
            "nbd+unix:///x?socket=/s&tls-type=psk",
            "nbd+unix:///x?tls-type=psk&socket=/s",
            "nbd+unix:///x?socket=/s&socket=/s",
            "nbd+unix:///x?socket=s",
            "nbd+unix:///x?socket=%00abstract",
        ] {
            assert!(expected(text).contains("socket=PATH"), "{text}");
        }
    }

    #[test]
    fn what_is_no_name_of_an_export_is_refused() {
        let long = format!("nbd://h/{}", "a".repeat(4097));
        for text in [
            "nbd://h/%00",
            "nbd://h/%",
            "nbd://h/%4",
            "nbd://h/%zz",
            "nbd://h/%ff",
            &long,
        ] {
            assert!(expected(text).contains("4096 bytes"), "{text}");
        }
        assert!(parse(&long[..long.len() - 1]).is_ok());
        for text in [
            "nbd://h/a b",
            "nbd://h/a\n",
            "nbd://h/\u{e9}",
            "nbd://h/a#b",
        ] {
            assert!(expected(text).contains("percent-encoded"), "{text}");
        }
    }

    #[test]
    fn what_is_no_host_is_refused() {
        let hosts = ":1 h: h:0 h:65536 h:01 h:+1 a..b .a ::1 [::1 [h] [::1]x h%20 \
                     127.1 010.0.0.1 2130706433 0x7f000001 a.0X1";
        for host in hosts.split(' ').chain([""]) {
            let uri = format!("nbd://{host}/x");
            assert!(expected(&uri).contains("HOST"), "{host}");
        }
        assert!(expected("nbd+unix://h/x?socket=/s").contains("three slashes"));
        for text in [
            "",
            "nbd",
            "nbd:",
            "nbd:h",
            "nbd:unix:/s",
            "http://h",
            "nbd+vsock://1",
        ] {
            assert!(expected(text).contains("or nbd+unix"), "{text}");
        }
    }
}
