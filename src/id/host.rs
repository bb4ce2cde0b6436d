//! Parses the host of a URI strictly: it refuses text that two parsers could take for two
//! different hosts.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::text::decimal;

/// Parses `HOST` or `HOST:PORT`, IPv6 in brackets, to the canonical host and the port. Port
/// 0 is refused.
pub(super) fn host_and_port(authority: &str) -> Option<(String, Option<u16>)> {
    let (host, port) = split_port(authority)?;
    let host = match without_brackets(host) {
        Some(literal) => literal.parse::<Ipv6Addr>().ok()?.to_string(),
        None => canonical_host(host)?,
    };
    Some((host, port))
}

/// Splits off the port and leaves the host as written, with its brackets. Port 0 is
/// refused.
pub(super) fn split_port(authority: &str) -> Option<(&str, Option<u16>)> {
    let end = match authority.strip_prefix('[') {
        Some(rest) => rest.find(']')? + 2,
        None => authority.find(':').unwrap_or(authority.len()),
    };
    let (host, port) = authority.split_at(end);
    let port = match port.strip_prefix(':') {
        Some(port) => Some(decimal(port).filter(|port| *port != 0)?),
        None if port.is_empty() => None,
        None => return None,
    };
    Some((host, port))
}

pub(super) fn without_brackets(host: &str) -> Option<&str> {
    host.strip_prefix('[')?.strip_suffix(']')
}

/// An address in its canonical spelling, IPv6 without brackets, or a name in lower case.
pub(super) fn canonical_host(host: &str) -> Option<String> {
    if let Ok(address) = host.parse::<Ipv6Addr>() {
        return Some(address.to_string());
    }
    let host = host.to_ascii_lowercase();
    let labels = host.strip_suffix('.').unwrap_or(&host);
    let is_label = |label: &str| {
        let mut bytes = label.bytes();
        !label.is_empty() && bytes.all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    let is_name = labels.len() <= 253 && labels.split('.').all(is_label);
    // getaddrinfo also takes 127.1, 010.0.0.1 and 0x7f000001 for addresses.
    let last = labels.rsplit('.').next().unwrap_or_default();
    let is_number = last.bytes().all(|b| b.is_ascii_digit()) || last.starts_with("0x");
    let usable = is_name && (!is_number || host.parse::<Ipv4Addr>().is_ok());
    usable.then_some(host)
}
