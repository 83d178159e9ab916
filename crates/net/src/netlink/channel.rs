//! A netlink socket, and the kernel's answers on it.

use super::{ATTRIBUTE_HEADER, Batch, HEADER, TYPE_MASK, aligned};
use jiffy_sys::netlink::{NETFILTER, NetlinkSocket};
use std::io;

/// Message types below those of a family (netlink(7)).
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const FLAG_DUMP_INTERRUPTED: u16 = 0x10;
const FLAG_CAPPED: u16 = 0x100;
const FLAG_ACK_ATTRIBUTES: u16 = 0x200;
/// `NLMSGERR_ATTR_MSG`: the reason, as text (extended ACK).
const ATTR_MSG: u16 = 1;
/// How often a dump is repeated that the kernel interrupts because its objects change.
const DUMP_TRIES: usize = 8;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The kernel refused a message of the batch.
    #[error("the kernel refused it{}", reason(.text))]
    Refused {
        /// Index of the message in the batch.
        place: usize,
        /// The kernel's text beside the error number (extended ACK).
        text: Option<String>,
        /// The error number.
        #[source]
        error: io::Error,
    },
    /// The socket failed.
    #[error("the netlink socket failed")]
    Socket(#[source] io::Error),
    /// An answer violates the protocol.
    #[error("the kernel's answer can't be used: {0}")]
    Malformed(&'static str),
}

fn reason(text: &Option<String>) -> String {
    text.as_ref()
        .map(|it| format!(" ({it})"))
        .unwrap_or_default()
}

impl Refusal {
    /// The errno, if the kernel gave one.
    pub fn errno(&self) -> Option<rustix::io::Errno> {
        match self {
            Refusal::Refused { error, .. } | Refusal::Socket(error) => {
                rustix::io::Errno::from_io_error(error)
            }
            Refusal::Malformed(_) => None,
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal::Socket(error)
    }
}

/// A socket of one netlink family, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Channel {
    socket: NetlinkSocket,
    sequence: u32,
}

impl Channel {
    /// Links, addresses, routes, neighbours.
    ///
    /// # Errors
    ///
    /// If the socket can't be opened.
    pub fn route() -> io::Result<Channel> {
        Ok(Channel {
            socket: NetlinkSocket::open(None)?,
            sequence: 1,
        })
    }

    /// nftables and connection tracking.
    ///
    /// # Errors
    ///
    /// If the socket can't be opened.
    pub fn netfilter() -> io::Result<Channel> {
        Ok(Channel {
            socket: NetlinkSocket::open(Some(NETFILTER))?,
            sequence: 1,
        })
    }

    /// Sends a batch and waits for the acknowledgement of the message at `answered`, which must be
    /// the last that the kernel answers.
    ///
    /// # Errors
    ///
    /// If the kernel refuses a message: the first refusal. If the socket fails, or an answer is
    /// malformed or missing.
    pub fn transact(&mut self, mut batch: Batch, answered: usize) -> Result<(), Refusal> {
        if batch.is_empty() {
            return Ok(());
        }
        let first = self.sequence;
        self.sequence = first.wrapping_add(batch.len() as u32);
        batch.seal(first, answered);
        self.socket.send(&batch.bytes)?;
        let mut refusal = None;
        // After a refusal the kernel may send no further answers.
        while let Some(answer) = self.socket.receive(refusal.is_none())? {
            for message in Messages(answer) {
                let message = message?;
                let place = message.sequence.wrapping_sub(first) as usize;
                if message.kind != NLMSG_ERROR || place >= batch.len() {
                    continue;
                }
                match acknowledged(&message)? {
                    None if place == answered && refusal.is_none() => return Ok(()),
                    None => {}
                    Some((error, text)) => {
                        refusal.get_or_insert(Refusal::Refused { place, text, error });
                    }
                }
            }
        }
        Err(refusal.unwrap_or(Refusal::Malformed("the acknowledgement is missing")))
    }

    /// Requests a dump (`request` returns one request) and passes each message's type and body to
    /// the closure. If the objects change meanwhile (`NLM_F_DUMP_INTR`), the results are discarded
    /// and the dump is repeated.
    ///
    /// # Errors
    ///
    /// If the kernel or the closure refuses, the socket fails, an answer is malformed, or the
    /// objects changed during each of 8 dumps.
    pub fn dump<T>(
        &mut self,
        request: impl Fn() -> Batch,
        mut take: impl FnMut(u16, &[u8]) -> Result<Option<T>, Refusal>,
    ) -> Result<Vec<T>, Refusal> {
        for _ in 0..DUMP_TRIES {
            if let Some(list) = self.dump_once(request(), &mut take)? {
                return Ok(list);
            }
        }
        Err(Refusal::Malformed("a list changes faster than it is read"))
    }

    fn dump_once<T>(
        &mut self,
        mut request: Batch,
        take: &mut impl FnMut(u16, &[u8]) -> Result<Option<T>, Refusal>,
    ) -> Result<Option<Vec<T>>, Refusal> {
        let first = self.sequence;
        self.sequence = first.wrapping_add(1);
        request.seal(first, usize::MAX);
        self.socket.send(&request.bytes)?;
        let mut list = Vec::new();
        let mut whole = true;
        loop {
            let answer = self.socket.receive(true)?;
            let answer = answer.ok_or(Refusal::Malformed("it is empty"))?;
            for message in Messages(answer) {
                let message = message?;
                if message.sequence != first {
                    continue;
                }
                whole &= message.flags & FLAG_DUMP_INTERRUPTED == 0;
                match message.kind {
                    NLMSG_DONE => return Ok(whole.then_some(list)),
                    NLMSG_ERROR => {
                        if let Some((error, text)) = acknowledged(&message)? {
                            let place = 0;
                            return Err(Refusal::Refused { place, text, error });
                        }
                    }
                    kind => list.extend(take(kind, message.body)?),
                }
            }
        }
    }

    /// Requests one object (`request` is one request without `NLM_F_DUMP`); `None` if it does not
    /// exist.
    ///
    /// # Errors
    ///
    /// If the kernel or the closure refuses, the socket fails, or an answer is malformed.
    pub fn get<T>(
        &mut self,
        mut request: Batch,
        take: impl FnOnce(u16, &[u8]) -> Result<T, Refusal>,
    ) -> Result<Option<T>, Refusal> {
        let first = self.sequence;
        self.sequence = first.wrapping_add(1);
        request.seal(first, usize::MAX);
        self.socket.send(&request.bytes)?;
        loop {
            let answer = self.socket.receive(true)?;
            let answer = answer.ok_or(Refusal::Malformed("it is empty"))?;
            for message in Messages(answer) {
                let message = message?;
                if message.sequence != first {
                    continue;
                }
                if message.kind != NLMSG_ERROR {
                    return take(message.kind, message.body).map(Some);
                }
                match acknowledged(&message)? {
                    Some((error, _))
                        if rustix::io::Errno::from_io_error(&error)
                            == Some(rustix::io::Errno::NOENT) =>
                    {
                        return Ok(None);
                    }
                    Some((error, text)) => {
                        return Err(Refusal::Refused {
                            place: 0,
                            text,
                            error,
                        });
                    }
                    None => return Ok(None),
                }
            }
        }
    }
}

/// One message of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// Its type.
    pub kind: u16,
    /// `NLM_F_*`.
    pub flags: u16,
    /// Number of the request.
    pub sequence: u32,
    /// The body after the header.
    pub body: &'a [u8],
}

/// The messages of a datagram.
pub struct Messages<'a>(pub &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = self.0;
        if bytes.is_empty() {
            return None;
        }
        let number = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let half = |at: usize| Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let message = (|| {
            let length = number(0)? as usize;
            Some(Message {
                kind: half(4)?,
                flags: half(6)?,
                sequence: number(8)?,
                body: bytes.get(HEADER..length)?,
            })
        })();
        self.0 = match message {
            Some(it) => bytes.get(aligned(HEADER + it.body.len())..).unwrap_or(&[]),
            None => &[],
        };
        Some(message.ok_or(Refusal::Malformed("a message is longer than its datagram")))
    }
}

/// The attributes of a body: type without flags, and value.
pub struct AttributeIter<'a>(pub &'a [u8]);

impl<'a> Iterator for AttributeIter<'a> {
    type Item = (u16, &'a [u8]);

    /// Ends at the first attribute that does not fit.
    fn next(&mut self) -> Option<Self::Item> {
        let bytes = self.0;
        let length = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?) as usize;
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & TYPE_MASK;
        let value = bytes.get(ATTRIBUTE_HEADER..length)?;
        self.0 = bytes.get(aligned(length)..).unwrap_or(&[]);
        Some((kind, value))
    }
}

/// The value of the first attribute of that type.
pub fn find(body: &[u8], kind: u16) -> Option<&[u8]> {
    AttributeIter(body)
        .find(|(it, _)| *it == kind)
        .map(|(_, value)| value)
}

/// The contents of an `NLMSG_ERROR`: none for a success, otherwise an error number and a text.
fn acknowledged(message: &Message) -> Result<Option<(io::Error, Option<String>)>, Refusal> {
    let short = Refusal::Malformed("an error without a number");
    let number = message.body.get(..4).ok_or(short)?;
    let code = i32::from_ne_bytes(number.try_into().unwrap_or_default());
    if code == 0 {
        return Ok(None);
    }
    let number = code.checked_neg().filter(|it| *it > 0 && *it < 4096);
    let number = number.ok_or(Refusal::Malformed("an error number out of range"))?;
    let text = (message.flags & FLAG_ACK_ATTRIBUTES != 0)
        .then(|| {
            // The header of the request, followed by its payload unless the answer is capped
            // (`NLM_F_CAPPED`).
            let request = message.body.get(4..)?;
            let length = u32::from_ne_bytes(request.get(..4)?.try_into().ok()?) as usize;
            let skipped = if message.flags & FLAG_CAPPED != 0 {
                HEADER
            } else {
                aligned(length)
            };
            let text = find(request.get(skipped..)?, ATTR_MSG)?;
            let text = text.strip_suffix(&[0]).unwrap_or(text);
            Some(String::from_utf8_lossy(text).into_owned())
        })
        .flatten();
    Ok(Some((io::Error::from_raw_os_error(number), text)))
}
