//! An iSCSI target of the kernel's, on the loopback interface.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::lio::{self, PortGroup, Store};
use super::tcp_reset::{cut_connections, reset_connections};

const FABRIC: &str = "/sys/kernel/config/target/iscsi";

/// The portals of every target: three paths to the same volumes.
pub const PORTALS: [&str; 3] = ["127.0.0.1:3260", "127.0.0.2:3260", "[::1]:3260"];

/// A target with one portal group. Dropping it ends its sessions and removes it.
#[derive(Debug)]
pub struct IscsiTarget {
    iqn: String,
    group: PathBuf,
    luns: BTreeMap<u64, Store>,
}

impl IscsiTarget {
    /// Listens at all of [`PORTALS`], accepts every initiator, and presents no LUN yet.
    #[must_use]
    pub fn new(iqn: &str) -> Self {
        super::enter();
        lio::mount_configfs();
        super::modprobe("iscsi_target_mod", &[]);
        let group = PathBuf::from(format!("{FABRIC}/{iqn}/tpgt_1"));
        fs::create_dir_all(&group).unwrap_or_else(|error| panic!("{}: {error}", group.display()));
        let target = Self {
            iqn: iqn.to_owned(),
            group,
            luns: BTreeMap::new(),
        };
        for (attribute, value) in [
            ("authentication", "0"),
            ("generate_node_acls", "1"),
            ("demo_mode_write_protect", "0"),
            ("cache_dynamic_acls", "1"),
        ] {
            lio::write(&target.group.join("attrib").join(attribute), value);
        }
        for portal in 0..PORTALS.len() {
            target.portal_up(portal);
        }
        target.start();
        target
    }

    /// The target's name.
    #[must_use]
    pub fn iqn(&self) -> &str {
        &self.iqn
    }

    /// The source of a LUN of this target over these of [`PORTALS`].
    #[must_use]
    pub fn uri(&self, portals: &[usize], lun: u64) -> String {
        let portals: Vec<&str> = portals.iter().map(|&at| PORTALS[at]).collect();
        format!("iscsi://{}/{}/{lun}", portals.join(","), self.iqn)
    }

    /// Asks every initiator for CHAP with this name and secret. With `mutual` the target proves
    /// itself too.
    pub fn ask_for_chap(&self, user: (&str, &str), mutual: Option<(&str, &str)>) {
        let (mutual_user, mutual_secret) = mutual.unwrap_or(("NULL", "NULL"));
        for (attribute, value) in [
            ("auth/userid", user.0),
            ("auth/password", user.1),
            ("auth/userid_mutual", mutual_user),
            ("auth/password_mutual", mutual_secret),
            ("attrib/authentication", "1"),
        ] {
            lio::write(&self.group.join(attribute), value);
        }
    }

    /// Accepts every initiator again.
    pub fn ask_for_no_chap(&self) {
        lio::write(&self.group.join("attrib/authentication"), "0");
    }

    /// How many sessions the target has.
    #[must_use]
    pub fn sessions(&self) -> usize {
        let path = self.group.join("dynamic_sessions");
        let text = fs::read_to_string(&path).unwrap_or_default();
        text.split('\0')
            .filter(|line| !line.trim().is_empty())
            .count()
    }

    /// Presents a volume, also to existing sessions.
    pub fn map(&mut self, lun: u64, store: &Store) {
        store.present_at(&self.lun_dir(lun));
        self.luns.insert(lun, store.clone());
    }

    /// Presents a volume at a port of this group, which is one of the volume's groups.
    pub fn map_in_group(&mut self, lun: u64, store: &Store, group: &PortGroup) {
        self.map(lun, store);
        group.take_in(&self.lun_dir(lun));
    }

    /// Stops presenting the LUN; initiators are not told.
    pub fn unmap(&mut self, lun: u64) {
        let dir = self.lun_dir(lun);
        lio::present_no_more(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        self.luns.remove(&lun);
    }

    /// Presents another volume at the same LUN; initiators are not told.
    pub fn remap(&mut self, lun: u64, store: &Store) {
        self.unmap(lun);
        self.map(lun, store);
    }

    /// Stops listening at a portal of [`PORTALS`] and cuts its connections, also those of other
    /// targets: sessions go to FAILED at once.
    pub fn portal_down(&self, portal: usize) {
        self.close(portal);
        reset_connections(PORTALS[portal].parse().expect("a portal"));
    }

    /// Stops listening at a portal of [`PORTALS`]; its connections stay.
    pub fn close(&self, portal: usize) {
        let dir = self.portal_dir(portal);
        fs::remove_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    }

    /// Cuts the present connections at a portal of [`PORTALS`], also those of other targets,
    /// and keeps listening.
    pub fn cut(&self, portal: usize) {
        assert!(self.portal_dir(portal).exists(), "it listens");
        cut_connections(PORTALS[portal].parse().expect("a portal"));
    }

    /// Listens there again; initiators come back at their next try.
    pub fn portal_up(&self, portal: usize) {
        self.listen(PORTALS[portal]);
    }

    /// Listens at another portal.
    pub fn listen(&self, portal: &str) {
        let dir = self.group.join("np").join(portal);
        fs::create_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    }

    /// Ends all sessions of the target and accepts no new ones.
    pub fn stop(&self) {
        lio::write(&self.group.join("enable"), "0");
    }

    /// Accepts sessions again.
    pub fn start(&self) {
        lio::write(&self.group.join("enable"), "1");
    }

    fn lun_dir(&self, lun: u64) -> PathBuf {
        self.group.join(format!("lun/lun_{lun}"))
    }

    fn portal_dir(&self, portal: usize) -> PathBuf {
        self.group.join("np").join(PORTALS[portal])
    }
}

impl Drop for IscsiTarget {
    fn drop(&mut self) {
        let _removed_below = fs::write(self.group.join("enable"), "0");
        for lun in self.luns.keys() {
            let dir = self.lun_dir(*lun);
            if let Err(error) = lio::present_no_more(&dir) {
                eprintln!("{} stays: {error}", dir.display());
            }
        }
        let portals = self.group.join("np");
        for portal in super::entries(&portals) {
            lio::remove_dir(&portals.join(portal));
        }
        lio::remove_dir(&self.group);
        lio::remove_dir(self.group.parent().unwrap_or(Path::new(FABRIC)));
    }
}

/// The authentication that LIO requires for discovery. Dropping it removes the requirement.
#[derive(Debug)]
pub struct DiscoveryAuth(());

impl DiscoveryAuth {
    /// Requires CHAP with this name and secret; with `mutual` LIO proves itself too.
    #[must_use]
    pub fn chap(user: &str, secret: &str, mutual: Option<(&str, &str)>) -> Self {
        super::enter();
        let auth = Self(());
        let (mutual_user, mutual_secret) = mutual.unwrap_or(("NULL", "NULL"));
        for (attribute, value) in [
            ("userid", user),
            ("password", secret),
            ("userid_mutual", mutual_user),
            ("password_mutual", mutual_secret),
            ("enforce_discovery_auth", "1"),
        ] {
            lio::write(&Self::attribute(attribute), value);
        }
        auth
    }

    fn attribute(name: &str) -> PathBuf {
        Path::new(FABRIC).join("discovery_auth").join(name)
    }
}

impl Drop for DiscoveryAuth {
    fn drop(&mut self) {
        lio::write(&Self::attribute("enforce_discovery_auth"), "0");
        for name in ["userid", "password", "userid_mutual", "password_mutual"] {
            lio::write(&Self::attribute(name), "NULL");
        }
    }
}
