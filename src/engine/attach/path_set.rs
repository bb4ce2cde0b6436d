//! The paths of one attach: those that were probed, and those that are missing.

use crate::engine::Engine;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::attach::{AttachRequest, MissingPath, UnitPath};
use crate::engine::iscsi::login::RouteAttempt;
use crate::engine::unit::place::may_be_one_unit;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, RouteKind};
use crate::iscsi::{IscsiSession, SessionOptions};
use crate::kernel::Roots;
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::Identity;
use crate::transport::Route;

/// The paths of an attach, found and missing.
#[derive(Default)]
pub(in crate::engine) struct PathSet {
    pub(in crate::engine) paths: Vec<ProbedPath>,
    pub(super) missing: Vec<MissingPath>,
}

impl PathSet {
    pub(in crate::engine) fn first(&self) -> Result<&ProbedPath> {
        let none = || Error::new(ErrorKind::TooFewPaths, "no path is left").at(Stage::Identify);
        self.paths.first().ok_or_else(none)
    }

    pub(super) fn facts(&self, roots: &Roots, options: Option<&SessionOptions>) -> Vec<UnitPath> {
        let facts = |path: &ProbedPath| path.facts(roots, options);
        self.paths.iter().map(facts).collect()
    }

    /// Two addresses of one device are one path.
    pub(super) fn dedup_devices(&mut self) {
        let mut once: Vec<ProbedPath> = Vec::new();
        for path in std::mem::take(&mut self.paths) {
            match once.iter_mut().find(|known| known.device == path.device) {
                Some(known) => known.changed |= path.changed,
                None => once.push(path),
            }
        }
        self.paths = once;
    }

    /// Keeps the paths that pass. A path that vanished, or that udev does not handle,
    /// counts as missing as long as enough are left.
    pub(in crate::engine) fn retain(
        &mut self,
        request: &AttachRequest,
        mut pass: impl FnMut(&mut ProbedPath) -> Result<()>,
    ) -> Result<()> {
        let mut failures = Vec::new();
        for mut path in std::mem::take(&mut self.paths) {
            match pass(&mut path) {
                Ok(()) => self.paths.push(path),
                Err(error) => failures.push((path, error)),
            }
        }
        let enough = self.paths.len() >= request.min_paths.max(1);
        let mut first = Ok(());
        for (path, error) in failures {
            if enough {
                let missing = MissingPath::new(path.via.clone(), &error);
                self.missing.push(missing);
            } else {
                // The rollback removes it with the others.
                self.paths.push(path);
                first = first.and(Err(error));
            }
        }
        first
    }

    /// The identity of the unit, on which every path must agree.
    pub(super) fn common_identity(&self, engine: &Engine) -> Result<Identity> {
        let first = self.first()?;
        for path in self.paths.iter().skip(1) {
            let [one, other] = [first, path].map(|path| (&path.device, &path.identity));
            if !may_be_one_unit(engine, one, other) {
                let message = format!(
                    "the paths lead to different units: {} says that it is {}, {} that it is {}",
                    first.via, first.identity, path.via, path.identity
                );
                let error = Error::new(ErrorKind::IdentityMismatch, message);
                return Err(error.at(Stage::Identify).with_found(&path.identity.names));
            }
        }
        Ok(first.identity.clone())
    }
}

impl ProbedPath {
    /// Checks that the device is still the one that was proven, and serves I/O.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        self.device.require_usable(Stage::Settle)?;
        let same = match self.diskseq {
            // One sequence number implies one device number.
            Some(instance) => self.disk.diskseq()? == Some(instance),
            None => BlockDevice::at(self.disk.dir())?.as_ref() == Some(&self.disk),
        };
        if same {
            return Ok(());
        }
        let message = format!("{} was replaced while it was attached", self.device.hctl());
        Err(Error::new(ErrorKind::Vanished, message).at(Stage::Settle))
    }

    fn facts(&self, roots: &Roots, options: Option<&SessionOptions>) -> UnitPath {
        let hctl = self.device.hctl();
        let unmet_settings = match (&self.via, options) {
            (
                RouteKind::Iscsi {
                    session: Some(id), ..
                },
                Some(options),
            ) => IscsiSession::new(roots, *id).unmet(roots, options, hctl),
            _ => Vec::new(),
        };
        for setting in &unmet_settings {
            tracing::warn!(via = %self.via, %setting, "a session setting differs from the requested value");
        }
        UnitPath {
            via: self.via.clone(),
            hctl,
            unmet_settings,
            node: self.disk.node(roots),
            devno: self.disk.devno(),
            diskseq: self.diskseq,
            access_state: self.access_state,
            changed: self.changed,
        }
    }
}

/// The more severe of two failures: a path that leads to another unit is no outage.
pub(super) fn more_severe(earlier: Option<Error>, later: Error) -> Error {
    match earlier {
        Some(earlier) if later.kind() != ErrorKind::IdentityMismatch => earlier,
        _ => later,
    }
}

/// # Errors
/// `TooFewPaths`, naming the missing paths. A path to another unit is an error, however
/// many others there are.
pub(super) fn require_paths(
    request: &AttachRequest,
    found: usize,
    missing: &[MissingPath],
    cause: Option<Error>,
) -> Result<()> {
    let other_unit = |error: &Error| error.kind() == ErrorKind::IdentityMismatch;
    if cause.as_ref().is_some_and(other_unit)
        && let Some(error) = cause
    {
        return Err(error);
    }
    let wanted = request.min_paths.max(1);
    if found >= wanted {
        return Ok(());
    }
    let words: Vec<_> = missing.iter().map(ToString::to_string).collect();
    let message = format!(
        "{wanted} {} wanted and {found} there; missing: {}",
        if wanted == 1 { "path is" } else { "paths are" },
        words.join("; ")
    );
    let error = Error::new(ErrorKind::TooFewPaths, message).with_missing(missing);
    Err(match cause {
        Some(cause) => error
            .at(cause.stage().unwrap_or(Stage::Resolve))
            .caused_by(cause),
        None => error.at(Stage::Resolve),
    })
}

/// Where the routes of an attach lead.
pub(super) struct RoutedPaths {
    /// The addresses, each once: two sources may name the same path.
    pub(super) paths: Vec<(RouteKind, Hctl)>,
    pub(super) missing: Vec<MissingPath>,
    /// The most severe reason of a login that failed.
    pub(super) cause: Option<Error>,
}

impl RoutedPaths {
    /// # Errors
    /// Why the only route has no session.
    pub(super) fn of(routes: Vec<RouteAttempt>) -> Result<Self> {
        let alone = routes.len() == 1;
        let mut all = Self {
            paths: Vec::new(),
            missing: Vec::new(),
            cause: None,
        };
        for (Route { via, address }, why_no_session) in routes {
            match (address, why_no_session) {
                (Ok(hctl), _) if all.paths.iter().any(|(_, known)| *known == hctl) => {}
                (Ok(hctl), _) => all.paths.push((via, hctl)),
                (Err(_), Some(error)) if alone => return Err(error),
                (Err(_), Some(error)) => {
                    all.missing.push(MissingPath::new(via, &error));
                    all.cause = Some(more_severe(all.cause, error));
                }
                (Err(why), None) => all.missing.push(MissingPath::new(via, &why)),
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Source;

    #[test]
    fn each_path_that_is_missing_has_its_reason_once_and_what_is_left_of_it_is_said() {
        let source: Source = "scsi:1:0:0:1".parse().unwrap();
        let request = AttachRequest::new(source).min_paths(3);
        let waited = std::time::Duration::from_secs(9);
        let slow = Error::wait_expired(Stage::Identify, waited, "sdb to answer");
        let slow = slow.with_last_seen("state=running, disk sdb");
        let none = Error::new(ErrorKind::NotFound, "no such unit");
        let via = |hctl: &str| RouteKind::Address {
            hctl: hctl.parse().unwrap(),
        };
        let missing = [("1:0:0:1", &slow), ("2:0:0:1", &none)]
            .map(|(hctl, error)| MissingPath::new(via(hctl), error));
        let error = require_paths(&request, 1, &missing, Some(slow)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooFewPaths);
        assert_eq!(error.stage(), Some(Stage::Identify));
        assert_eq!(error.last_seen(), Some("state=running, disk sdb"));
        assert_eq!(error.missing(), missing);
        assert_eq!(
            format!("{error:#}"),
            "identify: 3 paths are wanted and 1 there; missing: scsi:1:0:0:1: timed out after \
             9.0 s at stage identify, waiting for sdb to answer; last seen: state=running, disk \
             sdb; scsi:2:0:0:1: no such unit"
        );
    }
}
