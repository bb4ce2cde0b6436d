//! One path to a logical unit.

use crate::id::{Hctl, RouteKind};

/// One path to a logical unit, usable or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The transport of the path.
    pub via: RouteKind,
    /// The unit's address on this path, or the reason why there is none. Only a scan shows
    /// whether the target presents the unit.
    pub address: Result<Hctl, RouteUnavailable>,
}

/// Why a path cannot be used now.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{text}")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RouteUnavailable {
    /// The reason, for a program.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub reason: MissingReason,
    /// The reason in words; it names the path.
    pub text: String,
    /// The unit's address even so, if the session or port is down: a device that was
    /// attached there before may still exist.
    pub hctl: Option<Hctl>,
}

/// The reason why a path cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "reason", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum MissingReason {
    /// No session leads to this target through this portal.
    NoSession,
    /// The session is not logged in.
    SessionDown {
        /// The kernel's word for the state: `FAILED`, `FREE`; `unreadable` if there is
        /// none.
        state: String,
    },
    /// The session is logged in and its target was removed, as in a logout that has begun.
    NoTarget,
    /// This machine has no Fibre Channel port.
    NoHosts,
    /// No local port sees this port.
    NoRemotePort,
    /// The remote port is neither online nor marginal.
    PortDown {
        /// The kernel's word for the state: `Blocked`, `Not Present` and others;
        /// `unreadable` if there is none.
        state: String,
    },
    /// The remote port is no SCSI target.
    NotATarget,
}

impl RouteUnavailable {
    pub(super) fn new(reason: MissingReason, text: String) -> Self {
        Self {
            reason,
            text,
            hctl: None,
        }
    }

    pub(super) fn at(mut self, hctl: Option<Hctl>) -> Self {
        self.hctl = hctl;
        self
    }
}

impl Route {
    /// The route to a unit that the caller named by its address.
    #[must_use]
    pub fn by_address(hctl: Hctl) -> Self {
        let via = RouteKind::Address { hctl };
        let address = Ok(hctl);
        Self { via, address }
    }
}

/// Serialises `via`, and either `hctl` or `missing`; the other is null.
#[cfg(feature = "serde")]
impl serde::Serialize for Route {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut object = serializer.serialize_struct("Route", 3)?;
        object.serialize_field("via", &self.via)?;
        object.serialize_field("hctl", &self.address.as_ref().ok())?;
        object.serialize_field("missing", &self.address.as_ref().err())?;
        object.end()
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;
    use crate::id::SessionId;

    #[test]
    fn a_route_is_one_object_with_an_address_or_a_reason() {
        let via = RouteKind::Iscsi {
            portal: "10.0.0.1".parse().unwrap(),
            session: Some(SessionId(3)),
        };
        let place = Ok("4:0:0:7".parse().unwrap());
        let json = serde_json::to_value(Route {
            via,
            address: place,
        })
        .unwrap();
        let via = serde_json::json!(
            {"transport": "iscsi", "portal": "10.0.0.1:3260", "session": "3"}
        );
        let expected = serde_json::json!({"via": via, "hctl": "4:0:0:7", "missing": null});
        assert_eq!(json, expected);

        let state = "Blocked".to_owned();
        let reason = MissingReason::PortDown { state };
        let missing = RouteUnavailable::new(reason, "it is Blocked".to_owned());
        let json = serde_json::to_value(missing).unwrap();
        let expected = serde_json::json!(
            {"reason": "port_down", "state": "Blocked", "text": "it is Blocked", "hctl": null}
        );
        assert_eq!(json, expected);
    }
}
