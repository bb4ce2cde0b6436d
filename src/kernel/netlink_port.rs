//! The process that holds a port of a netlink protocol. The kernel lets every user bind any
//! free port (`netlink_bind`).

use std::fs;

use super::{Roots, process, sysfs};

/// The process that has this port of this protocol in our network namespace, in words;
/// `None` where nobody has it, or the kernel does not say.
pub(crate) fn holder(roots: &Roots, protocol: isize, port: u32) -> Option<String> {
    let table = sysfs::read(&roots.proc.join("net/netlink")).ok()?;
    let inode = inode_in(&table, protocol, port)?;
    let socket = format!("socket:[{inode}]");
    let has_it = |pid: &u32| {
        let descriptors = roots.proc.join(format!("{pid}/fd"));
        let mut descriptors = fs::read_dir(descriptors).into_iter().flatten().flatten();
        descriptors.any(|one| fs::read_link(one.path()).is_ok_and(|to| to.as_os_str() == &*socket))
    };
    let pid = process::pids(roots).ok()?.into_iter().find(has_it);
    Some(match pid {
        Some(pid) => {
            let command = sysfs::read(&roots.proc.join(format!("{pid}/comm")));
            format!("process {pid} ({})", command.unwrap_or_default())
        }
        None => format!("a process that this process cannot see, with {socket}"),
    })
}

/// Of `/proc/net/netlink` (`netlink_native_seq_show`): the second column is the protocol,
/// the third the port and the last the socket's inode.
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
    use super::*;

    const TABLE: &str = "\
sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
0000000000000000 0   4294967295 00000111 0        0        0     2        0        17
0000000000000000 8   812        00000001 0        0        0     2        0        18
0000000000000000 8   4294967295 00000000 0        0        0     2        0        19
";

    #[test]
    fn the_process_that_has_a_port_is_named_by_its_socket() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let make = |name: &str, text: &str| {
            let path = roots.proc.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(holder(&roots, 8, u32::MAX), None);
        make("net/netlink", TABLE);
        let unseen = holder(&roots, 8, u32::MAX).unwrap();
        assert!(unseen.contains("cannot see"), "{unseen}");
        make("812/comm", "holder\n");
        fs::create_dir_all(roots.proc.join("812/fd")).unwrap();
        std::os::unix::fs::symlink("socket:[19]", roots.proc.join("812/fd/3")).unwrap();
        let seen = holder(&roots, 8, u32::MAX);
        assert_eq!(seen.as_deref(), Some("process 812 (holder)"));
        assert_eq!(holder(&roots, 8, 813), None);
    }
}
