//! Requests and answers of FUSE as bytes.
//!
//! Source: Linux `include/uapi/linux/fuse.h`, version 7.41. Numbers are in the host's byte order,
//! which is the guest's.

use jiffy_wire::files::MESSAGE_MAX;
use rustix::io::Errno;
use std::ffi::CStr;

/// The result of one request; the error is what the guest's program gets.
pub type Outcome<T> = Result<T, Errno>;

/// Bytes of `fuse_in_header`.
pub const HEADER: usize = 40;
/// Bytes of `fuse_out_header`.
pub const ANSWER_HEADER: usize = 16;
/// Longest name of a file, bytes.
const NAME_MAX: usize = 255;
/// Longest target of a symbolic link, bytes.
const TARGET_MAX: usize = 4095;

/// Numbers of requests.
#[expect(missing_docs, reason = "fuse.h describes them")]
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const TMPFILE: u32 = 51;
}

/// `fuse_in_header`.
#[derive(Debug, Clone, Copy)]
pub struct Header {
    /// Length of the whole message, as it claims.
    pub length: u32,
    /// Number of the request's kind ([`opcode`]).
    pub opcode: u32,
    /// Number of the request.
    pub unique: u64,
    /// The file or folder it is about.
    pub node: u64,
    /// User id of the guest's process.
    pub user: u32,
    /// Group id of the guest's process.
    pub group: u32,
}

impl Header {
    /// The header of a message; `None` if it is not complete.
    pub fn of(message: &[u8]) -> Option<Header> {
        let mut fields = Arguments(message.get(..HEADER)?);
        let mut header = || {
            Ok::<_, Errno>(Header {
                length: fields.u32()?,
                opcode: fields.u32()?,
                unique: fields.u64()?,
                node: fields.u64()?,
                user: fields.u32()?,
                group: fields.u32()?,
            })
        };
        header().ok()
    }

    /// Whether a request of this kind is answered.
    pub fn is_answered(&self) -> bool {
        ![opcode::FORGET, opcode::BATCH_FORGET, opcode::INTERRUPT].contains(&self.opcode)
    }
}

/// What follows the header, read from the front. `EINVAL` if it is too short.
#[derive(Debug, Clone, Copy)]
pub struct Arguments<'a>(pub &'a [u8]);

impl<'a> Arguments<'a> {
    fn take<const N: usize>(&mut self) -> Outcome<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(*taken)
    }

    /// A number of 32 bits.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there are fewer bytes.
    pub fn u32(&mut self) -> Outcome<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    /// A number of 64 bits.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there are fewer bytes.
    pub fn u64(&mut self) -> Outcome<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// So many bytes.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there are fewer.
    pub fn bytes(&mut self, length: usize) -> Outcome<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(taken)
    }

    /// Passes over a field of 32 bits.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there are fewer bytes.
    pub fn skip(&mut self) -> Outcome<()> {
        self.u32().map(drop)
    }

    /// Text that ends with zero.
    fn text(&mut self, longest: usize) -> Outcome<&'a CStr> {
        let text = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        let length = text.count_bytes();
        if length > longest {
            return Err(Errno::NAMETOOLONG);
        }
        self.0 = self.0.get(length + 1..).ok_or(Errno::INVAL)?;
        Ok(text)
    }

    /// The name of something in a folder. The guest's kernel resolves paths, and the server never
    /// does.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is empty, `.`, `..`, contains `/` or does not end; `ENAMETOOLONG` if it is
    /// longer than 255 bytes.
    pub fn name(&mut self) -> Outcome<&'a CStr> {
        let name = self.text(NAME_MAX)?;
        match name.to_bytes() {
            b"" | b"." | b".." => Err(Errno::INVAL),
            bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
            _ => Ok(name),
        }
    }

    /// The target of a symbolic link: any text, which only the guest follows.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it does not end, `ENAMETOOLONG` if it is longer than 4095 bytes.
    pub fn target(&mut self) -> Outcome<&'a CStr> {
        self.text(TARGET_MAX)
    }

    /// The name of an extended attribute.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it does not end, `ENAMETOOLONG` if it is longer than 255 bytes.
    pub fn attribute_name(&mut self) -> Outcome<&'a CStr> {
        self.text(NAME_MAX)
    }

    /// Everything else.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    ///
    /// `EINVAL` if something is.
    pub fn end(self) -> Outcome<()> {
        match self.0 {
            [] => Ok(()),
            _ => Err(Errno::INVAL),
        }
    }
}

/// The buffer of an answer, used for one after another.
#[derive(Debug)]
pub struct Answer {
    bytes: Vec<u8>,
    length: usize,
}

impl Default for Answer {
    fn default() -> Answer {
        Answer {
            bytes: vec![0; MESSAGE_MAX],
            length: ANSWER_HEADER,
        }
    }
}

impl Answer {
    /// Begins a new answer.
    pub fn clear(&mut self) {
        self.length = ANSWER_HEADER;
    }

    /// Bytes of payload so far.
    pub fn payload(&self) -> usize {
        self.length - ANSWER_HEADER
    }

    /// Appends bytes.
    ///
    /// # Errors
    ///
    /// `EIO` if the message becomes too long.
    pub fn put(&mut self, bytes: &[u8]) -> Outcome<()> {
        self.fill(bytes.len(), |place| {
            place.copy_from_slice(bytes);
            Ok(bytes.len())
        })
        .map(drop)
    }

    /// Appends a number of 32 bits.
    ///
    /// # Errors
    ///
    /// `EIO` if the message becomes too long.
    pub fn put_u32(&mut self, number: u32) -> Outcome<()> {
        self.put(&number.to_ne_bytes())
    }

    /// Appends a number of 64 bits.
    ///
    /// # Errors
    ///
    /// `EIO` if the message becomes too long.
    pub fn put_u64(&mut self, number: u64) -> Outcome<()> {
        self.put(&number.to_ne_bytes())
    }

    /// Appends up to `most` bytes that the function writes; it returns how many. Returns the same.
    ///
    /// # Errors
    ///
    /// That of the function; `EIO` if the message could become too long.
    pub fn fill(
        &mut self,
        most: usize,
        write: impl FnOnce(&mut [u8]) -> Outcome<usize>,
    ) -> Outcome<usize> {
        let place = self.bytes.get_mut(self.length..).ok_or(Errno::IO)?;
        let written = write(place.get_mut(..most).ok_or(Errno::IO)?)?;
        self.length += written.min(most);
        Ok(written)
    }

    /// The message that answers this request: with the payload, or with the error alone.
    pub fn finish(&mut self, unique: u64, outcome: Outcome<()>) -> &[u8] {
        let error = outcome.map_or_else(|error| -error.raw_os_error(), |()| 0);
        if error != 0 {
            self.clear();
        }
        let length = self.length as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[4..8].copy_from_slice(&error.to_ne_bytes());
        self.bytes[8..ANSWER_HEADER].copy_from_slice(&unique.to_ne_bytes());
        &self.bytes[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_no_names_are_refused() {
        let name = |bytes: &'static [u8]| Arguments(bytes).name();
        assert_eq!(name(b"a b\0"), Ok(c"a b"));
        for bad in [&b""[..], b"\0", b".\0", b"..\0", b"a/b\0", b"/\0", b"abc"] {
            assert_eq!(name(bad), Err(Errno::INVAL), "{bad:?}");
        }
        let (longest, longer) = ([b'a'; 255], [b'a'; 256]);
        let of = |bytes: &[u8]| [bytes, b"\0"].concat();
        assert_eq!(Arguments(&of(&longest)).name().unwrap().to_bytes(), longest);
        assert_eq!(Arguments(&of(&longer)).name(), Err(Errno::NAMETOOLONG));
    }

    #[test]
    fn an_answer_is_never_longer_than_a_message() {
        let mut answer = Answer::default();
        let most = MESSAGE_MAX - ANSWER_HEADER;
        assert_eq!(answer.put(&vec![1; most + 1]), Err(Errno::IO));
        answer.put(&vec![1; most]).unwrap();
        assert_eq!(answer.put_u32(1), Err(Errno::IO));
        assert_eq!(answer.finish(7, Ok(())).len(), MESSAGE_MAX);
        let error = answer.finish(7, Err(Errno::PERM));
        assert_eq!(error[..8], [16, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(error.len(), 16);
    }
}
