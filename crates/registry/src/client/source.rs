//! Source of an upload's bytes.

use std::io::{Read, Seek};

/// Bytes that can be read more than once, for a retry.
pub trait Source: Read + Seek {}

impl<T: Read + Seek> Source for T {}
