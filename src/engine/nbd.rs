//! Attached NBD devices: their probe, and new connections for devices that lost theirs.

pub(super) mod backend;
mod dialled_connection;
pub(super) mod heal;
pub(super) mod known;
pub(super) mod offers;
pub(super) mod outcome;
pub(super) mod queue_facts;
pub(super) mod queues;
pub(super) mod reads;
pub(super) mod receivers;
pub(super) mod reconnect;
pub(super) mod same_volume;
