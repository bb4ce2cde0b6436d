//! The operations on a target that tests of sessions need, whatever the kind of target.

use super::iscsi_target::{IscsiTarget, PORTALS};
use super::lio::Store;
use super::tcp_reset::{cut_connections, reset_connections};
use super::tgt::Tgt;

/// A target that listens at all of [`PORTALS`] and accepts every initiator.
pub trait Served: Sized + Sync {
    /// Presents a volume of this many bytes at each of these LUNs.
    #[must_use]
    fn serve(iqn: &str, luns: &[u64], bytes: u64) -> Self;

    /// The target's name.
    fn iqn(&self) -> &str;

    /// Asks every initiator for CHAP with this name and secret.
    fn ask_for_chap(&mut self, user: (&str, &str));

    /// Stops listening at a portal of [`PORTALS`]; its connections stay.
    fn close(&mut self, portal: usize);

    /// Listens there again; initiators come back at their next try.
    fn portal_up(&mut self, portal: usize);

    /// Ends all sessions and accepts no new ones.
    fn stop(&mut self);

    /// Accepts sessions again.
    fn start(&mut self);

    /// How many sessions the target has.
    fn sessions(&self) -> usize;

    /// A LUN as a source spells it.
    #[must_use]
    fn written(lun: u64) -> String {
        lun.to_string()
    }

    /// The source of a LUN of this target over these of [`PORTALS`].
    fn uri(&self, portals: &[usize], lun: u64) -> String {
        let portals: Vec<&str> = portals.iter().map(|&at| PORTALS[at]).collect();
        let lun = Self::written(lun);
        format!("iscsi://{}/{}/{lun}", portals.join(","), self.iqn())
    }

    /// Stops listening at a portal of [`PORTALS`] and cuts its connections: sessions go to
    /// FAILED at once.
    fn portal_down(&mut self, portal: usize) {
        self.close(portal);
        reset_connections(PORTALS[portal].parse().expect("a portal"));
    }

    /// Cuts the present connections at a portal of [`PORTALS`], and keeps listening.
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

    /// The target presents LUNs over 255 in flat addressing; some of its releases accept no
    /// other.
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
