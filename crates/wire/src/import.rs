//! Messages between the node and `jiffy-import`, which makes images of layers and archives.
//!
//! The node starts one process for each image and hands it open files ([`FIRST_FILE`]); their
//! number is in the request. On the channel, a stream socket, the node sends one [`Request`]. The
//! process sends any number of [`Answer::Progress`], then one other [`Answer`], and ends.
//!
//! A message is a length (u32, little endian), then that many bytes: [`VERSION`] (u32, little
//! endian), then the message, encoded by postcard. The node does not trust the process: a message is
//! refused by its length before any of it is stored, must use all of its bytes, and its lists and
//! texts have limits.

use crate::api::ImportKind;
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

/// Version of these messages. A process that gets another one refuses the request: the node may be
/// of another release than its programs.
pub const VERSION: u32 = 1;
/// Number of the channel's descriptor in the process.
pub const CHANNEL: i32 = 3;
/// Number of the image's descriptor, a new file, open for reading and writing.
pub const IMAGE: i32 = 4;
/// Numbers of the descriptors of unnamed files for temporary data begin here; there are [`SCRATCH`].
pub const FIRST_SCRATCH: i32 = 5;
/// How many temporary files an import needs at most: an archive, what is packed in it, and its
/// packed layers.
pub const SCRATCH: usize = 3;
/// Numbers of the descriptors of what is imported begin here.
pub const FIRST_FILE: i32 = FIRST_SCRATCH + SCRATCH as i32;
/// Most layers of an image.
pub const MAX_LAYERS: usize = 1024;
/// Longest message, bytes: the configuration of an image has up to 4 MiB, and a range of ports in it
/// becomes a list.
pub const MAX_MESSAGE: usize = 8 << 20;
/// Longest sentence of a [`Failure`], bytes.
pub const MAX_SENTENCE: usize = 16 << 10;

/// What to import.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The source, in the files from [`FIRST_FILE`] on.
    pub source: Source,
    /// The folder of the temporary files, for messages.
    pub folder: String,
}

/// The source of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Layers of a registry, the lowest first: one file for each.
    Layers {
        /// The image's configuration, JSON.
        #[serde(with = "serde_bytes")]
        config: Vec<u8>,
        /// The layers.
        layers: Vec<Layer>,
    },
    /// One file: a pipe with an archive.
    Archive {
        /// The image's name or tag, where an archive has several.
        reference: Option<String>,
        /// Its format; `None` to detect it.
        format: Option<ImportKind>,
    },
    /// Two files: an image, and a tar of the changes that a VM made on it.
    Changes {
        /// The parent's path, for messages.
        parent: String,
        /// The tar's path, for messages.
        changes: String,
    },
}

impl Source {
    /// How many files the process needs for it.
    pub fn files(&self) -> usize {
        match self {
            Source::Layers { layers, .. } => layers.len(),
            Source::Archive { .. } => 1,
            Source::Changes { .. } => 2,
        }
    }
}

/// A layer that was fetched and checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Its path, for messages.
    pub name: String,
    /// Its media type in the manifest.
    pub media_type: String,
    /// Its size in the manifest, bytes.
    pub size: u64,
}

/// A message of the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Bytes that were read of the layers, or written of the image.
    Progress {
        /// Bytes so far.
        done: u64,
        /// All bytes.
        total: u64,
    },
    /// The image is written, but not synced. Its size and its digest are those of the file.
    Made(Made),
    /// Nothing can be made of the source.
    Failed(Failure),
}

/// What is known of a new image besides its bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// Files, folders, links, devices and whiteouts that the source has.
    pub entries: u64,
    /// It begins with its parent's bytes.
    pub shares: bool,
    /// The image's configuration.
    pub config: Config,
}

/// The configuration of an image, as `wire::api::ImageConfig` has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// The program and its first arguments.
    pub entrypoint: Vec<String>,
    /// More arguments, or the command.
    pub cmd: Vec<String>,
    /// `NAME=VALUE`.
    pub env: Vec<String>,
    /// The working directory; empty if there is none.
    pub workdir: String,
    /// The user; empty if there is none.
    pub user: String,
    /// The signal that stops the program.
    pub stop_signal: Option<String>,
    /// Ports, as in `80/tcp`.
    pub exposed_ports: Vec<String>,
    /// Labels.
    pub labels: Vec<(String, String)>,
}

/// Why there is no image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Its kind.
    pub kind: FailureKind,
    /// The reason: one sentence without its first capital letter and full stop.
    pub sentence: String,
}

/// Kinds of failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// The source is not acceptable.
    Source,
    /// The disk is full.
    Full,
    /// The process itself failed: it can't be confined, or has a bug.
    Process,
}

/// Why a message was refused.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageError {
    /// It is longer than [`MAX_MESSAGE`].
    #[error("a message of {0} bytes is over the limit of {MAX_MESSAGE}")]
    TooLong(usize),
    /// It has another version.
    #[error("a message has version {0}, expected {VERSION}")]
    Version(u32),
    /// Its bytes are not a message of the expected type, or one of its texts is too long.
    #[error("a message of {0} bytes is not valid")]
    Malformed(usize),
}

/// Encodes a message, with its length.
///
/// # Errors
///
/// If the message can't be encoded, or has more than [`MAX_MESSAGE`] bytes.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    let body = postcard::to_allocvec(message).map_err(|_| MessageError::Malformed(0))?;
    let length = body.len() + 4;
    if length > MAX_MESSAGE {
        return Err(MessageError::TooLong(length));
    }
    let mut bytes = Vec::with_capacity(4 + length);
    bytes.extend_from_slice(&(length as u32).to_le_bytes());
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// The length, in bytes, of the message that follows these four bytes.
///
/// # Errors
///
/// If the length is less than 4, which the version takes, or more than [`MAX_MESSAGE`].
pub fn length(bytes: [u8; 4]) -> Result<usize, MessageError> {
    let length = u32::from_le_bytes(bytes) as usize;
    match length {
        4..=MAX_MESSAGE => Ok(length),
        0..4 => Err(MessageError::Malformed(length)),
        _ => Err(MessageError::TooLong(length)),
    }
}

/// The request in a message, without its length.
///
/// # Errors
///
/// If the version is not [`VERSION`], the bytes are not one request, or it needs more than
/// [`MAX_LAYERS`] files.
pub fn decode_request(bytes: &[u8]) -> Result<Request, MessageError> {
    let request: Request = decode(bytes)?;
    match request.source.files() <= MAX_LAYERS {
        true => Ok(request),
        false => Err(MessageError::Malformed(bytes.len())),
    }
}

/// The answer in a message, without its length.
///
/// # Errors
///
/// If the version is not [`VERSION`], the bytes are not one answer, or its sentence has more than
/// [`MAX_SENTENCE`] bytes.
pub fn decode_answer(bytes: &[u8]) -> Result<Answer, MessageError> {
    match decode(bytes)? {
        Answer::Failed(failure) if failure.sentence.len() > MAX_SENTENCE => {
            Err(MessageError::Malformed(bytes.len()))
        }
        answer => Ok(answer),
    }
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    let malformed = MessageError::Malformed(bytes.len());
    let (version, body) = bytes.split_first_chunk().ok_or(malformed)?;
    let version = u32::from_le_bytes(*version);
    if version != VERSION {
        return Err(MessageError::Version(version));
    }
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(malformed),
    }
}

#[cfg(test)]
mod tests;
