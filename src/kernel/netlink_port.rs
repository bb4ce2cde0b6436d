//! The process that holds a port of a netlink protocol. The kernel lets every user bind any
//! free port (`netlink_bind`).

use std::fs;
use std::time::Duration;

use super::{Roots, proc_file, process, sysfs, worker};
use crate::deadline::Deadline;
use crate::error::{Result, Stage};

/// The holder of a port.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The process, in words.
    pub(crate) description: String,
    /// Whether the kernel may obey the requests on that socket; `false` only if each process
    /// that has the socket lacks `CAP_SYS_ADMIN` over the machine (`netlink_capable` of
    /// `iscsi_if_recv_msg`).
    pub(crate) may_administer: bool,
}

impl Holder {
    /// The holder of a port that was taken at each try, and free each time in between.
    pub(crate) fn one_after_another() -> Self {
        Self {
            description: "one process after another".to_owned(),
            may_administer: true,
        }
    }
}

/// The process that has this port of this protocol in our network namespace; `None` if none
/// has it, or the kernel does not show it. The look at all processes takes `limit` at most.
pub(crate) fn holder(roots: &Roots, protocol: isize, port: u32, limit: Duration) -> Option<Holder> {
    let table = proc_file::read_text(&roots.proc.join("net/netlink")).ok()?;
    let inode = inode_in(&table, protocol, port)?;
    let socket = format!("socket:[{inode}]");
    let unknown = |description| Holder {
        description,
        may_administer: true,
    };
    let pids = match processes_with(roots, &socket, limit) {
        Ok(pids) => pids,
        Err(error) => {
            let description = format!("a process that was not found ({error}), with {socket},");
            return Some(unknown(description));
        }
    };
    let Some(first) = pids.first() else {
        let description = format!("a process that this process cannot see, with {socket},");
        return Some(unknown(description));
    };
    let command = sysfs::read(&roots.proc.join(format!("{first}/comm"))).unwrap_or_default();
    Some(Holder {
        description: format!("process {first} ({command})"),
        may_administer: pids.iter().any(|pid| process::may_administer(roots, *pid)),
    })
}

/// The processes that have this socket. The look at a descriptor may be the last close of a
/// device, which waits until its pages are written back.
fn processes_with(roots: &Roots, socket: &str, limit: Duration) -> Result<Vec<u32>> {
    let (roots, socket) = (roots.clone(), socket.to_owned());
    let last_seen =
        || "the last close of a device may be waiting for its pages to be written".to_owned();
    worker::run(
        Stage::Session,
        "a look at the sockets of all processes",
        Deadline::after(limit),
        last_seen,
        move || {
            let has_it = |pid: &u32| {
                let descriptors = roots.proc.join(format!("{pid}/fd"));
                let descriptors = fs::read_dir(descriptors).into_iter().flatten().flatten();
                let mut links = descriptors.map(|one| fs::read_link(one.path()));
                links.any(|link| link.is_ok_and(|link| link.as_os_str() == &*socket))
            };
            let mut pids = process::pids(&roots)?;
            pids.retain(has_it);
            Ok(pids)
        },
    )
}

/// The socket's inode from `/proc/net/netlink` (`netlink_native_seq_show`): the second column
/// is the protocol, the third the port and the last the inode.
fn inode_in(table: &str, protocol: isize, port: u32) -> Option<&str> {
    let mut sockets = table.lines().skip(1).map(str::split_ascii_whitespace);
    sockets.find_map(|mut columns| {
        let its_protocol: isize = columns.nth(1)?.parse().ok()?;
        let its_port: u32 = columns.next()?.parse().ok()?;
        let inode = columns.last()?;
        (its_protocol == protocol && its_port == port).then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use netlink_sys::Socket;
    use netlink_sys::protocols::{NETLINK_GENERIC, NETLINK_ROUTE};

    use super::*;

    const TABLE: &str = "\
sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
0000000000000000 0   4294967295 00000111 0        0        0     2        0        17
0000000000000000 8   812        00000001 0        0        0     2        0        18
0000000000000000 8   4294967295 00000000 0        0        0     2        0        19
";

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn the_process_that_has_a_port_is_found_behind_more_sockets_than_one_read_returns() {
        const MANY: usize = 200;
        let roots = Roots::default();
        let bound = |protocol| {
            let mut socket = Socket::new(protocol).unwrap();
            let address = socket.bind_auto().unwrap();
            (socket, address.port_number())
        };
        // The kernel lists the sockets by their protocols, and `NETLINK_ROUTE` comes first.
        let _before: Vec<_> = (0..MANY).map(|_| bound(NETLINK_ROUTE)).collect();
        let (_socket, port) = bound(NETLINK_GENERIC);
        let found = holder(&roots, NETLINK_GENERIC, port, LIMIT).expect("a holder");
        let own = format!("process {} (", std::process::id());
        assert!(found.description.starts_with(&own), "{found:?}");
    }

    #[test]
    fn the_process_that_has_a_port_is_named_by_its_socket() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let make = |name: &str, text: &str| {
            let path = roots.proc.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(holder(&roots, 8, u32::MAX, LIMIT), None);
        make("net/netlink", TABLE);
        let unseen = holder(&roots, 8, u32::MAX, LIMIT).unwrap();
        assert!(unseen.description.contains("cannot see") && unseen.may_administer);
        make("812/comm", "holder\n");
        fs::create_dir_all(roots.proc.join("812/fd")).unwrap();
        std::os::unix::fs::symlink("socket:[19]", roots.proc.join("812/fd/3")).unwrap();
        for (capabilities, may_administer) in [
            ("000001ffffffffff", true),
            ("0000000000200000", true),
            ("000001ffffdfffff", false),
            ("0", false),
        ] {
            make(
                "812/status",
                &format!("Name:\tholder\nCapEff:\t{capabilities}\n"),
            );
            let description = "process 812 (holder)".to_owned();
            let seen = Holder {
                description,
                may_administer,
            };
            assert_eq!(holder(&roots, 8, u32::MAX, LIMIT), Some(seen));
        }
        // Its capabilities are those over another user namespace.
        make("812/status", "CapEff:\t000001ffffffffff\n");
        make("812/ns/user", "");
        assert!(!holder(&roots, 8, u32::MAX, LIMIT).unwrap().may_administer);
        assert_eq!(holder(&roots, 8, 813, LIMIT), None);
    }
}
