//! What a login is for and what it offers.

use super::parameters::{Parameters, SessionKind};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Iqn;
use crate::iscsi::PEER;
use crate::iscsi::chap::Credentials;
use crate::iscsi::pdu::Isid;
use crate::kernel::tcp::LocalEnd;

/// Who logs in, for what, and what is offered.
#[derive(Debug, Clone)]
pub struct LoginOptions {
    pub(in crate::iscsi) initiator: Iqn,
    pub(in crate::iscsi) kind: SessionKind,
    pub(in crate::iscsi) isid: Isid,
    pub(in crate::iscsi) credentials: Option<Credentials>,
    pub(in crate::iscsi) offer: Parameters,
    pub(super) requires_digests: bool,
    pub(super) local: LocalEnd,
}

impl LoginOptions {
    /// A login of `initiator`, without credentials. `isid` must be one that no
    /// other session of the initiator has with the same portal group.
    #[must_use]
    pub fn new(initiator: Iqn, kind: SessionKind, isid: Isid) -> Self {
        Self {
            initiator,
            kind,
            isid,
            credentials: None,
            offer: Parameters::offer(),
            requires_digests: false,
            local: LocalEnd::default(),
        }
    }

    /// With CHAP. One-way, a target that wants none is not refused; mutual, it
    /// is.
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// Offers these: the most that is taken of each size, and a digest wherever
    /// it is `true`, for the target to choose.
    #[must_use]
    pub fn offer(mut self, offer: Parameters) -> Self {
        self.offer = offer;
        self
    }

    /// Refuses a target that does not take each digest that is offered.
    #[must_use]
    pub fn require_digests(mut self) -> Self {
        self.requires_digests = true;
        self
    }

    /// Connects from this end alone, also where a redirect leads.
    #[must_use]
    pub(in crate::iscsi) fn from(mut self, local: LocalEnd) -> Self {
        self.local = local;
        self
    }

    pub(super) fn check_digests(&self, agreed: &Parameters) -> Result<()> {
        let digests = [
            ("headers", self.offer.header_digest, agreed.header_digest),
            ("data", self.offer.data_digest, agreed.data_digest),
        ];
        let lacks = |(_, offered, agreed): &&(&str, bool, bool)| *offered && !*agreed;
        match digests.iter().find(lacks).filter(|_| self.requires_digests) {
            Some((over, ..)) => {
                let message = format!("{PEER} takes no checksum over {over}, which is required");
                Err(Error::new(ErrorKind::NotSupported, message))
            }
            None => Ok(()),
        }
    }
}
