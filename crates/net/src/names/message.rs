//! Questions and answers (RFC 1035, RFC 6891).

use super::directory::Known;
use domain::base::iana::{Class, Opcode, Rcode, Rtype};
use domain::base::message_builder::{AnswerBuilder, MessageBuilder, StaticCompressor};
use domain::base::{Message, Name, ParsedName, Ttl};
use domain::rdata::{A, Aaaa, AllRecordData, Ptr, Soa};
use std::net::IpAddr;
use std::time::Duration;

/// The most bytes of a question: one name, and what EDNS adds.
pub const QUESTION_BYTES: usize = 1024;
/// The most bytes of an answer by UDP that the way is known to carry (DNS Flag Day 2020).
pub const UDP_BYTES: u16 = 1232;
/// The most of any answer.
pub const ANSWER_BYTES: usize = u16::MAX as usize;
/// Bytes that every asker by UDP takes (RFC 1035 §4.2.1).
const PLAIN_UDP_BYTES: u16 = 512;
/// How long guests keep what we know ourselves: a name may be another VM's soon.
const OWN_TTL: Ttl = Ttl::from_secs(5);
/// Answers are kept no longer, and those that say that there is nothing no longer than that.
const TTL_MOST: u32 = 3600;
const ABSENT_TTL_MOST: u32 = 300;
/// That there is nothing, where the answer does not say for how long.
const ABSENT_TTL: u32 = 5;

type Target = StaticCompressor<Vec<u8>>;

/// A question as it came.
#[derive(Debug, Clone)]
pub struct Question<'a> {
    message: &'a Message<[u8]>,
    /// The name, with neither capital letters nor a dot at its end.
    pub name: String,
    /// What of it is asked for.
    pub kind: Rtype,
    /// Bytes of the longest answer by UDP.
    pub udp_bytes: u16,
}

/// Why a question is not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bad {
    /// It deserves no answer: too short, or an answer itself.
    Silence,
    /// It is answered by an error.
    Answer(Vec<u8>),
}

/// Takes a question apart.
pub fn read(bytes: &[u8]) -> Result<Question<'_>, Bad> {
    let message = Message::from_slice(bytes).map_err(|_| Bad::Silence)?;
    let header = message.header();
    if header.qr() || bytes.len() > QUESTION_BYTES {
        return Err(Bad::Silence);
    }
    if header.opcode() != Opcode::QUERY {
        return Err(Bad::Answer(error(message, Rcode::NOTIMP)));
    }
    let wrong = || Bad::Answer(error(message, Rcode::FORMERR));
    let question = message.sole_question().map_err(|_| wrong())?;
    if question.qclass() != Class::IN {
        return Err(Bad::Answer(error(message, Rcode::REFUSED)));
    }
    // Transfers of zones, and all there is of a name: nobody needs them here.
    if matches!(question.qtype(), Rtype::AXFR | Rtype::IXFR | Rtype::ANY) {
        return Err(Bad::Answer(error(message, Rcode::NOTIMP)));
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

    /// The answer of what we know ourselves; `None`: nothing.
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

    /// What a resolver answered, for who asked this; of `age`, in at most `most` bytes. One
    /// that does not fit is cut, and says so: it is asked for again by TCP.
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

    /// The same question as we ask a resolver: nothing of the guest's but name and type.
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

    /// Is it the answer to what [`Question::forward`] asked?
    fn is_answered_by(&self, answer: &Message<[u8]>, id: u16) -> bool {
        let header = answer.header();
        let same = answer.sole_question().is_ok_and(|it| {
            it.qtype() == self.kind && it.qclass() == Class::IN && text(it.qname()) == self.name
        });
        header.qr() && header.id() == id && header.opcode() == Opcode::QUERY && same
    }
}

/// What a resolver answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    bytes: Vec<u8>,
    /// The addresses it gives, and how long each is good for.
    pub addresses: Vec<(IpAddr, Duration)>,
    /// How long all of it is good for.
    pub ttl: Duration,
    /// It is cut: by TCP there is more.
    pub cut: bool,
    /// The resolver could not do it (or would not).
    pub failed: bool,
}

impl Resolved {
    /// Bytes it takes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Are there no bytes? There always are.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Takes an answer apart; `None` if it is none to this question, or damaged.
pub fn read_answer(question: &Question, id: u16, bytes: &[u8]) -> Option<Resolved> {
    let message = Message::from_slice(bytes).ok()?;
    if !question.is_answered_by(message, id) {
        return None;
    }
    let cut = message.header().tc();
    let code = message.header().rcode();
    let failed = !matches!(code, Rcode::NOERROR | Rcode::NXDOMAIN);
    let mut addresses = Vec::new();
    let mut least = TTL_MOST;
    let mut any = false;
    if !cut {
        let mut records = message.answer().ok()?;
        for record in &mut records {
            let record = record
                .ok()?
                .into_any_record::<AllRecordData<_, ParsedName<_>>>();
            let record = record.ok()?;
            any = true;
            let ttl = record.ttl().as_secs().min(TTL_MOST);
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
                    least = ttl.min(ABSENT_TTL_MOST);
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
