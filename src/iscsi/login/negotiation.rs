//! The stages of a login, without I/O: what to send next, and what an answer means.

use std::collections::BTreeSet;

use super::options::LoginOptions;
use super::parameters::{NORMAL, Parameters, SessionKind};
use crate::error::{Error, ErrorKind, Result};
use crate::iscsi::chap::{Conversation, Credentials};
use crate::iscsi::pdu::{LoginResponse, LoginStage};
use crate::iscsi::text::{Answer, Pair, PartialText, Text, pairs};
use crate::iscsi::{PEER, Proven, violation};

/// More keys than a target needs in a whole login. As many answers of ours, together with
/// our offer, fit into one PDU.
const MAX_KEYS: usize = 64;
/// The longest text of one answer in bytes; it may come in several PDUs.
const LONGEST_ANSWER: usize = 16 << 10;

/// What follows an answer.
#[derive(Debug)]
pub(super) enum Step {
    /// We send another request.
    Again,
    /// The full feature phase has begun.
    Done(Box<Agreed>),
}

#[derive(Debug, Default)]
pub(super) struct Agreed {
    pub(super) parameters: Parameters,
    pub(super) group: Option<u16>,
    pub(super) alias: Option<String>,
    pub(super) proven: Proven,
}

pub(super) struct Negotiation<'a> {
    options: &'a LoginOptions,
    stage: LoginStage,
    security: Security<'a>,
    /// Whether the parameters were offered.
    offered: bool,
    /// The stage that the last request asked for.
    asked_for: Option<LoginStage>,
    /// Whether the text of the last answer continues.
    more: bool,
    text: PartialText,
    /// The keys that the target has sent, with any value.
    keys: BTreeSet<String>,
    /// The answers that we owe to keys that the target has introduced.
    answers: Vec<(String, &'static str)>,
    agreed: Box<Agreed>,
}

enum Security<'a> {
    /// We have sent nothing. With a conversation, CHAP runs if the target picks it.
    New(Option<Conversation<'a>>),
    /// We wait for the target to pick a method.
    Offered(Option<Conversation<'a>>),
    Chap(Conversation<'a>),
    Settled,
}

impl<'a> Negotiation<'a> {
    pub(super) fn new(options: &'a LoginOptions, challenges: &'a mut Vec<Vec<u8>>) -> Self {
        let credentials = options.credentials.as_ref();
        let chap = credentials.map(|known| Conversation::new(known, challenges));
        let mut agreed = Box::new(Agreed::default());
        agreed.parameters.max_recv_data_segment_length = options.offer.max_recv_data_segment_length;
        Self {
            options,
            stage: LoginStage::Security,
            security: Security::New(chap),
            offered: false,
            asked_for: None,
            more: false,
            text: PartialText::new(LONGEST_ANSWER),
            keys: BTreeSet::new(),
            answers: Vec::new(),
            agreed,
        }
    }

    /// The stage that the next request belongs to.
    pub(super) fn stage(&self) -> LoginStage {
        self.stage
    }

    /// The next request: its text, and the stage that it asks for.
    pub(super) fn request(&mut self) -> Result<(Text, Option<LoginStage>)> {
        let mut text = Text::default();
        self.asked_for = None;
        if self.more {
            return Ok((text, None));
        }
        self.asked_for = if self.stage == LoginStage::Security {
            let last = self.identify(&mut text)?;
            last.then_some(LoginStage::Operational)
        } else {
            if !self.offered {
                self.offered = true;
                let options = self.options;
                options.offer.write(&options.kind, &mut text);
            }
            Some(LoginStage::FullFeature)
        };
        for (key, answer) in self.answers.drain(..) {
            text.push(&key, answer);
        }
        Ok((text, self.asked_for))
    }

    /// Writes our part of the security stage. Returns `true` if it is our last part.
    fn identify(&mut self, text: &mut Text) -> Result<bool> {
        match &mut self.security {
            Security::New(chap) => {
                let options = self.options;
                text.push("InitiatorName", &options.initiator);
                match &options.kind {
                    SessionKind::Discovery => text.push("SessionType", "Discovery"),
                    SessionKind::Normal(target) => {
                        text.push("SessionType", "Normal");
                        text.push("TargetName", target);
                    }
                }
                text.push("AuthMethod", options.methods());
                let chap = chap.take();
                let last = chap.is_none();
                self.security = Security::Offered(chap);
                Ok(last)
            }
            Security::Chap(chap) => chap.request(text),
            Security::Offered(_) | Security::Settled => Ok(true),
        }
    }

    /// Takes the successful answer to the last request.
    ///
    /// # Errors
    /// `Protocol`, naming the field or key; `NotPermitted` if the target does not prove its
    /// identity.
    pub(super) fn take(&mut self, response: &LoginResponse, data: &[u8]) -> Result<Step> {
        if response.stage != self.stage {
            let (found, expected) = (response.stage, format!("{:?}", self.stage));
            return Err(violation("CSG", format!("{found:?}"), &expected));
        }
        if response.transit.is_some() && response.transit != self.asked_for {
            let found = format!("{:?}", response.transit);
            let expected = format!("what was asked for, {:?}", self.asked_for);
            return Err(violation("T and NSG", found, &expected));
        }
        self.text.add(data)?;
        self.more = response.continues;
        if self.more {
            return Ok(Step::Again);
        }
        let text = self.text.take();
        let mut chap = Vec::new();
        for pair in pairs(&text) {
            let pair = pair?;
            self.note(&pair)?;
            match pair.key {
                key if key.starts_with("CHAP_") => chap.push(pair),
                "AuthMethod" => self.take_method(&pair)?,
                _ => self.take_key(&pair)?,
            }
        }
        match &mut self.security {
            Security::Chap(conversation) => {
                conversation.take(&chap)?;
                if conversation.is_done() {
                    self.agreed.proven = Proven::with(self.options.credentials.as_ref());
                    self.security = Security::Settled;
                }
            }
            _ => {
                if let Some(pair) = chap.first() {
                    return Err(pair.violation("no such key without CHAP"));
                }
            }
        }
        match response.transit {
            Some(next) => self.transit(next),
            None => Ok(Step::Again),
        }
    }

    /// Refuses a key that repeats within the login, and too many keys.
    fn note(&mut self, pair: &Pair<'_>) -> Result<()> {
        if self.keys.len() >= MAX_KEYS {
            return Err(violation("the number of keys", "too large", "at most 64"));
        }
        if !self.keys.insert(pair.key.to_owned()) && pair.key != "TargetAddress" {
            let field = format!("the key {}", pair.key);
            return Err(violation(&field, "given twice", "at most one in a login"));
        }
        Ok(())
    }

    fn take_method(&mut self, pair: &Pair<'_>) -> Result<()> {
        let Security::Offered(chap) = &mut self.security else {
            return Err(pair.violation("no such key now"));
        };
        self.security = match (pair.answer(), chap.take()) {
            (Answer::Value("CHAP"), Some(chap)) => Security::Chap(chap),
            (Answer::Value("None"), _) if !self.options.requires_target_proof() => {
                Security::Settled
            }
            (Answer::Reject, _) => {
                let message = format!("{PEER} takes none of the ways of authentication offered");
                return Err(Error::new(ErrorKind::NotPermitted, message));
            }
            _ => return Err(pair.violation("one that was offered")),
        };
        Ok(())
    }

    fn take_key(&mut self, pair: &Pair<'_>) -> Result<()> {
        match pair.key {
            "TargetPortalGroupTag" => {
                let tag = pair.number(0..=0xffff)?;
                self.agreed.group = u16::try_from(tag).ok();
                return Ok(());
            }
            "TargetAlias" => {
                self.agreed.alias = Some(pair.value.to_owned());
                return Ok(());
            }
            // This key belongs to a redirect, and this answer is none.
            "TargetAddress" => return Ok(()),
            _ => {}
        }
        let (offer, kind) = (&self.options.offer, &self.options.kind);
        if self.offered {
            if self.agreed.parameters.settle(offer, kind, pair)? {
                return Ok(());
            }
        } else if Parameters::default().settle(&Parameters::offer(), kind, pair)? {
            return Err(pair.violation("no such key before the operational stage"));
        }
        // An answer to our offer needs no answer.
        if let Answer::Value(_) = pair.answer() {
            let answer = if NORMAL.contains(&pair.key) {
                "Irrelevant"
            } else {
                "NotUnderstood"
            };
            self.answers.push((pair.key.to_owned(), answer));
        }
        Ok(())
    }

    fn transit(&mut self, next: LoginStage) -> Result<Step> {
        match &self.security {
            Security::Settled => {}
            // A target may omit an answer that can only be "None".
            Security::Offered(None) if self.options.credentials.is_none() => {
                self.security = Security::Settled;
            }
            _ => {
                return Err(violation("T", 1, "0 before the authentication is over"));
            }
        }
        self.stage = next;
        if next == LoginStage::FullFeature {
            return Ok(Step::Done(std::mem::take(&mut self.agreed)));
        }
        Ok(Step::Again)
    }
}

impl LoginOptions {
    /// The offered authentication methods.
    pub(super) fn methods(&self) -> &'static str {
        match self.credentials.as_ref().map(Credentials::is_mutual) {
            None => "None",
            Some(false) => "CHAP,None",
            // A target that must prove itself may not choose `None`.
            Some(true) => "CHAP",
        }
    }

    fn requires_target_proof(&self) -> bool {
        let credentials = self.credentials.as_ref();
        credentials.is_some_and(Credentials::is_mutual)
    }
}
