//! The iSCSI sessions of the engine: their login, their use and end, their recovery.

pub(super) mod login;
pub(super) mod recovery;
pub(super) mod sessions;
