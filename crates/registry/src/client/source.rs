//! What a blob is sent from.

use std::io::{Read, Seek};

/// Bytes that can be read more than once, for a retry.
pub trait Source: Read + Seek {}

impl<T: Read + Seek> Source for T {}
