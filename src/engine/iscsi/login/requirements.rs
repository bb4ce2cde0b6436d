//! What a request requires of a session that another attach has made.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::iscsi::{
    ConnectionStatus, Digests, IscsiSession, Proof, Proven, SessionName, SessionOptions,
};

/// How long reading the credentials may take for sessions that exist, and so need no login.
pub(super) const SECRETS_LIMIT: Duration = Duration::from_secs(2);

/// Why a session does not do for a request: it lacks the digests or the proof which a login with
/// these options requires of the target.
pub(super) fn refusal(
    session: &IscsiSession,
    options: &SessionOptions,
    name: &SessionName,
    secrets_deadline: Deadline,
) -> Result<Option<Error>> {
    let refused = |kind, lacks: &str| {
        let message = format!(
            "session {} {lacks}: detach each device on it, then attach again",
            session.id()
        );
        Error::new(kind, message).at(Stage::Login)
    };
    if options.requires_digests {
        let digests = session.digests()?;
        // The kernel forgets the digests of a lost session.
        let is_logged_in = session.connection_status()? == Some(ConnectionStatus::LoggedIn);
        let lacks = match digests {
            Digests { header: false, .. } => "has no checksum over headers, which is required",
            Digests { data: false, .. } => "has no checksum over data, which is required",
            Digests { .. } => "",
        };
        if is_logged_in && !lacks.is_empty() {
            return Ok(Some(refused(ErrorKind::InUse, lacks)));
        }
    }
    if options.proof.is_none()
        || session.proven()? == Proven::Both
        || !requires_mutual_proof(options, name, secrets_deadline)
    {
        return Ok(None);
    }
    if session.is_lunbd_owned()? {
        let lacks = "was created without mutual CHAP, which is required";
        return Ok(Some(refused(ErrorKind::NotPermitted, lacks)));
    }
    let id = session.id();
    tracing::warn!(session = %id, "another program created it: unknown whether its target proved itself");
    Ok(None)
}

/// Whether a login would require the target's proof. If the credentials cannot be read, the
/// session does without them, as it needs no login.
fn requires_mutual_proof(options: &SessionOptions, name: &SessionName, deadline: Deadline) -> bool {
    match &options.proof {
        None => false,
        Some(Proof::Known(credentials)) => credentials.is_mutual(),
        Some(Proof::At(source)) => match source.read(Some(&name.target), &name.portal, deadline) {
            Ok(credentials) => credentials.is_mutual(),
            Err(error) => {
                tracing::warn!(%name, %error, "unknown whether the target must prove itself");
                false
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::engine::attach::AttachRequest;
    use crate::id::Source;
    use crate::iscsi::{Credentials, CredentialsSource, FakeSession, Secret};
    use crate::kernel::Roots;

    const SOURCE: &str = "iscsi://127.0.0.1/iqn.2026-01.example:array/1";

    /// Attaches over a session with one digest that was created with CHAP.
    fn error_of(creator: &str, options: SessionOptions) -> Error {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let name = SessionName {
            initiator: options.initiator.clone(),
            target: "iqn.2026-01.example:array".parse().unwrap(),
            portal: "127.0.0.1".parse().unwrap(),
        };
        let session = FakeSession::add(&roots, 3, &name);
        session.set("creator", creator);
        session.set("username_in", "lunbd:chap");
        session.set_connection("header_digest", "1");
        session.set_connection("data_digest", "0");
        let engine = Engine::start(roots).unwrap();
        let source: Source = SOURCE.parse().unwrap();
        let request = AttachRequest::new(source).log_in(options);
        let deadline = Deadline::after(Duration::from_secs(60));
        let error = engine.attach(&request, deadline).unwrap_err();
        assert!(!deadline.has_passed(), "{error:#}");
        error
    }

    fn options() -> SessionOptions {
        SessionOptions::new("iqn.2026-01.example:host".parse().unwrap())
    }

    #[test]
    fn a_session_without_a_required_digest_is_refused() {
        for creator in ["-1", "812"] {
            let error = error_of(creator, options().require_digests());
            assert_eq!(error.kind(), ErrorKind::InUse, "{error:#}");
            let text = error.to_string();
            assert!(
                text.contains("session 3 has no checksum over data"),
                "{text}"
            );
        }
        // An offer leaves the choice to the target.
        let error = error_of("-1", options().digests(true, true)).to_string();
        assert!(!error.contains("checksum"), "{error}");
    }

    #[test]
    fn a_session_of_lunbd_without_a_required_proof_of_the_target_is_refused() {
        let [own, its] = ["one", "other"].map(|secret| Secret::new(secret).unwrap());
        let one_way = Credentials::new("host", own).unwrap();
        let mutual = one_way.clone().mutual(None, its).unwrap();
        let error = error_of("-1", options().credentials(mutual.clone()));
        assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error:#}");
        assert!(error.to_string().contains("without mutual CHAP"), "{error}");
        for (creator, credentials) in [("-1", one_way), ("812", mutual)] {
            let error = error_of(creator, options().credentials(credentials)).to_string();
            assert!(!error.contains("CHAP"), "{error}");
        }
    }
    #[test]
    fn the_file_of_the_credentials_says_whether_the_target_must_prove_itself() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("chap");
        let from_file = || options().credentials_from(CredentialsSource::File(path.clone()));
        // A login is not needed, so a file that is gone does no harm.
        let error = error_of("-1", from_file()).to_string();
        assert!(!error.contains("credentials"), "{error}");
        for (lines, is_refused) in [
            ("user=host\nsecret=one\n", false),
            ("user=host\nsecret=one\ntarget_secret=other\n", true),
        ] {
            std::fs::write(&path, lines).unwrap();
            let error = error_of("-1", from_file()).to_string();
            assert_eq!(error.contains("without mutual CHAP"), is_refused, "{error}");
        }
    }
}
