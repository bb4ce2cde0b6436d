//! Hands the keys of a connection from rustls to the kernel (`linux/tls.h`, and
//! `Documentation/networking/tls.rst`).

use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{TcpTlsRx, TcpTlsTx, TcpUlp, TlsCryptoInfo};
use rustls::crypto::cipher::{AeadKey, Iv};
use rustls::{ClientConnection, ConnectionTrafficSecrets, ProtocolVersion};
use zeroize::Zeroize as _;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::kernel::tcp;
use crate::nbd::tls_info::{TlsCipher, TlsVersion};

/// Gives the kernel the keys and the numbers of the next records; returns the version and
/// the cipher that it uses.
///
/// # Errors
/// `NotSupported` if the kernel has no TLS, or not this cipher; `Unreachable` if the
/// connection has ended.
pub(super) fn to_kernel(
    session: ClientConnection,
    stream: &OwnedFd,
) -> Result<(TlsVersion, TlsCipher)> {
    let (version, number_of_version) = match session.protocol_version() {
        Some(ProtocolVersion::TLSv1_2) => (TlsVersion::V1_2, libc::TLS_1_2_VERSION),
        Some(ProtocolVersion::TLSv1_3) => (TlsVersion::V1_3, libc::TLS_1_3_VERSION),
        other => return Err(unusable(&format!("the version {other:?}"))),
    };
    let cipher = TlsCipher::ChaCha20Poly1305;
    let secrets = session
        .dangerous_extract_secrets()
        .map_err(|error| unusable(&error.to_string()))?;
    begin(stream)?;
    let refused = |errno: Errno| {
        let what = format!("the kernel takes no keys of TLS {version} {cipher}");
        let error = Error::of_errno(&what, errno);
        match errno {
            // The kernel's crypto API, or this version of its TLS, lacks the cipher.
            Errno::ENOENT | Errno::EINVAL | Errno::EOPNOTSUPP => {
                error.with_kind(ErrorKind::NotSupported)
            }
            _ => error,
        }
    };
    let (number, keys) = secrets.tx;
    let keys = Keys::new(number_of_version, number, keys)?;
    setsockopt(stream, TcpTlsTx, &keys.0).map_err(refused)?;
    let (number, keys) = secrets.rx;
    let keys = Keys::new(number_of_version, number, keys)?;
    setsockopt(stream, TcpTlsRx, &keys.0).map_err(refused)?;
    Ok((version, cipher))
}

fn unusable(what: &str) -> Error {
    let message = format!("the kernel's TLS cannot take the connection over: {what}");
    Error::new(ErrorKind::NotSupported, message)
}

/// The ciphers that lunbd offers and this kernel takes. Each is tried on a connection of this
/// machine with itself.
///
/// # Errors
/// `NotSupported` if the kernel has no TLS; `Unreachable` if the loopback interface is down.
pub(crate) fn ciphers_of_kernel(deadline: Deadline) -> Result<Vec<&'static str>> {
    let tried = [
        ("TLS 1.3 ChaCha20-Poly1305", libc::TLS_1_3_VERSION),
        ("TLS 1.2 ChaCha20-Poly1305", libc::TLS_1_2_VERSION),
    ];
    let mut taken = Vec::new();
    for (name, version) in tried {
        let (near, _far) = tcp::pair(deadline)?;
        begin(&near)?;
        let keys = ConnectionTrafficSecrets::Chacha20Poly1305 {
            key: AeadKey::from([0; 32]),
            iv: Iv::copy(&[0; 12]),
        };
        let keys = Keys::new(version, 0, keys)?;
        if setsockopt(&near, TcpTlsTx, &keys.0).is_ok() {
            taken.push(name);
        }
    }
    Ok(taken)
}

fn begin(stream: &OwnedFd) -> Result<()> {
    setsockopt(stream, TcpUlp::default(), b"tls").map_err(|errno| match errno {
        Errno::ENOENT => {
            let message = "the kernel has no TLS: load the module tls (CONFIG_TLS)";
            Error::of_errno(message, errno).with_kind(ErrorKind::NotSupported)
        }
        // Only an established connection takes it (`net/tls/tls_main.c`, `tls_init`).
        Errno::ENOTCONN => Error::of_errno("the NBD server closed the connection", errno)
            .with_kind(ErrorKind::Unreachable),
        _ => Error::of_errno("cannot begin the kernel's TLS", errno),
    })
}

/// The keys of one direction, which are overwritten when dropped.
struct Keys(TlsCryptoInfo);

impl Keys {
    fn new(version: u16, number: u64, keys: ConnectionTrafficSecrets) -> Result<Self> {
        let ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } = keys else {
            return Err(unusable("its cipher is not ChaCha20-Poly1305"));
        };
        let cut = |_| unusable("its keys have another length");
        let info = libc::tls12_crypto_info_chacha20_poly1305 {
            info: libc::tls_crypto_info {
                version,
                cipher_type: libc::TLS_CIPHER_CHACHA20_POLY1305,
            },
            iv: iv.as_ref().try_into().map_err(cut)?,
            key: key.as_ref().try_into().map_err(cut)?,
            salt: [],
            rec_seq: number.to_be_bytes(),
        };
        Ok(Self(TlsCryptoInfo::Chacha20Poly1305(info)))
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let TlsCryptoInfo::Chacha20Poly1305(info) = &mut self.0 {
            info.key.zeroize();
        }
    }
}
