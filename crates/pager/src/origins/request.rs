//! The protocol between the pager and `jiffy-origins`.
//!
//! Over the channel that the program is started with ([`CHANNEL`]) the pager sends connections: a
//! byte with a socket attached. On each of them it sends one [`Request`] at a time, a line of JSON,
//! and gets one [`Answer`], a line of JSON. The bytes come as the descriptor of sealed memory
//! (`jiffy_sys::sealed`) with it, so that they are not copied. A connection that is closed cancels
//! its request.

use jiffy_wire::pager::Origin;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Number of the channel's descriptor in `jiffy-origins`.
pub const CHANNEL: i32 = 3;
/// Longest line of either, bytes.
pub const MAX_LINE: u64 = 64 << 10;
/// Most bytes of a request.
pub const MAX_FETCH: u64 = 1 << 28;
/// Most bytes that are read before the requested ones, to verify them.
pub const MAX_BEFORE: u64 = 1 << 20;
/// Slowest rate at which bytes of an origin are waited for, bytes per second.
pub const MIN_RATE: u64 = 64 << 10;

/// Bytes of an image's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// What to read from.
    pub origin: Origin,
    /// The number that the pager gave to this description; `jiffy-origins` caches files by number.
    pub number: u64,
    /// The image's id.
    pub id: [u8; 16],
    /// The image's file here.
    pub here: PathBuf,
    /// The first byte.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// All bytes are in the memory that is attached.
    Bytes {
        /// From this byte of the memory on.
        offset: u64,
    },
    /// There are none.
    Failed {
        /// As in [`OriginError`](jiffy_store::OriginError).
        why: String,
        /// Likewise.
        again: bool,
    },
}

/// The confined process of `jiffy-origins` asks the other for a helper's credentials: one message,
/// with a socket for the answer attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelperRequest {
    /// `NAME` in `docker-credential-NAME`.
    pub name: String,
    /// `HOST[:PORT]`.
    pub registry: String,
}
