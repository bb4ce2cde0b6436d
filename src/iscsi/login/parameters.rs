//! The parameters that a login negotiates (RFC 7143, 13).

use std::ops::RangeInclusive;

use crate::error::Result;
use crate::id::Iqn;
use crate::iscsi::text::{Answer, Pair, Text};
use crate::iscsi::violation;

const LENGTHS: RangeInclusive<u32> = 512..=0x00ff_ffff;

/// The parameters of a session. [`Default`] holds the values without a negotiation. Lengths
/// are in bytes, times in seconds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the protocol has eight of them, and the kernel takes each"
)]
pub struct Parameters {
    /// CRC32C over headers.
    pub header_digest: bool,
    /// CRC32C over data.
    pub data_digest: bool,
    /// The longest data segment that we accept in one PDU.
    pub max_recv_data_segment_length: u32,
    /// The longest data segment that the target accepts in one PDU. It is not offered: the
    /// target declares it.
    pub max_xmit_data_segment_length: u32,
    /// The target requests all data of a write (R2T).
    pub initial_r2t: bool,
    /// Data may come in the PDU of the command.
    pub immediate_data: bool,
    /// The longest burst.
    pub max_burst_length: u32,
    /// The most unsolicited data of a write.
    pub first_burst_length: u32,
    /// How many requests for data (R2T) a target may have outstanding.
    pub max_outstanding_r2t: u32,
    /// The most connections of the session.
    pub max_connections: u32,
    /// How long to wait before a reconnect.
    pub default_time2wait: u32,
    /// How long the target keeps the session's state after that.
    pub default_time2retain: u32,
    /// The data PDUs of a burst come in order.
    pub data_pdu_in_order: bool,
    /// Bursts come in order.
    pub data_sequence_in_order: bool,
    /// The recovery level; at 0 a new session recovers a lost one.
    pub error_recovery_level: u32,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            max_recv_data_segment_length: 8192,
            max_xmit_data_segment_length: 8192,
            initial_r2t: true,
            immediate_data: true,
            max_burst_length: 262_144,
            first_burst_length: 65_536,
            max_outstanding_r2t: 1,
            max_connections: 1,
            default_time2wait: 2,
            default_time2retain: 20,
            data_pdu_in_order: true,
            data_sequence_in_order: true,
            error_recovery_level: 0,
        }
    }
}

impl Parameters {
    /// The default offer: no digests, large bursts, writes that begin with unsolicited
    /// data.
    #[must_use]
    pub fn offer() -> Self {
        Self {
            max_recv_data_segment_length: 262_144,
            initial_r2t: false,
            max_burst_length: 0x00ff_f000,
            first_burst_length: 262_144,
            default_time2retain: 0,
            ..Self::default()
        }
    }

    /// Writes the offer, without the keys that have no meaning in a session of this kind.
    pub(super) fn write(&self, kind: &SessionKind, text: &mut Text) {
        let digest = |on| if on { "CRC32C,None" } else { "None" };
        let boolean = |yes| if yes { "Yes" } else { "No" };
        text.push("HeaderDigest", digest(self.header_digest));
        text.push("DataDigest", digest(self.data_digest));
        text.push("DefaultTime2Wait", self.default_time2wait);
        text.push("DefaultTime2Retain", self.default_time2retain);
        text.push("ErrorRecoveryLevel", self.error_recovery_level);
        text.push(
            "MaxRecvDataSegmentLength",
            self.max_recv_data_segment_length,
        );
        if *kind == SessionKind::Discovery {
            return;
        }
        text.push("InitialR2T", boolean(self.initial_r2t));
        text.push("ImmediateData", boolean(self.immediate_data));
        text.push("MaxBurstLength", self.max_burst_length);
        text.push("FirstBurstLength", self.first_burst_length);
        text.push("MaxOutstandingR2T", self.max_outstanding_r2t);
        text.push("MaxConnections", self.max_connections);
        text.push("DataPDUInOrder", boolean(self.data_pdu_in_order));
        text.push("DataSequenceInOrder", boolean(self.data_sequence_in_order));
    }

    /// Takes the target's answer to `offer`. Returns `false` if the key was not offered in
    /// a session of this kind.
    ///
    /// # Errors
    /// `Protocol` if the offer does not allow the value.
    pub(super) fn settle(
        &mut self,
        offer: &Self,
        kind: &SessionKind,
        pair: &Pair<'_>,
    ) -> Result<bool> {
        let known = match pair.key {
            "MaxRecvDataSegmentLength" => {
                // This key is a declaration, which each side makes for itself.
                self.max_xmit_data_segment_length = pair.number(LENGTHS)?;
                return Ok(true);
            }
            "HeaderDigest" | "DataDigest" | "DefaultTime2Wait" | "DefaultTime2Retain"
            | "ErrorRecoveryLevel" => true,
            key => *kind != SessionKind::Discovery && NORMAL.contains(&key),
        };
        match pair.answer() {
            _ if !known => return Ok(false),
            Answer::Value(_) => {}
            // The value that holds without an agreement stays.
            Answer::Irrelevant => return Ok(true),
            Answer::Reject | Answer::NotUnderstood => {
                return Err(pair.violation("a value: every target must take one that was offered"));
            }
        }
        self.agree(offer, pair).map(|()| true)
    }

    /// Combines the target's value with the offered one, each key in its own way.
    fn agree(&mut self, offer: &Self, pair: &Pair<'_>) -> Result<()> {
        let smaller = |offered: u32, range| pair.number(range).map(|number| number.min(offered));
        let digest = |offered: bool| match pair.value {
            "None" => Ok(false),
            "CRC32C" if offered => Ok(true),
            _ => Err(pair.violation("one that was offered")),
        };
        match pair.key {
            "HeaderDigest" => self.header_digest = digest(offer.header_digest)?,
            "DataDigest" => self.data_digest = digest(offer.data_digest)?,
            "DefaultTime2Wait" => {
                self.default_time2wait = pair.number(0..=3600)?.max(offer.default_time2wait);
            }
            "DefaultTime2Retain" => {
                self.default_time2retain = smaller(offer.default_time2retain, 0..=3600)?;
            }
            "ErrorRecoveryLevel" => {
                self.error_recovery_level = smaller(offer.error_recovery_level, 0..=2)?;
            }
            "InitialR2T" => self.initial_r2t = pair.boolean()? || offer.initial_r2t,
            "ImmediateData" => self.immediate_data = pair.boolean()? && offer.immediate_data,
            "MaxBurstLength" => self.max_burst_length = smaller(offer.max_burst_length, LENGTHS)?,
            "FirstBurstLength" => {
                self.first_burst_length = smaller(offer.first_burst_length, LENGTHS)?;
            }
            "MaxOutstandingR2T" => {
                self.max_outstanding_r2t = smaller(offer.max_outstanding_r2t, 1..=65_535)?;
            }
            "MaxConnections" => {
                self.max_connections = smaller(offer.max_connections, 1..=65_535)?;
            }
            "DataPDUInOrder" => {
                self.data_pdu_in_order = pair.boolean()? || offer.data_pdu_in_order;
            }
            "DataSequenceInOrder" => {
                self.data_sequence_in_order = pair.boolean()? || offer.data_sequence_in_order;
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks at the end that the values fit together. Without unsolicited data,
    /// `FirstBurstLength` is irrelevant (RFC 7143, 13.14).
    pub(super) fn check(&self) -> Result<()> {
        let is_sent_unasked = !self.initial_r2t || self.immediate_data;
        if is_sent_unasked && self.first_burst_length > self.max_burst_length {
            let expected = format!("at most MaxBurstLength, {}", self.max_burst_length);
            let found = self.first_burst_length;
            return Err(violation("FirstBurstLength", found, &expected));
        }
        Ok(())
    }
}

/// The keys that a target may send only in a normal session.
pub(super) const NORMAL: [&str; 8] = [
    "InitialR2T",
    "ImmediateData",
    "MaxBurstLength",
    "FirstBurstLength",
    "MaxOutstandingR2T",
    "MaxConnections",
    "DataPDUInOrder",
    "DataSequenceInOrder",
];

/// The purpose of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionKind {
    /// The session asks for the targets.
    Discovery,
    /// The session uses this target.
    Normal(Iqn),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::iscsi::text::pairs;

    fn normal() -> SessionKind {
        SessionKind::Normal("iqn.2026-01.example:t".parse().unwrap())
    }

    fn settled(offer: &Parameters, answers: &[u8]) -> Result<Parameters> {
        let mut result = Parameters {
            max_recv_data_segment_length: offer.max_recv_data_segment_length,
            ..Parameters::default()
        };
        for pair in pairs(answers) {
            assert!(result.settle(offer, &normal(), &pair?)?);
        }
        result.check().map(|()| result)
    }

    #[test]
    fn every_key_is_offered_and_what_a_target_echoes_is_what_holds() {
        let offer = Parameters {
            header_digest: true,
            max_connections: 4,
            ..Parameters::offer()
        };
        let mut text = Text::default();
        offer.write(&normal(), &mut text);
        let echo = String::from_utf8(text.as_bytes().to_vec()).unwrap();
        assert_eq!(echo.matches('\0').count(), 14);
        let echo = echo.replace("CRC32C,None", "CRC32C");
        let expected = Parameters {
            max_xmit_data_segment_length: offer.max_recv_data_segment_length,
            ..offer.clone()
        };
        assert_eq!(settled(&offer, echo.as_bytes()).unwrap(), expected);
    }

    #[test]
    fn each_key_has_its_own_way_to_agree() {
        let offer = Parameters::offer();
        let answers = b"MaxBurstLength=16777215\0FirstBurstLength=512\0DefaultTime2Wait=7\0\
                        DefaultTime2Retain=30\0InitialR2T=Yes\0ImmediateData=No\0\
                        DataPDUInOrder=No\0ErrorRecoveryLevel=2\0MaxConnections=8\0\
                        MaxRecvDataSegmentLength=65536\0MaxOutstandingR2T=Irrelevant\0";
        let expected = Parameters {
            max_recv_data_segment_length: 262_144,
            max_xmit_data_segment_length: 65_536,
            max_burst_length: 0x00ff_f000,
            first_burst_length: 512,
            default_time2wait: 7,
            default_time2retain: 0,
            immediate_data: false,
            ..Parameters::default()
        };
        assert_eq!(settled(&offer, answers).unwrap(), expected);
    }

    #[test]
    fn bursts_are_compared_only_where_data_is_sent_unasked() {
        let offer = Parameters::offer();
        for (answers, is_relevant) in [
            ("InitialR2T=Yes\0ImmediateData=No\0", false),
            ("InitialR2T=Yes\0ImmediateData=Yes\0", true),
            ("InitialR2T=No\0ImmediateData=No\0", true),
        ] {
            let small = "MaxBurstLength=8192\0FirstBurstLength=Irrelevant\0";
            let settled = settled(&offer, format!("{answers}{small}").as_bytes());
            assert_eq!(settled.is_err(), is_relevant, "{settled:?}");
        }
    }

    #[test]
    fn what_the_offer_does_not_allow_is_refused_by_its_name() {
        for answer in [
            "HeaderDigest=CRC32C",
            "DataDigest=SHA-256",
            "HeaderDigest=CRC32C,None",
            "MaxRecvDataSegmentLength=511",
            "MaxBurstLength=16777216",
            "FirstBurstLength=0",
            "MaxConnections=0",
            "MaxOutstandingR2T=65536",
            "ErrorRecoveryLevel=3",
            "DefaultTime2Wait=3601",
            "InitialR2T=Maybe",
            "ImmediateData=Reject",
            "DataDigest=NotUnderstood",
            "MaxBurstLength=512",
        ] {
            let error = settled(&Parameters::offer(), format!("{answer}\0").as_bytes());
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            let key = answer.split('=').next().unwrap();
            assert!(error.to_string().contains(key), "{error}");
        }
    }

    #[test]
    fn a_discovery_session_is_offered_what_it_has_alone() {
        let mut text = Text::default();
        Parameters::offer().write(&SessionKind::Discovery, &mut text);
        let keys: Vec<_> = pairs(text.as_bytes())
            .flatten()
            .map(|pair| pair.key)
            .collect();
        assert_eq!(keys.len(), 6);
        assert!(keys.iter().all(|key| !NORMAL.contains(key)));
        let (key, value) = ("MaxBurstLength", "512");
        let pair = Pair { key, value };
        let mut result = Parameters::default();
        let kind = SessionKind::Discovery;
        assert!(!result.settle(&Parameters::offer(), &kind, &pair).unwrap());
    }
}
