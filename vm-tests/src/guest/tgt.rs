//! tgt, a target that runs as a process outside the kernel.

use std::fs;
use std::process::Command;

use super::daemon::Daemon;

/// tgtadm finds its daemon through a socket in this directory.
const SOCKETS: &str = "/var/run/tgtd";
const FILE: &str = "/tmp/tgt-volume";

/// A `tgtd` with one target. The target's LUN 0 is its controller and not a disk. Dropping it
/// ends the daemon.
#[derive(Debug)]
pub struct Tgt {
    daemon: Option<Daemon>,
    control_port: &'static str,
    portals: Vec<String>,
    iqn: String,
    luns: Vec<u64>,
    chap: Option<Chap>,
}

/// A name and a secret.
type Account = (String, String);

/// The CHAP account that the target requires, and its own account for mutual CHAP.
#[derive(Debug, Clone)]
struct Chap {
    user: Account,
    mutual: Option<Account>,
}

impl Tgt {
    /// Listens at `portal`, with one volume at LUN 1, and accepts every initiator. Each of two
    /// daemons that run at once needs its own control port.
    #[must_use]
    pub fn start(control_port: &'static str, portal: &str, iqn: &str, bytes: u64) -> Self {
        Self::with(control_port, &[portal], iqn, &[1], bytes)
    }

    /// The same with several portals and LUNs, each LUN with a volume of this many bytes.
    #[must_use]
    pub fn with(
        control_port: &'static str,
        portals: &[&str],
        iqn: &str,
        luns: &[u64],
        bytes: u64,
    ) -> Self {
        super::enter();
        fs::create_dir_all(SOCKETS).expect(SOCKETS);
        let mut tgt = Self {
            daemon: None,
            control_port,
            portals: portals.iter().map(|&portal| portal.to_owned()).collect(),
            iqn: iqn.to_owned(),
            luns: luns.to_vec(),
            chap: None,
        };
        for lun in luns {
            let file = tgt.file(*lun);
            let volume = fs::File::create(&file).expect(&file);
            volume.set_len(bytes).expect("the volume's size");
        }
        tgt.start_again();
        tgt
    }

    /// Starts the daemon, which forgets everything but the data, and configures it again.
    pub fn start_again(&mut self) {
        assert!(self.daemon.is_none(), "tgtd runs already");
        let (port, first) = (self.control_port, format!("portal={}", self.portals[0]));
        let command = ["tgtd", "-f", "-C", port, "--iscsi", &first];
        let ask = ["--lld", "iscsi", "--op", "show", "--mode", "target"];
        let daemon = Daemon::start(&command, || {
            let shown = Command::new("tgtadm").args(["-C", port]).args(ask).output();
            shown.is_ok_and(|shown| shown.status.success())
        });
        self.daemon = Some(daemon);
        self.admin("new", "target", &["-T", &self.iqn]);
        for lun in &self.luns {
            let number = lun.to_string();
            self.admin(
                "new",
                "logicalunit",
                &["--lun", &number, "-b", &self.file(*lun)],
            );
        }
        for digest in ["HeaderDigest", "DataDigest"] {
            self.update(digest, "CRC32C,None");
        }
        if let Some(chap) = &self.chap {
            self.tell_of(chap);
        }
        for portal in &self.portals[1..] {
            self.portal("new", portal);
        }
        // Before this the target accepts no initiator, so none finds a target without its
        // units.
        self.admin("bind", "target", &["-I", "ALL"]);
    }

    /// Kills the daemon (SIGKILL); the data stays.
    pub fn kill(&mut self) {
        self.daemon.take().expect("a running tgtd").kill();
    }

    /// Starts (`new`) or stops (`delete`) listening at a portal.
    pub(super) fn portal(&self, operation: &str, portal: &str) {
        let portal = format!("portal={portal}");
        let command = self.command(operation, "portal");
        super::run(&[&command[..], &["--param", &portal]].concat());
    }

    /// Only this command ends the daemon; a signal does not.
    fn end(&mut self) {
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
    }

    fn file(&self, lun: u64) -> String {
        format!("{FILE}-{}-{lun}", self.control_port)
    }

    /// The target's name.
    #[must_use]
    pub fn iqn(&self) -> &str {
        &self.iqn
    }

    /// Redirects every login to another portal.
    pub fn redirect(&self, address: &str, port: &str) {
        for (name, value) in [
            ("RedirectAddress", address),
            ("RedirectPort", port),
            ("RedirectReason", "Temporary"),
        ] {
            self.update(name, value);
        }
    }

    /// Asks every initiator for CHAP with this name and secret. With `mutual` the target proves
    /// itself too.
    pub fn ask_for_chap(&mut self, user: (&str, &str), mutual: Option<(&str, &str)>) {
        let own = |(name, secret): (&str, &str)| (name.to_owned(), secret.to_owned());
        let chap = Chap {
            user: own(user),
            mutual: mutual.map(own),
        };
        self.tell_of(&chap);
        self.chap = Some(chap);
    }

    fn tell_of(&self, chap: &Chap) {
        let accounts = [
            Some((&chap.user, &[][..])),
            chap.mutual.as_ref().map(|own| (own, &["--outgoing"][..])),
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

    /// How many connections its sessions have, according to tgt.
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

    /// Runs a command for its only target.
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
        if self.daemon.is_some() {
            self.end();
        }
        for lun in &self.luns {
            let _never_made = fs::remove_file(self.file(*lun));
        }
    }
}
