//! What tests of sessions ask of a target, whoever makes it.

use super::iscsi_target::{IscsiTarget, PORTALS};
use super::lio::Store;
use super::tcp_reset::{cut_connections, reset_connections};
use super::tgt::Tgt;

/// A target that listens at all of [`PORTALS`] and lets everybody in.
pub trait Served: Sized + Sync {
    /// Presents a volume of so many bytes at each of these LUNs.
    #[must_use]
    fn serve(iqn: &str, luns: &[u64], bytes: u64) -> Self;

    /// Its name.
    fn iqn(&self) -> &str;

    /// Asks everybody for CHAP with this name and secret.
    fn ask_for_chap(&mut self, user: (&str, &str));

    /// Listens at a portal of [`PORTALS`] no more; its connections stay.
    fn close(&mut self, portal: usize);

    /// Listens there again; initiators come back when they try next.
    fn portal_up(&mut self, portal: usize);

    /// Ends all its sessions and takes no new ones.
    fn stop(&mut self);

    /// Takes sessions again.
    fn start(&mut self);

    /// How many sessions it has.
    fn sessions(&self) -> usize;

    /// A LUN as a source has it.
    #[must_use]
    fn written(lun: u64) -> String {
        lun.to_string()
    }

    /// The source that is a LUN of it over these of [`PORTALS`].
    fn uri(&self, portals: &[usize], lun: u64) -> String {
        let portals: Vec<&str> = portals.iter().map(|&at| PORTALS[at]).collect();
        let lun = Self::written(lun);
        format!("iscsi://{}/{}/{lun}", portals.join(","), self.iqn())
    }

    /// Stops to listen at a portal of [`PORTALS`] and cuts its connections:
    /// sessions go to FAILED at once.
    fn portal_down(&mut self, portal: usize) {
        self.close(portal);
        reset_connections(PORTALS[portal].parse().expect("a portal"));
    }

    /// Cuts the connections that there are now at a portal of [`PORTALS`], and goes
    /// on listening.
    fn cut(&self, portal: usize) {
        cut_connections(PORTALS[portal].parse().expect("a portal"));
    }
}

impl Served for IscsiTarget {
    fn serve(iqn: &str, luns: &[u64], bytes: u64) -> Self {
        let mut target = Self::new(iqn);
        for &lun in luns {
            target.map(lun, &Store::file(&format!("{lun:x}5e"), bytes));
        }
        target
    }

    fn iqn(&self) -> &str {
        self.iqn()
    }

    fn ask_for_chap(&mut self, user: (&str, &str)) {
        Self::ask_for_chap(self, user, None);
    }

    fn close(&mut self, portal: usize) {
        Self::close(self, portal);
    }

    fn portal_up(&mut self, portal: usize) {
        Self::portal_up(self, portal);
    }

    fn stop(&mut self) {
        Self::stop(self);
    }

    fn start(&mut self) {
        Self::start(self);
    }

    fn sessions(&self) -> usize {
        self.sessions()
    }
}

impl Served for Tgt {
    fn serve(iqn: &str, luns: &[u64], bytes: u64) -> Self {
        Self::with("0", &PORTALS, iqn, luns, bytes)
    }

    /// It presents those over 255 in flat addressing; another is not taken by all of
    /// its releases.
    fn written(lun: u64) -> String {
        match lun {
            0..=255 => lun.to_string(),
            _ => format!("flat-{lun}"),
        }
    }

    fn iqn(&self) -> &str {
        self.iqn()
    }

    fn ask_for_chap(&mut self, user: (&str, &str)) {
        Self::ask_for_chap(self, user, None);
    }

    fn close(&mut self, portal: usize) {
        self.portal("delete", PORTALS[portal]);
    }

    fn portal_up(&mut self, portal: usize) {
        self.portal("new", PORTALS[portal]);
    }

    fn stop(&mut self) {
        self.kill();
    }

    fn start(&mut self) {
        self.start_again();
    }

    fn sessions(&self) -> usize {
        self.connections()
    }
}
