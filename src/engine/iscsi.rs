//! The iSCSI sessions of the engine: login, use, logout and recovery.

pub(super) mod login;
pub(super) mod recovery;
pub(super) mod sessions;
