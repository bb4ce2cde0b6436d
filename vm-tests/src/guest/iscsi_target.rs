//! An iSCSI target of the kernel's, on the loopback interface.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::lio::{self, PortGroup, Store};
use super::tcp_reset::{cut_connections, reset_connections};

const FABRIC: &str = "/sys/kernel/config/target/iscsi";

/// Where every target listens: three ways to the same volumes.
pub const PORTALS: [&str; 3] = ["127.0.0.1:3260", "127.0.0.2:3260", "[::1]:3260"];

/// A target with one portal group; dropping it ends its sessions and removes
/// it.
#[derive(Debug)]
pub struct IscsiTarget {
    iqn: String,
    group: PathBuf,
    luns: BTreeMap<u64, Store>,
}

impl IscsiTarget {
    /// Listens at all of [`PORTALS`]; lets everybody in, presents nothing yet.
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

    /// Its name.
    #[must_use]
    pub fn iqn(&self) -> &str {
        &self.iqn
    }

    /// The source that is a LUN of it over these of [`PORTALS`].
    #[must_use]
    pub fn uri(&self, portals: &[usize], lun: u64) -> String {
        let portals: Vec<&str> = portals.iter().map(|&at| PORTALS[at]).collect();
        format!("iscsi://{}/{}/{lun}", portals.join(","), self.iqn)
    }

    /// Asks everybody for CHAP with this name and secret; and proves itself with
    /// `mutual`.
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

    /// Lets everybody in again.
    pub fn ask_for_no_chap(&self) {
        lio::write(&self.group.join("attrib/authentication"), "0");
    }

    /// How many sessions it has.
    #[must_use]
    pub fn sessions(&self) -> usize {
        let path = self.group.join("dynamic_sessions");
        let text = fs::read_to_string(&path).unwrap_or_default();
        text.split('\0')
            .filter(|line| !line.trim().is_empty())
            .count()
    }

    /// Presents a volume, to the sessions that are there as well.
    pub fn map(&mut self, lun: u64, store: &Store) {
        store.present_at(&self.lun_dir(lun));
        self.luns.insert(lun, store.clone());
    }

    /// Presents a volume at a port of this group, which is one of the volume's.
    pub fn map_in_group(&mut self, lun: u64, store: &Store, group: &PortGroup) {
        self.map(lun, store);
        group.take_in(&self.lun_dir(lun));
    }

    /// Presents it no more; initiators are not told.
    pub fn unmap(&mut self, lun: u64) {
        let dir = self.lun_dir(lun);
        lio::present_no_more(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        self.luns.remove(&lun);
    }

    /// Presents another volume under the same number; initiators are not told.
    pub fn remap(&mut self, lun: u64, store: &Store) {
        self.unmap(lun);
        self.map(lun, store);
    }

    /// Stops to listen at a portal of [`PORTALS`] and cuts its connections,
    /// those of other targets there too: sessions go to FAILED at once.
    pub fn portal_down(&self, portal: usize) {
        self.close(portal);
        reset_connections(PORTALS[portal].parse().expect("a portal"));
    }

    /// Stops to listen at a portal of [`PORTALS`]; the connections there stay.
    pub fn close(&self, portal: usize) {
        let dir = self.portal_dir(portal);
        fs::remove_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    }

    /// Cuts the connections that there are now at a portal of [`PORTALS`], those of
    /// other targets there too, and goes on listening.
    pub fn cut(&self, portal: usize) {
        assert!(self.portal_dir(portal).exists(), "it listens");
        cut_connections(PORTALS[portal].parse().expect("a portal"));
    }

    /// Listens there again; initiators come back when they try next.
    pub fn portal_up(&self, portal: usize) {
        self.listen(PORTALS[portal]);
    }

    /// Listens at one more portal.
    pub fn listen(&self, portal: &str) {
        let dir = self.group.join("np").join(portal);
        fs::create_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    }

    /// Ends all its sessions and takes no new ones.
    pub fn stop(&self) {
        lio::write(&self.group.join("enable"), "0");
    }

    /// Takes sessions again.
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

/// What LIO asks of everybody who wants its list of targets; dropping it asks
/// for nothing again.
#[derive(Debug)]
pub struct DiscoveryAuth(());

impl DiscoveryAuth {
    /// CHAP with this name and secret; and LIO proves itself with `mutual`.
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
