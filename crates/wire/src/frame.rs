//! Frames on a byte stream: a length (u32, little endian) and that many bytes of one
//! postcard-encoded message.
//!
//! Both ends may be hostile. A frame is refused by its length before any of it is stored, and a
//! message must use all bytes of its frame.

use alloc::vec::Vec;
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;

/// Largest frame, bytes, without the length field.
pub const MAX_FRAME: usize = 256 * 1024;
/// Most bytes of file or terminal data in one message.
pub const MAX_DATA: usize = 64 * 1024;

/// Why a frame was refused.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// The length field, or the message to send, is larger than [`MAX_FRAME`].
    #[error("a frame of {0} bytes is over the limit of {MAX_FRAME}")]
    TooLarge(usize),
    /// The bytes are not a message of the expected type.
    #[error("a frame of {0} bytes is not a valid message")]
    Malformed(usize),
}

/// Appends `message` as a frame to `out`.
///
/// # Errors
///
/// If the message can't be encoded, or has more than [`MAX_FRAME`] bytes. `out` is then unchanged.
pub fn encode<T: Serialize>(message: &T, out: &mut Vec<u8>) -> Result<(), FrameError> {
    let body = postcard::to_allocvec(message).map_err(|_| FrameError::Malformed(0))?;
    if body.len() > MAX_FRAME {
        return Err(FrameError::TooLarge(body.len()));
    }
    out.reserve(4 + body.len());
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&body);
    Ok(())
}

/// Encodes one message as a frame.
///
/// # Errors
///
/// If the message can't be encoded, or has more than [`MAX_FRAME`] bytes.
pub fn to_vec<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut out = Vec::new();
    encode(message, &mut out)?;
    Ok(out)
}

/// Splits a byte stream into messages. After an error the connection must be closed, because frame
/// boundaries are lost.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    read: usize,
}

impl Decoder {
    /// An empty decoder.
    pub fn new() -> Decoder {
        Decoder::default()
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.read == self.buffer.len() {
            self.buffer.clear();
            self.read = 0;
        } else if self.read > MAX_FRAME {
            self.buffer.drain(..self.read);
            self.read = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Number of bytes of an incomplete frame.
    pub fn pending(&self) -> usize {
        self.buffer.len() - self.read
    }

    /// Takes all bytes that are not decoded yet, for a stream that changes its protocol.
    pub fn into_rest(mut self) -> Vec<u8> {
        self.buffer.split_off(self.read)
    }

    /// The next message; `None` if it is not complete yet.
    ///
    /// # Errors
    ///
    /// If the frame is longer than [`MAX_FRAME`] bytes, or is not one message of this type.
    #[allow(clippy::should_implement_trait)] // the type is chosen at each call
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let waiting = &self.buffer[self.read..];
        let Some((length, rest)) = waiting.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_FRAME {
            return Err(FrameError::TooLarge(length));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let (message, left) =
            postcard::take_from_bytes(body).map_err(|_| FrameError::Malformed(length))?;
        if !left.is_empty() {
            return Err(FrameError::Malformed(length));
        }
        self.read += 4 + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{ExecOutput, Stream};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_stream_split_anywhere_gives_the_same_messages(
            bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..20),
            cut in 1usize..50,
        ) {
            let sent: Vec<ExecOutput> = bodies
                .into_iter()
                .map(|data| ExecOutput::Output { stream: Stream::Stdout, data })
                .collect();
            let mut bytes = Vec::new();
            for message in &sent {
                encode(message, &mut bytes).unwrap();
            }
            let mut decoder = Decoder::new();
            let mut got = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.push(piece);
                while let Some(message) = decoder.next::<ExecOutput>().unwrap() {
                    got.push(message);
                }
            }
            prop_assert_eq!(got, sent);
            prop_assert_eq!(decoder.pending(), 0);
        }

        #[test]
        fn garbage_is_refused_or_waits_but_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut decoder = Decoder::new();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next::<crate::agent::FromGuest>() {}
        }
    }

    #[test]
    fn an_oversized_length_is_refused_before_its_data_arrives() {
        let mut decoder = Decoder::new();
        decoder.push(&(MAX_FRAME as u32 + 1).to_le_bytes());
        assert_eq!(
            decoder.next::<ExecOutput>(),
            Err(FrameError::TooLarge(MAX_FRAME + 1))
        );
    }

    #[test]
    fn bytes_left_over_in_a_frame_are_an_error() {
        let mut bytes = to_vec(&ExecOutput::Started { pid: 1 }).unwrap();
        bytes[0] += 1;
        bytes.push(0);
        let mut decoder = Decoder::new();
        decoder.push(&bytes);
        assert!(matches!(
            decoder.next::<ExecOutput>(),
            Err(FrameError::Malformed(_))
        ));
    }
}
