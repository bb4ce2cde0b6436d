//! Identifiers as types: each parses, prints and compares.
//!
//! No parser guesses from the shape of a string. Its prefix, or the type that it is parsed
//! into, says what it means.

mod backend;
mod content_name;
mod device;
mod fc_uri;
mod hctl;
mod host;
mod interface;
mod iqn;
mod iscsi_uri;
mod lun;
mod nbd_index;
mod nbd_uri;
mod portal;
mod route_kind;
mod source;
mod text;
mod volume_id;
mod wwid;
mod wwpn;

pub use backend::BackendId;
pub use content_name::{ContentName, Expected};
pub use device::{DevNo, DiskSeq};
pub use fc_uri::FcUri;
pub use hctl::{Hctl, HostNo};
pub use interface::InterfaceName;
pub use iqn::Iqn;
pub use iscsi_uri::IscsiUri;
pub use lun::{Addressing, Lun};
pub use nbd_index::NbdIndex;
pub use nbd_uri::{NbdServer, NbdUri};
pub use portal::{Portal, PortalHost, SessionId};
pub use route_kind::RouteKind;
pub use source::Source;
pub use text::ParseIdError;
pub use volume_id::VolumeId;
pub(crate) use wwid::NameKind;
pub use wwid::Wwid;
pub use wwpn::Wwpn;

/// Serialises an identifier as the text that it prints and parses.
#[cfg(feature = "serde")]
macro_rules! serde_as_text {
    ($($name:ty),+) => {$(
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}

#[cfg(feature = "serde")]
serde_as_text!(
    BackendId,
    ContentName,
    DevNo,
    DiskSeq,
    Expected,
    FcUri,
    Hctl,
    HostNo,
    InterfaceName,
    Iqn,
    IscsiUri,
    Lun,
    NbdIndex,
    NbdUri,
    Portal,
    SessionId,
    Source,
    VolumeId,
    Wwid,
    Wwpn
);
