//! tgt, the target that is a process and not the kernel's.

use std::fs;
use std::process::Command;

use super::daemon::Daemon;

/// tgtadm finds its daemon by a socket there.
const SOCKETS: &str = "/var/run/tgtd";
const FILE: &str = "/tmp/tgt-volume";

/// A `tgtd` with one target, and one volume of it at LUN 1: LUN 0 is its
/// controller and no disk. Dropping it ends it.
#[derive(Debug)]
pub struct Tgt {
    daemon: Option<Daemon>,
    control_port: &'static str,
    iqn: String,
}

impl Tgt {
    /// Listens at `portal`; lets everybody in. Two that run beside each other
    /// have a control port each.
    #[must_use]
    pub fn start(control_port: &'static str, portal: &str, iqn: &str, bytes: u64) -> Self {
        super::enter();
        fs::create_dir_all(SOCKETS).expect(SOCKETS);
        let file = format!("{FILE}-{control_port}");
        let volume = fs::File::create(&file).expect(&file);
        volume.set_len(bytes).expect("the volume's size");
        let portal = format!("portal={portal}");
        let command = ["tgtd", "-f", "-C", control_port, "--iscsi", &portal];
        let ask = ["--lld", "iscsi", "--op", "show", "--mode", "target"];
        let daemon = Daemon::start(&command, || {
            let shown = Command::new("tgtadm")
                .args(["-C", control_port])
                .args(ask)
                .output();
            shown.is_ok_and(|shown| shown.status.success())
        });
        let tgt = Self {
            daemon: Some(daemon),
            control_port,
            iqn: iqn.to_owned(),
        };
        tgt.admin("new", "target", &["-T", iqn]);
        tgt.admin("new", "logicalunit", &["--lun", "1", "-b", &file]);
        tgt.admin("bind", "target", &["-I", "ALL"]);
        for digest in ["HeaderDigest", "DataDigest"] {
            tgt.update(digest, "CRC32C,None");
        }
        tgt
    }

    /// Its target's name.
    #[must_use]
    pub fn iqn(&self) -> &str {
        &self.iqn
    }

    /// Sends every login on to another portal.
    pub fn redirect(&self, address: &str, port: &str) {
        for (name, value) in [
            ("RedirectAddress", address),
            ("RedirectPort", port),
            ("RedirectReason", "Temporary"),
        ] {
            self.update(name, value);
        }
    }

    /// Asks everybody for CHAP with this name and secret; and proves itself with
    /// `mutual`.
    pub fn ask_for_chap(&self, user: (&str, &str), mutual: Option<(&str, &str)>) {
        let accounts = [
            Some((user, &[][..])),
            mutual.map(|own| (own, &["--outgoing"][..])),
        ];
        for ((name, secret), direction) in accounts.into_iter().flatten() {
            let account = ["--user", name, "--password", secret];
            super::run(&[&self.command("new", "account")[..], &account].concat());
            self.admin("bind", "account", &[&account[..2], direction].concat());
        }
    }

    fn update(&self, name: &str, value: &str) {
        self.admin("update", "target", &["--name", name, "--value", value]);
    }

    /// How many connections its sessions have, as it shows them.
    #[must_use]
    pub fn connections(&self) -> usize {
        let shown = super::run(&self.command("show", "target"));
        shown.matches("Connection:").count()
    }

    fn command<'a>(&'a self, operation: &'a str, mode: &'a str) -> [&'a str; 9] {
        let port = self.control_port;
        let operation = ["--op", operation, "--mode", mode];
        let [op, operation, mode_word, mode] = operation;
        [
            "tgtadm", "-C", port, "--lld", "iscsi", op, operation, mode_word, mode,
        ]
    }

    /// On its one target.
    fn admin(&self, operation: &str, mode: &str, arguments: &[&str]) {
        super::run(
            &[
                &self.command(operation, mode)[..],
                &["--tid", "1"],
                arguments,
            ]
            .concat(),
        );
    }
}

impl Drop for Tgt {
    fn drop(&mut self) {
        // It takes no signal to end but this word.
        for (operation, mode, arguments) in [
            ("delete", "target", &["--force", "--tid", "1"][..]),
            ("delete", "system", &[]),
        ] {
            let command = [&self.command(operation, mode)[..], arguments].concat();
            let ended = Command::new(command[0]).args(&command[1..]).output();
            if !ended.as_ref().is_ok_and(|output| output.status.success()) {
                eprintln!("{command:?}: {ended:?}");
            }
        }
        self.daemon = None;
        let _never_made = fs::remove_file(format!("{FILE}-{}", self.control_port));
    }
}
