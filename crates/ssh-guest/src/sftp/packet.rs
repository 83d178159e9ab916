//! Fields of requests and answers.

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Version of the protocol.
pub const VERSION: u32 = 3;

/// Longest request, in bytes; OpenSSH's limit.
pub const MAX_REQUEST: usize = 256 * 1024;

/// Types of packets.
pub mod kind {
    #![allow(missing_docs, reason = "the names are the specification's")]

    pub const INIT: u8 = 1;
    pub const VERSION: u8 = 2;
    pub const OPEN: u8 = 3;
    pub const CLOSE: u8 = 4;
    pub const READ: u8 = 5;
    pub const WRITE: u8 = 6;
    pub const LSTAT: u8 = 7;
    pub const FSTAT: u8 = 8;
    pub const SETSTAT: u8 = 9;
    pub const FSETSTAT: u8 = 10;
    pub const OPENDIR: u8 = 11;
    pub const READDIR: u8 = 12;
    pub const REMOVE: u8 = 13;
    pub const MKDIR: u8 = 14;
    pub const RMDIR: u8 = 15;
    pub const REALPATH: u8 = 16;
    pub const STAT: u8 = 17;
    pub const RENAME: u8 = 18;
    pub const READLINK: u8 = 19;
    pub const SYMLINK: u8 = 20;
    pub const STATUS: u8 = 101;
    pub const HANDLE: u8 = 102;
    pub const DATA: u8 = 103;
    pub const NAME: u8 = 104;
    pub const ATTRS: u8 = 105;
    pub const EXTENDED: u8 = 200;
    pub const EXTENDED_REPLY: u8 = 201;
}

/// Flags: which attributes follow.
mod attribute {
    pub const SIZE: u32 = 1;
    pub const OWNER: u32 = 2;
    pub const MODE: u32 = 4;
    pub const TIMES: u32 = 8;
}

/// Why a request failed.
#[derive(Debug)]
pub enum Failed {
    /// The end of a file or folder.
    End,
    /// The request is not valid.
    BadMessage,
    /// There is no such request.
    Unsupported,
    /// There is no such handle, or there are too many.
    Handle,
    /// A system call failed.
    Io(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Failed {
        Failed::Io(error)
    }
}

impl From<rustix::io::Errno> for Failed {
    fn from(error: rustix::io::Errno) -> Failed {
        Failed::Io(error.into())
    }
}

impl Failed {
    /// The answer to the request with this id.
    pub fn answer(&self, id: u32) -> Answer {
        let (code, text) = match self {
            Failed::End => (1, "End of file".to_owned()),
            Failed::BadMessage => (5, "Bad message".to_owned()),
            Failed::Unsupported => (8, "Operation unsupported".to_owned()),
            Failed::Handle => (4, "No such handle".to_owned()),
            Failed::Io(error) => {
                let code = match error.kind() {
                    ErrorKind::NotFound | ErrorKind::NotADirectory => 2,
                    ErrorKind::PermissionDenied => 3,
                    _ => 4,
                };
                (code, error.to_string())
            }
        };
        Answer::status(id, code, &text)
    }
}

/// The fields of a request, one after the other. Each is `None` if the request is too short.
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// The fields in these bytes.
    pub fn new(bytes: &'a [u8]) -> Fields<'a> {
        Fields(bytes)
    }

    /// One byte.
    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// 32 bits.
    pub fn number(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*first))
    }

    /// 64 bits.
    pub fn long(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_be_bytes(*first))
    }

    /// Bytes with their length before them.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()? as usize;
        let (first, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(first)
    }

    /// A path; the empty one is the working directory.
    pub fn path(&mut self) -> Option<&'a Path> {
        Some(match self.bytes()? {
            b"" => Path::new("."),
            bytes => Path::new(OsStr::from_bytes(bytes)),
        })
    }

    /// Attributes; additions of versions after 3 are ignored.
    pub fn attributes(&mut self) -> Option<Attributes> {
        let flags = self.number()?;
        let has = |flag| flags & flag != 0;
        Some(Attributes {
            size: if has(attribute::SIZE) {
                Some(self.long()?)
            } else {
                None
            },
            owner: match has(attribute::OWNER) {
                true => Some((self.number()?, self.number()?)),
                false => None,
            },
            mode: if has(attribute::MODE) {
                Some(self.number()?)
            } else {
                None
            },
            times: match has(attribute::TIMES) {
                true => Some((self.number()?, self.number()?)),
                false => None,
            },
        })
    }
}

/// Attributes that a client sets.
#[derive(Debug, Default, Clone, Copy)]
pub struct Attributes {
    /// Size in bytes.
    pub size: Option<u64>,
    /// User id and group id.
    pub owner: Option<(u32, u32)>,
    /// Type and permission bits.
    pub mode: Option<u32>,
    /// Last access and modification, seconds since 1970.
    pub times: Option<(u32, u32)>,
}

/// An answer. Its length is filled in at the end.
#[derive(Debug)]
pub struct Answer(Vec<u8>);

impl Answer {
    /// An answer of this type.
    pub fn new(kind: u8) -> Answer {
        Answer(vec![0, 0, 0, 0, kind])
    }

    /// An answer of this type to the request with this id.
    pub fn to(id: u32, kind: u8) -> Answer {
        let mut answer = Answer::new(kind);
        answer.number(id);
        answer
    }

    /// A status.
    pub fn status(id: u32, code: u32, text: &str) -> Answer {
        let mut answer = Answer::to(id, kind::STATUS);
        answer.number(code);
        answer.text(text);
        answer.text("en");
        answer
    }

    /// Success without a result.
    pub fn done(id: u32) -> Answer {
        Answer::status(id, 0, "Success")
    }

    /// 32 bits.
    pub fn number(&mut self, number: u32) {
        self.0.extend(number.to_be_bytes());
    }

    /// 64 bits.
    pub fn long(&mut self, number: u64) {
        self.0.extend(number.to_be_bytes());
    }

    /// Bytes with their length before them.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u32);
        self.0.extend(bytes);
    }

    /// A text.
    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    /// Names with attributes.
    pub fn names(&mut self, names: &[(OsString, Option<Metadata>)]) {
        self.number(names.len() as u32);
        for (name, facts) in names {
            self.bytes(name.as_bytes());
            match facts {
                Some(facts) => {
                    let mut line = super::listing::listing(facts).into_bytes();
                    line.extend(name.as_bytes());
                    self.bytes(&line);
                    self.attributes(facts);
                }
                None => {
                    self.bytes(name.as_bytes());
                    self.number(0);
                }
            }
        }
    }

    /// The attributes of a file. Times outside 1970 to 2106 become the nearest.
    pub fn attributes(&mut self, facts: &Metadata) {
        let time = |seconds: i64| seconds.clamp(0, u32::MAX.into()) as u32;
        self.number(attribute::SIZE | attribute::OWNER | attribute::MODE | attribute::TIMES);
        self.long(facts.size());
        self.number(facts.uid());
        self.number(facts.gid());
        self.number(facts.mode());
        self.number(time(facts.atime()));
        self.number(time(facts.mtime()));
    }

    /// The bytes for the client.
    pub fn into_bytes(mut self) -> Vec<u8> {
        let length = (self.0.len() - 4) as u32;
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0
    }
}
