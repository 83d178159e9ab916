//! DNS questions and answers (RFC 1035, RFC 6891).

use super::directory::Known;
use domain::base::iana::{Class, Opcode, Rcode, Rtype};
use domain::base::message_builder::{AnswerBuilder, MessageBuilder, StaticCompressor};
use domain::base::{Message, Name, ParsedName, Ttl};
use domain::rdata::{A, Aaaa, AllRecordData, Ptr, Soa};
use std::net::IpAddr;
use std::time::Duration;

/// Most bytes of a question: one name, and the EDNS record.
pub const QUESTION_BYTES: usize = 1024;
/// Most bytes of an answer by UDP that avoid fragmentation (DNS Flag Day 2020).
pub const UDP_BYTES: u16 = 1232;
/// Most bytes of any answer.
pub const ANSWER_BYTES: usize = u16::MAX as usize;
/// Bytes that every client accepts by UDP (RFC 1035 §4.2.1).
const PLAIN_UDP_BYTES: u16 = 512;
/// The TTL of our own records: a name may soon belong to another VM.
const OWN_TTL: Ttl = Ttl::from_secs(5);
/// Longest time that an answer, or a negative one, is cached, in seconds.
const MAX_TTL: u32 = 3600;
const MAX_ABSENT_TTL: u32 = 300;
/// The TTL of negative answers that have no SOA record, in seconds.
const ABSENT_TTL: u32 = 5;

type Target = StaticCompressor<Vec<u8>>;

/// A parsed question.
#[derive(Debug, Clone)]
pub struct Question<'a> {
    message: &'a Message<[u8]>,
    /// The name in lower case, without a trailing dot.
    pub name: String,
    /// The record type.
    pub kind: Rtype,
    /// Most bytes of an answer by UDP.
    pub udp_bytes: u16,
}

/// Why a question is not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejected {
    /// It gets no answer: it is too short, or is an answer itself.
    Silence,
    /// It gets this error as an answer.
    Answer(Vec<u8>),
}

/// Parses a question.
///
/// # Errors
///
/// If it is no question about one name in the class IN, is longer than [`QUESTION_BYTES`], or asks
/// for a zone transfer or ANY.
pub fn read(bytes: &[u8]) -> Result<Question<'_>, Rejected> {
    let message = Message::from_slice(bytes).map_err(|_| Rejected::Silence)?;
    let header = message.header();
    if header.qr() || bytes.len() > QUESTION_BYTES {
        return Err(Rejected::Silence);
    }
    if header.opcode() != Opcode::QUERY {
        return Err(Rejected::Answer(error(message, Rcode::NOTIMP)));
    }
    let wrong = || Rejected::Answer(error(message, Rcode::FORMERR));
    let question = message.sole_question().map_err(|_| wrong())?;
    if question.qclass() != Class::IN {
        return Err(Rejected::Answer(error(message, Rcode::REFUSED)));
    }
    // Zone transfers and ANY are refused: guests do not need them.
    if matches!(question.qtype(), Rtype::AXFR | Rtype::IXFR | Rtype::ANY) {
        return Err(Rejected::Answer(error(message, Rcode::NOTIMP)));
    }
    let udp_bytes = message
        .opt()
        .map_or(PLAIN_UDP_BYTES, |it| it.udp_payload_size());
    Ok(Question {
        message,
        name: text(question.qname()),
        kind: question.qtype(),
        udp_bytes: udp_bytes.clamp(PLAIN_UDP_BYTES, UDP_BYTES),
    })
}

fn text(name: &impl std::fmt::Display) -> String {
    let mut text = name.to_string();
    text.make_ascii_lowercase();
    if text.ends_with('.') && !text.ends_with("\\.") {
        text.pop();
    }
    text
}

/// An answer that is only an error.
fn error(message: &Message<[u8]>, code: Rcode) -> Vec<u8> {
    let mut answer = MessageBuilder::new_vec().start_error(message, code);
    answer.header_mut().set_ra(true);
    answer.finish()
}

impl Question<'_> {
    /// An answer that is only an error.
    pub fn error(&self, code: Rcode) -> Vec<u8> {
        error(self.message, code)
    }

    /// The answer from local names; `None` if the name is unknown.
    pub fn own(&self, known: &Known) -> Option<Vec<u8>> {
        let code = match known {
            Known::Nothing => return None,
            Known::Absent => Rcode::NXDOMAIN,
            Known::Addresses(_) | Known::Name(_) => Rcode::NOERROR,
        };
        let mut answer = self.start(code)?;
        answer.header_mut().set_aa(true);
        let name = self.message.sole_question().ok()?;
        match known {
            Known::Addresses(addresses) => {
                for address in addresses {
                    match (address, self.kind) {
                        (IpAddr::V4(it), Rtype::A) => {
                            answer.push((name.qname(), OWN_TTL, A::new(*it))).ok()?;
                        }
                        (IpAddr::V6(it), Rtype::AAAA) => {
                            answer.push((name.qname(), OWN_TTL, Aaaa::new(*it))).ok()?;
                        }
                        _ => {}
                    }
                }
            }
            Known::Name(it) if self.kind == Rtype::PTR => {
                let to = Name::<Vec<u8>>::vec_from_str(it).ok()?;
                answer.push((name.qname(), OWN_TTL, Ptr::new(to))).ok()?;
            }
            _ => {}
        }
        Some(answer.finish().into_target())
    }

    /// The answer to a guest's question from a resolver's answer of this `age`, in at most `most`
    /// bytes. An answer that does not fit is truncated (TC), and the client asks again by TCP.
    pub fn relay(&self, resolved: &Resolved, age: Duration, most: usize) -> Option<Vec<u8>> {
        let source = Message::from_slice(&resolved.bytes).ok()?;
        let code = source.header().rcode();
        let age = u32::try_from(age.as_secs()).unwrap_or(u32::MAX);
        let whole = || -> Option<Vec<u8>> {
            let mut answer = self.start(code)?;
            answer.set_push_limit(most);
            let mut records = source.answer().ok()?;
            for record in &mut records {
                let record = record
                    .ok()?
                    .into_any_record::<AllRecordData<_, ParsedName<_>>>();
                let record = record.ok()?;
                let left = Ttl::from_secs(record.ttl().as_secs().saturating_sub(age));
                answer.push((record.owner(), left, record.data())).ok()?;
            }
            let mut answer = answer.authority();
            for record in records.next_section().ok()?? {
                let record = record
                    .ok()?
                    .into_any_record::<AllRecordData<_, ParsedName<_>>>();
                let record = record.ok()?;
                let left = Ttl::from_secs(record.ttl().as_secs().saturating_sub(age));
                answer.push((record.owner(), left, record.data())).ok()?;
            }
            Some(answer.finish().into_target())
        };
        whole().or_else(|| {
            let mut cut = self.start(code)?;
            cut.header_mut().set_tc(true);
            Some(cut.finish().into_target())
        })
    }

    fn start(&self, code: Rcode) -> Option<AnswerBuilder<Target>> {
        let builder = MessageBuilder::from_target(StaticCompressor::new(Vec::new())).ok()?;
        let mut answer = builder.start_answer(self.message, code).ok()?;
        answer.header_mut().set_ra(true);
        Some(answer)
    }

    /// The question for a resolver; only its name and type are taken from the guest.
    pub fn forward(&self, id: u16) -> Option<Vec<u8>> {
        let mut builder = MessageBuilder::new_vec();
        builder.header_mut().set_id(id);
        builder.header_mut().set_rd(true);
        let mut builder = builder.question();
        builder.push(self.message.sole_question().ok()?).ok()?;
        let mut builder = builder.additional();
        let sized = builder.opt(|opt| {
            opt.set_udp_payload_size(UDP_BYTES);
            Ok(())
        });
        sized.ok()?;
        Some(builder.finish())
    }

    /// Does the answer belong to the question of [`Question::forward`]?
    fn is_answered_by(&self, answer: &Message<[u8]>, id: u16) -> bool {
        let header = answer.header();
        let same = answer.sole_question().is_ok_and(|it| {
            it.qtype() == self.kind && it.qclass() == Class::IN && text(it.qname()) == self.name
        });
        header.qr() && header.id() == id && header.opcode() == Opcode::QUERY && same
    }
}

/// The answer of a resolver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    bytes: Vec<u8>,
    /// Its addresses and their TTLs.
    pub addresses: Vec<(IpAddr, Duration)>,
    /// The TTL of the whole answer.
    pub ttl: Duration,
    /// It is truncated (TC): the whole answer is available by TCP.
    pub cut: bool,
    /// The resolver failed or refused.
    pub failed: bool,
}

impl Resolved {
    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it is empty, which never happens.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Parses an answer; `None` if it does not answer this question, or is malformed.
pub fn read_answer(question: &Question, id: u16, bytes: &[u8]) -> Option<Resolved> {
    let message = Message::from_slice(bytes).ok()?;
    if !question.is_answered_by(message, id) {
        return None;
    }
    let cut = message.header().tc();
    let code = message.header().rcode();
    let failed = !matches!(code, Rcode::NOERROR | Rcode::NXDOMAIN);
    let mut addresses = Vec::new();
    let mut least = MAX_TTL;
    let mut any = false;
    if !cut {
        let mut records = message.answer().ok()?;
        for record in &mut records {
            let record = record
                .ok()?
                .into_any_record::<AllRecordData<_, ParsedName<_>>>();
            let record = record.ok()?;
            any = true;
            let ttl = record.ttl().as_secs().min(MAX_TTL);
            least = least.min(ttl);
            let address = match record.data() {
                AllRecordData::A(it) => IpAddr::V4(it.addr()),
                AllRecordData::Aaaa(it) => IpAddr::V6(it.addr()),
                _ => continue,
            };
            addresses.push((address, Duration::from_secs(ttl.into())));
        }
        if !any {
            least = ABSENT_TTL;
            for record in records.next_section().ok()?? {
                let record = record.ok()?;
                if let Some(soa) = record.into_record::<Soa<ParsedName<_>>>().ok()? {
                    let ttl = soa.ttl().as_secs().min(soa.data().minimum().as_secs());
                    least = ttl.min(MAX_ABSENT_TTL);
                }
            }
        }
    }
    Some(Resolved {
        bytes: bytes.to_vec(),
        addresses,
        ttl: Duration::from_secs(least.into()),
        cut,
        failed,
    })
}
