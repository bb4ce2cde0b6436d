//! The bytes that a server sends, written from the protocol and not with the engine's own
//! constants.

pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;

pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_SERVER: u32 = 2;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const ERR_UNSUP: u32 = 0x8000_0001;
pub(crate) const ERR_POLICY: u32 = 0x8000_0002;
pub(crate) const ERR_TLS_REQD: u32 = 0x8000_0005;
pub(crate) const ERR_UNKNOWN: u32 = 0x8000_0006;
pub(crate) const ERR_SHUTDOWN: u32 = 0x8000_0007;

/// A writable export that can flush.
pub(crate) const FLAGS: u16 = 0b101;

/// The first bytes of a server that speaks fixed newstyle and offers to omit the zeroes.
pub(crate) fn greeting() -> Vec<u8> {
    greeting_with(3)
}

pub(crate) fn greeting_with(flags: u16) -> Vec<u8> {
    [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat()
}

/// The client's answer to the greeting.
pub(crate) fn client_flags(flags: u32) -> Vec<u8> {
    flags.to_be_bytes().to_vec()
}

pub(crate) fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    reply_of_length(option, kind, length, payload)
}

/// A reply that claims another length than it has.
pub(crate) fn reply_of_length(option: u32, kind: u32, length: u32, payload: &[u8]) -> Vec<u8> {
    let words = [option, kind, length].map(u32::to_be_bytes).concat();
    [
        &[0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9][..],
        &words,
        payload,
    ]
    .concat()
}

pub(crate) fn info_export(size: u64, flags: u16) -> Vec<u8> {
    [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

pub(crate) fn info_block_size(minimum: u32, preferred: u32, maximum: u32) -> Vec<u8> {
    let sizes = [minimum, preferred, maximum].map(u32::to_be_bytes).concat();
    [&[0, 3][..], &sizes].concat()
}

/// One entry of a list.
pub(crate) fn listed(name: &str, description: &str) -> Vec<u8> {
    let length = u32::try_from(name.len()).unwrap();
    [
        &length.to_be_bytes()[..],
        name.as_bytes(),
        description.as_bytes(),
    ]
    .concat()
}

/// The whole answer of a correct server to `OPT_GO`.
pub(crate) fn go(size: u64, flags: u16) -> Vec<u8> {
    described(OPT_GO, size, flags)
}

/// The whole answer of a correct server to `OPT_GO` or `OPT_INFO`.
pub(crate) fn described(option: u32, size: u64, flags: u16) -> Vec<u8> {
    [
        reply(option, REP_INFO, &info_export(size, flags)),
        reply(option, REP_INFO, &info_block_size(1, 4096, 32 << 20)),
        reply(option, REP_ACK, b""),
    ]
    .concat()
}
