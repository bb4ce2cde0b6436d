//! Cuts TCP connections as `ss -K` does, by netlink's `SOCK_DESTROY`. `ss` itself would bring
//! libtirpc and the six libraries of Kerberos into each guest (`ldd`, iproute2 6.1.0), and load
//! them at each call.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use netlink_sys::{Socket, SocketAddr as NetlinkAddr, protocols::NETLINK_SOCK_DIAG};
use nix::errno::Errno;

// From <linux/sock_diag.h>, <linux/inet_diag.h> and <linux/netlink.h>.
const SOCK_DESTROY: u16 = 21;
const REQUEST_AND_ACK: u16 = 1 | 4;
const NO_COOKIE: u32 = !0;
const HEADER: usize = 16;
/// States in `/proc/net/tcp`: a listener, and `TIME_WAIT`. 5.10 refuses to destroy the latter
/// (`tcp_abort`: `EOPNOTSUPP`), and no process has it open.
const NO_ENDS: [&str; 2] = ["0A", "06"];

/// One end of a connection: the local address and the remote one.
type End = (SocketAddr, SocketAddr);

/// Resets every connection from or to `address`. None is left when this returns, and both ends
/// were told.
pub(super) fn reset_connections(address: SocketAddr) {
    let socket = open();
    super::wait_until("the connections to end", Duration::from_secs(10), || {
        let ends = ends_at(address);
        reset(&socket, &ends);
        ends.is_empty().then_some(())
    });
}

/// Resets the present connections to `address` by the end that dialled, which tells the other
/// end. New connections may come, and the listener stays: if the kernel does not find the other
/// end any more, it would destroy the listener instead (`inet_lookup`).
pub(super) fn cut_connections(address: SocketAddr) {
    let socket = open();
    let mut ends = ends_at(address);
    ends.retain(|(_, there)| *there == address);
    assert!(!ends.is_empty(), "nothing to cut at {address}");
    reset(&socket, &ends);
}

/// Resets the connection from `client` to `address` by the end that dialled.
pub(super) fn cut_connection(client: SocketAddr, address: SocketAddr) {
    reset(&open(), &[(client, address)]);
}

/// The clients with an established connection to `address`.
pub(super) fn clients_of(address: SocketAddr) -> Vec<SocketAddr> {
    const ESTABLISHED: &str = "01";
    let is_established = |line: &&str| line.split_whitespace().nth(3) == Some(ESTABLISHED);
    let table = table();
    let ends = table.lines().filter(is_established).filter_map(end);
    let to_it = ends.filter(|(_, there)| *there == address);
    to_it.map(|(here, _)| here).collect()
}

fn open() -> Socket {
    super::modprobe("tcp_diag", &[]);
    Socket::new(NETLINK_SOCK_DIAG).expect("a netlink socket")
}

fn reset(socket: &Socket, ends: &[End]) {
    let kernel = NetlinkAddr::new(0, 0);
    for end in ends {
        socket
            .send_to(&request(*end), &kernel, 0)
            .expect("SOCK_DESTROY");
        let mut answer = Vec::with_capacity(4096);
        socket.recv(&mut answer, 0).expect("SOCK_DESTROY's answer");
        let errno = answer
            .get(HEADER..HEADER + 4)
            .and_then(|errno| errno.try_into().ok());
        let errno = -i32::from_ne_bytes(errno.expect("an errno"));
        // The connection went, or is in TIME_WAIT, since the table was read.
        let gone_meanwhile = [Errno::ENOENT, Errno::EOPNOTSUPP].map(|errno| errno as i32);
        assert!(
            errno == 0 || gone_meanwhile.contains(&errno),
            "SOCK_DESTROY of {end:?}: errno {errno}"
        );
    }
}

/// A message of `nlmsghdr` and `inet_diag_req_v2`.
fn request((here, there): End) -> Vec<u8> {
    let family = if here.is_ipv4() { 2 } else { 10 };
    let mut body = vec![family, 6, 0, 0];
    body.extend(u32::MAX.to_ne_bytes());
    body.extend(here.port().to_be_bytes());
    body.extend(there.port().to_be_bytes());
    for ip in [here.ip(), there.ip()] {
        let mut bytes = match ip {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        bytes.resize(16, 0);
        body.extend(bytes);
    }
    for word in [0, NO_COOKIE, NO_COOKIE] {
        body.extend(word.to_ne_bytes());
    }
    let length = u32::try_from(HEADER + body.len()).expect("a short message");
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(SOCK_DESTROY.to_ne_bytes());
    message.extend(REQUEST_AND_ACK.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn table() -> String {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].iter();
    tables
        .map(|path| fs::read_to_string(path).unwrap_or_default())
        .collect()
}

fn ends_at(address: SocketAddr) -> Vec<End> {
    let mut ends: Vec<End> = table().lines().filter_map(end).collect();
    ends.retain(|(here, there)| *here == address || *there == address);
    ends
}

/// Parses `SL: LOCAL REMOTE STATE ...`; `None` for the heading.
fn end(line: &str) -> Option<End> {
    let mut fields = line.split_whitespace().skip(1);
    let ends = (parse(fields.next()?)?, parse(fields.next()?)?);
    (!NO_ENDS.contains(&fields.next()?)).then_some(ends)
}

/// Parses `0100007F:0CBC`: words of four bytes in this machine's byte order.
fn parse(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let words = ip.as_bytes().chunks(8).map(|word| {
        let word = std::str::from_utf8(word).ok()?;
        Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
    });
    let bytes = words.collect::<Option<Vec<_>>>()?.concat();
    let ip = match bytes.len() {
        4 => Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into(),
        _ => Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into(),
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let line = "   1: 0200007F:0CBC 0100007F:8F6E 01 00000000:00000000 00:00000000";
        let ends = ("127.0.0.2:3260", "127.0.0.1:36718");
        let ends = (ends.0.parse().unwrap(), ends.1.parse().unwrap());
        assert_eq!(end(line), Some(ends));
        for state in NO_ENDS {
            assert_eq!(end(&line.replace(" 01 ", &format!(" {state} "))), None);
        }
        assert_eq!(end("  sl  local_address rem_address   st tx_queue"), None);
        let six = "00000000000000000000000001000000:0CBC";
        assert_eq!(parse(six), Some("[::1]:3260".parse().unwrap()));
    }
}
